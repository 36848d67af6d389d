"""A run of two ranks that is killed ten times ends with the weights of one that never was."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.launch import environment, torchrun, torchrun_command
from tests.rows import write_rows
from vireo.families.tiny import build
from vireo.training.checkpoint import checkpoints, verify
from vireo.training.export import export

ROWS, EPOCHS = 26, 6
STEPS = EPOCHS * 7  # of 4 rows, the last of an epoch of 2
START, STEP, SAVE = "while it starts", "between saves", "while it saves"
KINDS = [START] + [STEP] * 3 + [SAVE] * 5  # besides one while it starts for the first time


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kills")
    build("qwen2_vl", folder / "model", size="test")
    write_rows(folder / "data", [(1, 0, 2, 1, 0, 3)[i % 6] for i in range(ROWS)])
    return folder


def command(base: Path, output: Path) -> list[str]:
    return [
        *("-m", "tests.ranks.seen", f"--vlm_model_name_or_path={base / 'model'}"),
        *(f"--train_file={base / 'data' / 'rows.json'}", f"--output_dir={output}"),
        *("--freeze_vision=false", "--lr=1e-3", "--num_workers=1", "--report_to=none"),
        *("--global_batch_size=4", "--per_device_train_batch_size=2", f"--max_steps={STEPS}"),
        *("--save_steps=2", "--keep_checkpoints=3", "--resume=auto"),
    ]


def records(run: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says that a kill may not change."""
    same = ("step", "loss", "lr", "grad_norm", "epoch", "rows", "tokens", "images")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{name: record[name] for name in same} for record in map(json.loads, lines)]


# -- kills ---------------------------------------------------------------------------------------


def moments(seed: int) -> Iterator[tuple[str, int, float]]:
    """Where to kill: what the run is doing, from which step on (rising), and seconds later."""
    chance = random.Random(seed)
    steps = iter(sorted(chance.sample(range(3, STEPS - 2), len(KINDS) - 1)))
    for kind in [START, *chance.sample(KINDS, len(KINDS))]:
        if kind == START:  # which takes about ten seconds
            yield kind, 0, chance.uniform(1, 9)
        else:
            yield kind, next(steps), chance.uniform(0, 0.1)


def kill_at(run: Path, process: subprocess.Popen, kind: str, step: int, later: float) -> bool:
    """Wait for the moment and kill; whether a save was cut short."""
    began, today = time.monotonic(), time.time()
    before = last_step(run)
    reached: dict[str, Callable[[], bool]] = {
        START: lambda: time.monotonic() - began > later or last_step(run) != before,
        STEP: lambda: last_step(run) >= step,
        SAVE: lambda: any(number >= step for number in half_saved(run, today)),
    }
    while not reached[kind]():
        assert process.poll() is None, f"the run ended by itself: {(run / 'log.txt').read_text()}"
        assert time.monotonic() < began + 200, f"waited in vain to kill {kind}"
        time.sleep(0.001)
    if kind != START:
        time.sleep(later)
    kill(process)
    return bool(half_saved(run, today))


def last_step(run: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"])
    return 0


def half_saved(run: Path, since: float) -> list[int]:
    """The steps of saves that are not complete, those of earlier runs aside."""
    found = []
    for path in (run / "checkpoints").glob(".writing-step-*"):
        with contextlib.suppress(FileNotFoundError):  # it is complete now
            if path.stat().st_mtime >= since:
                found.append(int(path.name.split("-")[-1]))
    return found


def kill(torchrun: subprocess.Popen) -> None:
    """SIGKILL to the launcher, its ranks and their loaders, and wait until all are gone.

    Each rank leads a process group of its own. The launcher is stopped first, so that it starts
    no rank that is not seen, and sees none die.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(torchrun.pid, signal.SIGSTOP)
    groups = {torchrun.pid, *(pid for pid, parent, _ in processes() if parent == torchrun.pid)}
    for group in groups:
        for end in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                end(group, signal.SIGKILL)
    torchrun.wait()
    while any(group in groups for _, _, group in processes()):
        time.sleep(0.005)


def processes() -> Iterator[tuple[int, int, int]]:
    """Id, parent and group of every process that has not ended."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, group = path.read_text().rpartition(")")[2].split()[:3]
            if state not in "ZX":
                yield int(path.parent.name), int(parent), int(group)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts two ranks; what still runs at the end is killed."""
    started: list[subprocess.Popen] = []

    def begin(arguments: list[str], seen: Path) -> subprocess.Popen:
        process = subprocess.Popen(
            torchrun_command(2, *arguments),
            env=environment(SEEN=str(seen)),
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            kill(process)


# -- the test ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ten_kills_change_nothing(base: Path, start) -> None:
    whole, run = base / "whole", base / "killed"
    for folder in (whole, run):
        folder.mkdir()
    torchrun(2, *command(base, whole), SEEN=str(whole))

    cut = []
    for kind, step, later in moments(seed=0):
        process = start(command(base, run), run)
        half = kill_at(run, process, kind, step, later)
        saved = checkpoints(run / "checkpoints")
        print(f"killed {kind} (step {last_step(run)}, half a save: {half}, {len(saved)} saved)")
        for path in saved:
            verify(path)
        cut.append(half)
    assert sum(cut) >= 3, "too few kills hit a save"
    torchrun(2, *command(base, run), SEEN=str(run))

    assert records(run) == records(whole)
    assert [r["step"] for r in records(run)] == list(range(1, STEPS + 1))
    kept = [f"step-{n}" for n in (STEPS - 4, STEPS - 2, STEPS)]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == kept
    one, two = (
        load_file(export(r / f"checkpoints/step-{STEPS}", r / "out") / "model.safetensors")
        for r in (whole, run)
    )
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
    assert every_row_once_an_epoch(run)


def every_row_once_an_epoch(run: Path) -> bool:
    epochs: list[Counter[str]] = [Counter() for _ in range(EPOCHS)]
    for rank in range(2):
        steps: dict[int, list[str]] = {}
        for line in (run / f"rows-{rank}.jsonl").read_text().splitlines():
            position, rows = json.loads(line)
            assert steps.setdefault(position, rows) == rows  # made again: the same rows
        for position, rows in steps.items():
            epochs[(position - 1) // ROWS].update(rows)
    return all(len(seen) == ROWS and set(seen.values()) == {1} for seen in epochs)
