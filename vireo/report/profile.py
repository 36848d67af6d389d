"""A trace of two steps, and what lay in a GPU's memory: `--profile`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

WAIT, WARM, ACTIVE = 2, 1, 2  # steps: caches and compilations first, then the profiler's own
EVENTS = 200_000  # allocations that a snapshot goes back


@contextlib.contextmanager
def profiled(
    folder: Path, rank: int, device: torch.device, say: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Yields what the loop calls at the end of each step.

    Steps 4 and 5 of the loop are traced into `folder`/rank-R.trace.json, for Perfetto or
    chrome://tracing; on a GPU `folder`/rank-R.memory.pickle holds every allocation up to then, for
    https://pytorch.org/memory_viz.
    """
    from torch.profiler import ProfilerActivity, profile, schedule

    cuda, written = device.type == "cuda", False
    folder.mkdir(parents=True, exist_ok=True)

    def write(done: profile) -> None:
        nonlocal written
        written = True
        done.export_chrome_trace(str(folder / f"rank-{rank}.trace.json"))
        if cuda:
            torch.cuda.memory._dump_snapshot(str(folder / f"rank-{rank}.memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        say(f"steps {WAIT + WARM + 1} to {WAIT + WARM + ACTIVE} are traced in {folder}")

    if cuda:
        torch.cuda.memory._record_memory_history(max_entries=EVENTS)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    plan = schedule(wait=WAIT, warmup=WARM, active=ACTIVE, repeat=1)
    with profile(activities=kinds, schedule=plan, on_trace_ready=write) as running:
        yield running.step
    if not written:
        say(f"--profile: a run of fewer than {WAIT + WARM + ACTIVE} steps has no trace")
