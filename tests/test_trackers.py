"""Trackers: what TensorBoard, W&B and trackio get of a run, and what happens when one fails."""

from __future__ import annotations

import contextlib
import json
import math
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launch import ROOT
from vireo.errors import InputError
from vireo.report import run_folder, trackers
from vireo.report.run_folder import RunFolder
from vireo.report.trackers import choose
from vireo.settings import load_settings

TRAIN = {"step": 1, "loss": 0.5, "lr": 1e-5, "tokens": 12, "note": "text", "ok": True}
EVAL = {"step": 2, "eval_loss": 0.25, "eval_exact_match": 1.0}
ANSWERS = [
    {"row": "val.json:1", "prompt": "2 | 3?\nSay.", "expected": "2", "answer": "2", "correct": True}
]


@pytest.fixture
def open_folder(monkeypatch, tmp_path):
    """Opens the run folder `tmp_path`/run as a trainer does."""
    monkeypatch.setattr(run_folder, "environment", dict)  # it would import torch

    def _open(*flags: str, active: bool = True, resumed_at: int | None = None) -> RunFolder:
        settings = load_settings(["--model_name_or_path=m", *flags])
        return RunFolder(tmp_path / "run", settings, active, resumed_at)

    return _open


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """Puts a package in place of trackio that keeps its calls, and fails where it is told to."""
    code = (
        "calls, fails = [], set()\n"
        "def note(call, *args, **kwargs):\n"
        "    calls.append((call, args, kwargs))\n"
        "    if call in fails: raise OSError(f'{call}: no space\\nleft')\n"
        "class Run:\n"
        "    def log(self, *args, **kwargs): note('log', *args, **kwargs)\n"
        "def finish(): note('finish')\n"
        "def init(**kwargs):\n"
        "    note('init', **kwargs)\n"
        "    return Run()\n"
    )
    (tmp_path / "trackio.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    import trackio

    yield trackio
    del sys.modules["trackio"]


def events(run: Path) -> dict[str, Any]:
    """Tag -> steps and values, read as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run / "tensorboard"))
    read.Reload()
    tags = read.Tags()
    found: dict[str, Any] = {
        tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in tags["scalars"]
    }
    for tag in tags["tensors"]:
        found[tag] = [
            (event.step, event.tensor_proto.string_val[0].decode()) for event in read.Tensors(tag)
        ]
    return found


# Which trackers


def test_by_default_tensorboard_where_it_is_installed(monkeypatch):
    assert choose(None) == ["tensorboard"]
    monkeypatch.setattr(trackers, "_installed", lambda name: False)
    assert choose(None) == []


def test_the_named_ones_in_their_order_and_once_or_none():
    assert choose(["wandb", "tensorboard", "wandb"]) == ["wandb", "tensorboard"]
    assert choose(["none"]) == []


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["tensorbord"], "unknown tracker 'tensorbord'; did you mean tensorboard?"),
        (["weights"], "unknown tracker 'weights'; "),
        (["none", "tensorboard"], "none goes with no other tracker"),
        (
            ["tensorboard", "wandb"],
            'wandb is not installed; pip install "vireo-vl[track]", or leave',
        ),
        (["trackio"], 'pip install trackio, and after it pip install "pillow>=13"'),
    ],
)
def test_a_wrong_choice_is_refused(monkeypatch, names, text):
    monkeypatch.setattr(trackers, "_installed", lambda name: name == "tensorboard")
    with pytest.raises(InputError) as caught:
        choose(names)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_of_the_name_is_not_the_package(monkeypatch, tmp_path):
    (tmp_path / "trackio").mkdir()  # as W&B makes wandb/ in the working folder
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="the package trackio is not installed"):
        choose(["trackio"])


def test_trackers_need_no_torch(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from vireo.report.trackers import RunFacts, Trackers\n"
        f"facts = RunFacts(Path({str(tmp_path)!r}), 'p', 'n', {{}}, None)\n"
        "open_ones = Trackers(['tensorboard'], facts, print)\n"
        "open_ones.record({'step': 1, 'loss': 1.0})\n"
        "open_ones.finish(failed=False)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert events(tmp_path)["train/loss"] == [(1, 1.0)]


# TensorBoard


def test_tensorboard_gets_numbers_answers_and_settings(open_folder, tmp_path):
    with open_folder("--lr=0.5") as folder:
        folder.metrics(TRAIN)
        folder.samples(2, ANSWERS, [[]])
        folder.metrics(EVAL)
    found = events(tmp_path / "run")
    assert found["train/loss"] == [(1, 0.5)]
    assert found["train/tokens"] == [(1, 12.0)]
    assert found["eval/loss"] == [(2, 0.25)]
    assert found["eval/exact_match"] == [(2, 1.0)]
    assert not {"train/step", "train/note", "train/ok", "eval/step"} & set(found)
    ((step, table),) = found["eval/answers"]
    assert step == 2
    assert table.splitlines()[0] == "| row | prompt | expected | answer | correct |"
    assert table.splitlines()[2] == "| val.json:1 | 2 \\| 3? Say. | 2 | 2 | True |"
    assert '"lr": 0.5' in found["settings"][0][1]


def test_a_loss_that_is_not_there_is_left_out_and_one_that_is_nan_is_shown(open_folder, tmp_path):
    with open_folder() as folder:
        folder.metrics({"step": 1, "loss": None, "lr": 1.0})
        folder.metrics({"step": 2, "loss": math.nan, "lr": 1.0})
    found = events(tmp_path / "run")
    assert [step for step, _ in found["train/loss"]] == [2]
    assert math.isnan(found["train/loss"][0][1])
    assert len(found["train/lr"]) == 2


def test_a_killed_run_has_its_last_step_and_resuming_drops_what_came_after_the_checkpoint(
    open_folder, tmp_path
):
    killed = open_folder()
    for step in (1, 2, 3):
        killed.metrics({"step": step, "loss": float(step)})
    assert events(tmp_path / "run")["train/loss"][-1] == (3, 3.0)  # though it is not closed
    time.sleep(1.1)  # readers go by the second in a file's name, and then by text: 10 before 9
    with open_folder("--resume=auto", resumed_at=2) as folder:
        folder.metrics({"step": 3, "loss": 30.0})
    assert events(tmp_path / "run")["train/loss"] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [1.0, 2.0, 30.0]


def test_a_run_killed_before_its_first_checkpoint_leaves_nothing_in_the_next(open_folder, tmp_path):
    open_folder().metrics({"step": 1, "loss": 1.0})
    time.sleep(1.1)  # as above
    with open_folder("--resume=auto") as folder:
        folder.metrics({"step": 1, "loss": 10.0})
    assert events(tmp_path / "run")["train/loss"] == [(1, 10.0)]


def test_other_ranks_open_nothing(open_folder, tmp_path):
    with open_folder(active=False) as folder:
        folder.metrics(TRAIN)
        folder.samples(2, ANSWERS, [[]])
    assert not (tmp_path / "run").exists()


def test_none_opens_nothing(open_folder, tmp_path):
    settings = load_settings(["--model_name_or_path=m"])
    settings.run.report_to = ["none"]
    with RunFolder(tmp_path / "run", settings, True, None) as folder:
        folder.metrics(TRAIN)
    assert not (tmp_path / "run" / "tensorboard").exists()


# W&B, really run, offline


def wandb_records(run: Path) -> list[Any]:
    """The records of every offline run of a folder, oldest first.

    A file is a LevelDB log: after a header of 7 bytes, blocks of 32 KiB with pieces of checksum (4
    bytes), length (2) and kind (1: whole, 2 to 4: first, middle, last piece of a record).
    """
    from wandb.proto.wandb_internal_pb2 import Record

    found, parts = [], b""
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        data, at = file.read_bytes(), 7
        while at + 7 <= len(data):
            if (left := -at % 2**15) < 7 and left:  # too little for a piece: padding
                at += left
                continue
            size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
            parts += data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):
                found.append(Record.FromString(parts))
                parts = b""
    return found


def test_wandb_gets_the_run_and_a_resumed_one_continues_it(open_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    flags = ("--report_to=wandb", "--project=ours", "--run_name=first", "--lr=0.5")
    with open_folder(*flags) as folder:
        folder.metrics(TRAIN)
        folder.samples(2, ANSWERS, [[]])
        folder.metrics(EVAL)
    with contextlib.suppress(ZeroDivisionError), open_folder(*flags, resumed_at=2) as folder:
        folder.metrics({"step": 3, "loss": 0.125})
        raise ZeroDivisionError

    # W&B's own process writes the files, and may be behind.
    until = time.monotonic() + 30
    records = wandb_records(tmp_path / "run")
    while sum(r.HasField("exit") for r in records) < 2 and time.monotonic() < until:
        time.sleep(0.1)
        records = wandb_records(tmp_path / "run")
    runs = [r.run for r in records if r.HasField("run")]
    name = json.loads((tmp_path / "run" / "trackers.json").read_text())["wandb"]
    assert {(r.run_id, r.project, r.display_name) for r in runs} == {(name, "ours", "first")}
    config = {u.key: json.loads(u.value_json) for u in runs[0].config.update}
    assert config["optim"]["lr"] == 0.5

    history = [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
        for r in records
        if r.HasField("history")
    ]
    by_step = {row["_step"]: row for row in history}
    assert set(by_step) == {1, 2, 3}, history
    assert by_step[1]["train/loss"] == 0.5
    assert "train/note" not in by_step[1]
    assert by_step[2]["eval/loss"] == 0.25
    assert by_step[2]["eval/answers/nrows"] == 1
    assert by_step[3]["train/loss"] == 0.125
    assert [r.exit.exit_code for r in records if r.HasField("exit")] == [0, 1]


# trackio, by a stand-in: it cannot be installed beside our Pillow


def test_trackio_calls(open_folder, stand_in):
    with open_folder("--report_to=trackio", "--project=ours") as folder:
        folder.metrics(TRAIN)
        folder.samples(2, ANSWERS, [[]])
        folder.metrics(EVAL)
    with open_folder("--report_to=trackio", "--run_name=second", resumed_at=2):
        pass
    first, train, held_out, end, second, _ = stand_in.calls
    assert first[0] == "init"
    assert first[2]["config"]["model"]["vlm_model_name_or_path"] == "m"
    wanted = {"project": "ours", "name": "run", "resume": "never"}
    assert {key: first[2][key] for key in wanted} == wanted
    assert train == (
        "log",
        ({"train/loss": 0.5, "train/lr": 1e-5, "train/tokens": 12},),
        {"step": 1},
    )
    assert held_out == ("log", ({"eval/loss": 0.25, "eval/exact_match": 1.0},), {"step": 2})
    assert end[0] == "finish"
    assert (second[2]["name"], second[2]["resume"]) == ("second", "allow")


# Failures


def test_one_that_cannot_be_opened_stops_the_run_and_the_same_command_starts_it_again(
    open_folder, stand_in, tmp_path
):
    stand_in.fails.add("init")
    with pytest.raises(InputError) as caught:
        open_folder("--report_to=tensorboard,trackio")
    text = str(caught.value)
    assert text.startswith("--report_to trackio could not be opened: init: no space; ")
    assert "\n" not in text
    assert not (tmp_path / "run" / "metrics.jsonl").exists()  # nothing that would be refused


def test_one_that_fails_is_said_dropped_and_said_again_while_the_run_goes_on(
    open_folder, stand_in, tmp_path, capsys
):
    stand_in.fails.add("log")
    with open_folder("--report_to=tensorboard,trackio") as folder:
        for step in (1, 2, 3):
            folder.metrics({"step": step, "loss": 1.0})
        folder.say("done")
    assert [name for name, _, _ in stand_in.calls] == ["init", "log"]  # not tried again
    assert len(events(tmp_path / "run")["train/loss"]) == 3  # the other one has it all
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    warning = (
        "warning: trackio failed at step 1 and got nothing after it (log: no space); "
        "metrics.jsonl has every record"
    )
    assert capsys.readouterr().out.splitlines() == [warning, "done", warning]
    assert (tmp_path / "run" / "log.txt").read_text().count(warning) == 2


def test_one_that_fails_at_the_end_does_not_fail_the_run(open_folder, stand_in, capsys):
    stand_in.fails.add("finish")
    with open_folder("--report_to=trackio"):
        pass
    assert "warning: trackio failed at its end" in capsys.readouterr().out


def test_a_full_disk_under_tensorboard_is_said_at_that_step(open_folder, monkeypatch, capsys):
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    def flush(self):
        raise OSError(28, "No space left on device")

    with open_folder() as folder:
        folder.metrics({"step": 1, "loss": 1.0})
        monkeypatch.setattr(EventFileWriter, "flush", flush)
        folder.metrics({"step": 2, "loss": 1.0})
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(
        "warning: tensorboard failed at step 2 and got nothing after it ([Errno"
    )
