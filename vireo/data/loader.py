"""The resumable loader: which rows a step has, in what order, rendered by workers ahead of time.

A position in the data is one number: rows taken since the start of training, over all ranks. It
fixes epoch, order and place, so a run resumes on any number of ranks and misses or repeats no row.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from vireo.data.conversation import Conversation
from vireo.data.heap import keep_heap
from vireo.data.order import FileRows, epoch_order
from vireo.data.packing import share
from vireo.data.ragged import Example
from vireo.data.render import Renderer
from vireo.data.stream import Stream
from vireo.errors import RowError, VireoError

_ENDLESS = 1 << 62


@dataclass(frozen=True)
class Plan:
    """How rows become steps: `rows` of an epoch, `per_step` over all ranks, dealt in `chunk`s.

    The last step of an epoch takes what is left; no step crosses an epoch. `files`: for a mixture,
    the rows that each file has and those of them that an epoch takes.
    """

    rows: int
    per_step: int
    chunk: int = 1
    seed: int = 0
    shuffle: bool = True
    files: tuple[FileRows, ...] = ()

    @classmethod
    def mixed(
        cls,
        files: Sequence[FileRows],
        per_step: int,
        chunk: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> Plan:
        """The plan of a `Mixture`, from its `files`; of one file with weight 1, the plain one."""
        rows = sum(take for _, take in files)
        return cls(rows, per_step, chunk, seed, shuffle, tuple(files))

    @classmethod
    def endless(cls, per_step: int, chunk: int = 1) -> Plan:
        """The plan of a `Stream`, which has no epochs and shuffles itself: row i is number i."""
        return cls(_ENDLESS, per_step, chunk, shuffle=False)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.rows // self.per_step)

    def order(self, epoch: int) -> np.ndarray | range:
        """Row numbers of an epoch in the order of training, [rows]."""
        if not self.shuffle and not self.files:
            return range(self.rows)
        return epoch_order(self.files or ((self.rows, self.rows),), epoch, self.seed, self.shuffle)

    def after(self, position: int) -> int:
        """The position at the end of the step that starts at `position`."""
        epoch, done = divmod(position, self.rows)
        return epoch * self.rows + min(done + self.per_step, self.rows)

    def position(self, step: int) -> int:
        """The position before optimizer step `step` (from 0) of an unbroken run."""
        epoch, done = divmod(step, self.steps_per_epoch)
        return epoch * self.rows + min(done * self.per_step, self.rows)


@dataclass
class StepRows:
    """One step on one rank: good `examples`, rows refused now, and the position after the step."""

    examples: list[Example]
    refused: list[RowError]
    position: int


class StepLoader:
    """Iterates `StepRows` from `start` to `stop` (positions) for one rank.

    rows: `Rows`, a `Mixture` or a `Stream`, with a plan of its kind. Iterating raises whatever
    stops a worker.
    """

    def __init__(
        self,
        rows: Sequence[Conversation] | Stream,
        renderer: Renderer,
        plan: Plan,
        *,
        rank: int = 0,
        world: int = 1,
        start: int = 0,
        stop: int,
        workers: int = 0,
    ):
        self.plan, self.rank, self.world, self.start, self.stop = plan, rank, world, start, stop
        self.loader: DataLoader = DataLoader(
            _Rendered(rows, renderer),
            batch_size=None,
            sampler=_Mine(self),
            num_workers=workers,
            prefetch_factor=max(4, 2 * plan.per_step // (world * workers)) if workers else None,
            multiprocessing_context="fork" if workers else None,
            worker_init_fn=_begin,
            generator=torch.Generator(),  # starting to read leaves the run's random state alone
        )

    def steps(self) -> Iterator[tuple[list[int], int]]:
        """(this rank's row numbers, position after the step) for each step."""
        position, epoch = self.start, -1
        order: np.ndarray | range = range(0)
        while position < self.stop:
            if position // self.plan.rows != epoch:
                epoch = position // self.plan.rows
                order = self.plan.order(epoch)
            end = min(self.plan.after(position), self.stop)
            base = epoch * self.plan.rows
            mine = [
                int(row)
                for i, row in enumerate(order[position - base : end - base])
                if share(i, self.plan.chunk, self.world) == self.rank
            ]
            yield mine, end
            position = end

    def __iter__(self) -> Iterator[StepRows]:
        stream = iter(self.loader)
        try:
            for mine, end in self.steps():
                got = [next(stream) for _ in mine]
                for item in got:
                    if not isinstance(item, _Sent | RowError):
                        raise item
                yield StepRows(
                    [item.example() for item in got if isinstance(item, _Sent)],
                    [item for item in got if isinstance(item, RowError)],
                    end,
                )
        finally:  # else the traceback of an error keeps the workers
            getattr(stream, "_shutdown_workers", lambda: None)()


def _begin(_worker: int) -> None:
    """A signal to the whole group is the trainer's to act on: it still needs the rows of a step.

    A worker ends by itself when its trainer does.
    """
    keep_heap()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


class _Sent:
    """An example on its way from a worker, as arrays.

    A tensor that crosses processes holds a file open, so a few hundred rows would run out of them.
    """

    def __init__(self, example: Example):
        self.arrays: dict[str, np.ndarray] = {n: v.numpy() for n, v in example.fields.items()}
        self.rest = example.keys, example.images, example.where

    def example(self) -> Example:
        return Example({n: torch.from_numpy(v) for n, v in self.arrays.items()}, *self.rest)


class _Rendered(Dataset):
    def __init__(self, rows: Sequence[Conversation] | Stream, renderer: Renderer):
        self.rows, self.renderer = rows, renderer

    def __getitem__(self, index: int) -> _Sent | VireoError:
        try:
            return _Sent(self.renderer.example(self.rows[index]))
        except VireoError as error:  # a RowError, or what stops the run, with no worker's trace
            return error


class _Mine(Sampler):
    """Row numbers of this rank, in order, made as they are needed."""

    def __init__(self, loader: StepLoader):
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        for mine, _ in self.loader.steps():
            yield from mine
