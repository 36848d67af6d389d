"""Runs on mixtures, streams and parquet shards: resumed anywhere, they are the unbroken run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.launch import torchrun
from tests.rows import losses, write_rows
from vireo.errors import InputError, RowError
from vireo.families.tiny import build
from vireo.settings import load_settings
from vireo.trainers import registry
from vireo.training.checkpoint import checkpoints

STEPS = 7


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, two JSON files, and the second one's rows as a folder of parquet shards."""
    base = tmp_path_factory.mktemp("data-runs")
    build("qwen2_vl", base / "model", size="test")
    write_rows(base / "one", [1, 0, 2, 1, 0])
    second = json.loads(write_rows(base / "two", [0, 1, 0, 0, 1, 0, 1]).read_text())
    (base / "shards").mkdir()
    for i in range(3):
        part = [row for k, row in enumerate(second) if k % 3 == i]
        for row in part:
            for name in row["image"]:
                shutil.copy(base / "two" / name, base / "shards" / name)
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(part), base / "shards" / f"part-{i}.parquet", row_group_size=1
        )
    return base


KINDS = {
    "mixture": ["--train_file={base}/one/rows.json,{base}/shards", "--train_weights=2,0.5"],
    "stream": ["--train_file={base}/shards", "--streaming", "--shuffle_buffer=3"],
    "weighted stream": [
        "--train_file={base}/one/rows.json,{base}/shards",
        *("--train_weights=1,3", "--streaming", "--shuffle_buffer=4"),
    ],
}


def flags(base: Path, kind: str, output: str, *more: str) -> list[str]:
    return [
        f"--vlm_model_name_or_path={base / 'model'}",
        *(flag.replace("{base}", str(base)) for flag in KINDS[kind]),
        f"--output_dir={base / output}",
        *("--lr=1e-3", f"--max_steps={STEPS}", "--global_batch_size=4", "--fsdp_mp_dtype=fp32"),
        *("--per_device_train_batch_size=2", "--report_to=none", "--save_steps=3"),
        *more,
    ]


def train(base: Path, kind: str, output: str, *more: str) -> Path:
    settings = load_settings(flags(base, kind, output, "--num_workers=0", *more))
    assert registry.find(settings.trainer)(settings) == 0
    return base / output


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k == "weighted stream")) for k in KINDS]
)
def test_a_resumed_run_sees_the_rows_of_the_unbroken_one(base: Path, kind: str) -> None:
    whole = train(base, kind, f"{kind} whole")
    parted = base / f"{kind} parted"
    (parted / "checkpoints").mkdir(parents=True)
    shutil.copytree(whole / "checkpoints" / "step-3", parted / "checkpoints" / "step-3")
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    (parted / "metrics.jsonl").write_text("".join(lines[:3]))
    train(base, kind, parted.name, "--resume=auto")
    assert losses(parted) == pytest.approx(losses(whole), abs=1e-6)
    if kind == "stream":  # the weighted one has it all and more
        return
    shutil.rmtree(parted / "checkpoints" / f"step-{STEPS}")
    shutil.rmtree(parted / "checkpoints" / "step-6")
    (parted / "metrics.jsonl").write_text("".join(lines[:3]))
    more = ("--resume=auto", "--num_workers=2")
    torchrun(2, "-m", "vireo.train", *flags(base, kind, parted.name, *more))
    assert losses(parted) == pytest.approx(losses(whole), abs=1e-5)


def test_an_epoch_of_a_mixture_has_as_many_rows_as_the_weights_say(base: Path) -> None:
    run = train(base, "mixture", "epochs")
    records = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    # 2 x 5 rows of the first file and half of the 7 of the second: 14 an epoch, 4 at a time.
    assert [r["rows"] for r in records] == [4, 4, 4, 2, 4, 4, 4]
    assert records[3]["epoch"] == 1.0


def test_other_weights_or_another_buffer_are_refused_on_resume(base: Path) -> None:
    train(base, "mixture", "weights", "--max_steps=1")
    with pytest.raises(InputError, match="was trained with --train_weights"):
        train(base, "mixture", "weights", "--resume=auto", "--train_weights=1,1")
    train(base, "stream", "buffer", "--max_steps=1")
    with pytest.raises(InputError, match="was trained with --shuffle_buffer 3, found 2"):
        train(base, "stream", "buffer", "--resume=auto", "--shuffle_buffer=2")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--max_steps=none", "--num_epochs=1"], "--streaming needs --max_steps"),
        (["--num_epochs=1"], "--streaming needs --max_steps, not --num_epochs"),
        (["--validate=full"], "--streaming and --validate full exclude each other"),
    ],
)
def test_a_stream_has_no_epochs(base: Path, more: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        train(base, "stream", "refused", *more)


def test_a_bad_row_of_a_stream_stops_the_run_or_is_skipped(base: Path, tmp_path: Path) -> None:
    rows = json.loads((base / "one" / "rows.json").read_text())
    rows[2]["conversations"][0]["from"] = "stranger"
    rows[3]["conversations"][1]["value"] = " "  # nothing to learn: never an error
    for i, row in enumerate(rows):
        row["image"] = [str(base / "one" / name) for name in row["image"]]
        rows[i] = json.dumps(row)
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    file = (f"--train_file={tmp_path / 'rows.jsonl'}", f"--image_root={base}")
    with pytest.raises(RowError, match="row 2 "):
        train(base, "stream", "bad row", *file)
    run = train(base, "stream", "skipped", *file, "--on_bad_row=skip")
    last = json.loads((checkpoints(run / "checkpoints")[-1] / "progress.json").read_text())
    assert ["row 2" in last["skipped"][0], "row 3" in last["skipped"][1]] == [True, True]
