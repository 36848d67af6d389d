"""What a run that Ray placed leaves behind when a part of it is killed, and how it goes on.

Twenty runs have one part each ended by `kill -9` at a random moment, five for each kind of part;
KILLS_SEED repeats these moments. Two of the five generate ahead of training.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import pytest

from tests.launch import ROOT, environment
from tests.rl import flags, records, rollouts, write_prompts
from tests.tiny_models import tiny
from vireo.rollout.sample import Sample

pytestmark = pytest.mark.slow
SEED = int(os.environ.get("KILLS_SEED") or random.randrange(2**32))
RUNS, STEPS, GROUPS, SAMPLES = 20, 10, 4, 4
STRETCH = 2  # steps in which a run of the five of each part is killed
LIMIT_S = 150.0
# What the command of each part of a run has. A worker is Ray's, and holds engines or trainers.
PARTS = {
    "engine": "vireo serve",
    "worker": "ray::Placed",
    "trainer": "vireo.train --config",
    "driver": "vireo.train --trainer",
}


def words(folder: Path, *more: str) -> list[str]:
    prompts = folder / "data" / "prompts.jsonl"
    if not prompts.exists():
        write_prompts(folder / "data", [0, 1, 2, 0, 1, 0])
    placed = ("--actor_num_gpus_per_node=2", "--engine=serve", f"--rollout_batch_size={GROUPS}")
    steps = (f"--num_rollout={STEPS}", "--save_steps=3", "--lr=3e-4")
    return flags(tiny("qwen2_5_vl"), prompts, folder / "run", *placed, *steps, *more)


def processes(folder: Path) -> dict[int, str]:
    """Command lines, by id, of all processes that a run in `folder` started, however they came to
    be: they have its mark in their environment."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            variables = (entry / "environ").read_bytes().decode().split("\0")
            command = (entry / "cmdline").read_bytes().decode().replace("\0", " ")
        except (OSError, UnicodeDecodeError):
            continue
        if f"MARK={folder}" in variables:
            found[int(entry.name)] = command
    return found


def parent(pid: int) -> int | None:
    """None: the process has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


@dataclass
class Run:
    """One `vireo train`, from its start to its end. `folder`: its data, log and output."""

    folder: Path
    more: tuple[str, ...] = ()
    seen: set[int] = field(default_factory=set)  # ids of all its processes
    times: list[float] = field(default_factory=list)  # seconds from the start to each step

    def __post_init__(self) -> None:
        pytest.importorskip("ray")
        self.began = time.monotonic()
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vireo.train", *words(self.folder, *self.more)],
                cwd=ROOT,
                env=environment() | {"RAY_ADDRESS": "", "MARK": str(self.folder)},
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def output(self) -> Path:
        return self.folder / "run"

    def until(self, true: Callable[[], bool], why: str) -> None:
        end = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < end, f"{why}\n{self.log.read_text()}"
            self.seen |= processes(self.folder).keys()
            now = time.monotonic() - self.began
            self.times += [now] * (self.steps() - len(self.times))
            time.sleep(0.02)

    def steps(self) -> int:
        """How many are recorded."""
        path = self.output / "metrics.jsonl"
        return path.read_bytes().count(b'"reward":') if path.exists() else 0

    def part(self, whom: str) -> list[int]:
        """Ids of such processes, but for those that watch them and for children, which have the
        same command for a moment."""
        every = processes(self.folder).items()
        found = {p for p, words in every if PARTS[whom] in words and "watch.py" not in words}
        return sorted(pid for pid in found if parent(pid) not in found)

    def ended(self) -> int:
        """Its exit code, once it has ended; nothing is left then."""
        self.until(lambda: self.process.poll() is not None, "it does not end")
        self.until(lambda: not processes(self.folder), "not all of its processes end")
        names = [path.name for path in Path("/dev/shm").iterdir()]
        left = [name for name in names if self.seen & set(map(int, re.findall(r"\d+", name)))]
        assert not left, f"shared memory is left: {left}\n{self.log.read_text()}"
        return self.process.returncode

    def end(self) -> None:
        """After a test that failed."""
        for pid in processes(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    begun: list[Run] = []

    def begin(*more: str) -> Run:
        begun.append(Run(tmp_path, more))
        return begun[-1]

    yield begin
    for run in begun:
        run.end()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("unbroken"))
    try:
        assert run.ended() == 0, run.log.read_text()
        check(run, run, 0)
        yield run
    finally:
        run.end()


def number(sample: Sample) -> int:
    """Of its prompt; a group that began again has a count behind it."""
    return int(sample.group.partition(".")[0])


def check(run: Run, unbroken: Run, ahead: int) -> None:
    """Every sample is there once, and of weights that were new enough. Without `ahead`, all that
    was learned is as in the unbroken run."""
    assert len(list((run.output / "rollouts").glob("step-*.jsonl"))) == STEPS
    lines, others = records(run.output), records(unbroken.output)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    every = [rollouts(run.output, step) for step in range(1, STEPS + 1)]
    same = [rollouts(unbroken.output, step) for step in range(1, STEPS + 1)]
    rows = {number(sample): sample.conversation.id for samples in same for sample in samples}
    taken: list[int] = []
    for step, (samples, line) in enumerate(zip(every, lines), 1):
        numbers = [number(sample) for sample in samples[::SAMPLES]]
        taken += numbers
        # Groups are whole: each sample once, of the prompt that has its number.
        found = [(number(sample), sample.index) for sample in samples]
        assert found == [(n, i) for n in numbers for i in range(SAMPLES)], f"step {step}"
        assert len(numbers) == GROUPS, f"step {step}"
        assert line["reward"] == pytest.approx(mean(sample.reward or 0.0 for sample in samples))
        for sample in samples:
            name = f"step {step}, {sample.name}: {sample.spans}"
            assert sample.conversation.id == rows.get(number(sample), sample.conversation.id), name
            assert sum(count for _, count in sample.spans) == len(sample.response_ids), name
            versions = {int(version) for version, _ in sample.spans}
            assert versions <= set(range(step - 1 - ahead, step)), name
    # Whatever was given out was learned from once, or is still to come.
    state = json.loads((run.output / "checkpoints" / f"step-{STEPS}" / "buffer.json").read_text())
    left = [work["number"] for place in ("waiting", "partial", "again") for work in state[place]]
    assert sorted(taken + left) == list(range(state["position"]))
    if ahead:
        return
    for line, other in zip(lines, others, strict=True):
        assert line["reward"] == pytest.approx(other["reward"], rel=1e-4)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
    for samples, wanted in zip(every, same, strict=True):
        assert [s.response_ids for s in samples] == [s.response_ids for s in wanted]


@pytest.mark.parametrize("which", range(RUNS))
def test_a_part_is_killed_at_any_moment(
    which: int, unbroken: Run, begin: Callable[..., Run]
) -> None:
    chance = random.Random(f"{SEED}/{which}")
    turn, place = divmod(which, len(PARTS))
    whom, ahead = [*PARTS][place], turn % 2
    # The turns of a part cover the whole run.
    after, share = turn * STRETCH + chance.randrange(STRETCH), chance.random()
    print(f"KILLS_SEED={SEED}: {whom}, {share:.2f} of the way from step {after} to the next")
    more = (f"--max_staleness={ahead}",)
    run = begin(*more)
    run.until(lambda: run.steps() >= after, f"step {after} does not come")
    ends = [0.0, *unbroken.times]
    wait = share * (ends[after + 1] - ends[after])
    since = time.monotonic() if after else run.began
    run.until(lambda: run.steps() > after or time.monotonic() > since + wait, "too slow")
    run.until(lambda: bool(run.part(whom)), f"there is no {whom}")
    os.kill(chance.choice(run.part(whom)), signal.SIGKILL)
    code, log = run.ended(), run.log.read_text()
    print(f"after {run.steps()} steps; exit code {code}")
    if whom == "engine" and code == 0:
        assert "it is started again" in log
    else:  # an engine that dies before it ever answered ends the run
        assert code == {"engine": 1, "worker": 1, "trainer": 137, "driver": -9}[whom], log
        assert whom != "engine" or "ended; the end of its log" in log, log
        assert whom != "trainer" or re.search(r"trainer \d ended: code 137", log), log
        assert begin(*more, "--resume=auto").ended() == 0, run.log.read_text()
    check(run, unbroken, ahead)


def test_a_run_that_is_told_to_stop_leaves_nothing_and_resumes(
    unbroken: Run, begin: Callable[..., Run]
) -> None:
    run = begin()
    run.until(lambda: run.steps() >= STEPS // 2, "no step")
    run.process.send_signal(signal.SIGTERM)
    assert run.ended() == 143, run.log.read_text()
    assert begin("--resume=auto").ended() == 0, run.log.read_text()
    check(run, unbroken, 0)
