"""What a run that Ray placed leaves behind when a part of it is killed, and how it goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch import ROOT, environment
from tests.rl import flags, records, rollouts, write_prompts
from tests.tiny_models import tiny

pytestmark = pytest.mark.slow
STEPS = 10
LIMIT_S = 150.0


def words(folder: Path, *more: str) -> list[str]:
    prompts = folder / "data" / "prompts.jsonl"
    if not prompts.exists():
        write_prompts(folder / "data", [0, 1, 2, 0, 1, 0])
    placed = ("--actor_num_gpus_per_node=2", "--engine=serve", "--rollout_batch_size=4")
    steps = (f"--num_rollout={STEPS}", "--save_steps=3", "--lr=3e-4")
    return flags(tiny("qwen2_5_vl"), prompts, folder / "run", *placed, *steps, *more)


def begin(folder: Path, *more: str) -> subprocess.Popen[str]:
    pytest.importorskip("ray")
    (folder / "log.txt").touch()
    with (folder / "log.txt").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "vireo.train", *words(folder, *more)],
            cwd=ROOT,
            env=environment() | {"RAY_ADDRESS": "", "MARK": str(folder)},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )


def ours(folder: Path, part: str, *, rank: int | None = None) -> list[int]:
    """Processes of this run whose command has `part`, but for those that watch others."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().decode().replace("\0", " ")
            variables = (entry / "environ").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        wanted = rank is None or f"RANK={rank}" in variables
        if f"MARK={folder}" in variables and part in command and "watch.py" not in command:
            found += [int(entry.name)] * wanted
    return found


def until(true, why: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end, why
        time.sleep(0.05)


def recorded(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return len(records(folder / "run")) if path.exists() else 0


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    run = begin(folder)
    assert run.wait(LIMIT_S) == 0, (folder / "log.txt").read_text()
    return folder / "run"


def same(run: Path, unbroken: Path) -> None:
    """The prompts of every step, none lost and none twice, and what was learned from them."""
    for one, other in zip(records(run), records(unbroken), strict=True):
        assert one["step"] == other["step"]
        assert one["reward"] == pytest.approx(other["reward"], rel=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
    for step in range(1, STEPS + 1):
        for one, other in zip(rollouts(run, step), rollouts(unbroken, step), strict=True):
            assert one.conversation.id == other.conversation.id
            # No token is of weights that were old then.
            assert one.spans == [(str(step - 1), len(one.response_ids))]


@pytest.mark.parametrize("at", [2, 5])
def test_a_killed_engine_is_started_again_and_nothing_is_lost(
    at: int, unbroken: Path, tmp_path: Path
) -> None:
    run = begin(tmp_path)
    until(lambda: recorded(tmp_path) >= at or run.poll() is not None, "no step")
    time.sleep(random.random())
    os.kill(ours(tmp_path, "vireo serve")[0], signal.SIGKILL)
    assert run.wait(LIMIT_S) == 0, (tmp_path / "log.txt").read_text()
    assert "it is started again" in (tmp_path / "log.txt").read_text()
    same(tmp_path / "run", unbroken)
    until(lambda: not ours(tmp_path, ""), f"left: {ours(tmp_path, '')}")


@pytest.mark.parametrize("whom", ["trainer", "driver", "host", "told"])
def test_what_ends_leaves_nothing_and_resumes(whom: str, unbroken: Path, tmp_path: Path) -> None:
    run = begin(tmp_path)
    until(lambda: recorded(tmp_path) >= 5 or run.poll() is not None, "no step")
    time.sleep(random.random())
    number = signal.SIGTERM if whom == "told" else signal.SIGKILL
    victims = {
        "trainer": lambda: ours(tmp_path, "vireo.train --config", rank=1),
        "driver": lambda: [run.pid],
        "host": lambda: ours(tmp_path, "ray::Placed")[:1],
        "told": lambda: [run.pid],
    }[whom]()
    assert victims
    for pid in victims:
        os.kill(pid, number)
    code = run.wait(LIMIT_S)
    assert code == {"trainer": 137, "driver": -9, "host": 1, "told": 143}[whom]
    until(lambda: not ours(tmp_path, ""), f"left: {ours(tmp_path, '')}")
    again = begin(tmp_path, "--resume=auto")
    assert again.wait(LIMIT_S) == 0, (tmp_path / "log.txt").read_text()
    same(tmp_path / "run", unbroken)
