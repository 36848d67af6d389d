"""The resumable loader: which rows a step has, in what order, rendered by workers ahead of time.

A position in the data is one number: rows taken since the start of training, over all ranks. It
fixes epoch, order and place, so a run resumes on any number of ranks with every row once an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from vireo.data.conversation import Conversation
from vireo.data.packing import share
from vireo.data.ragged import Example
from vireo.data.render import Renderer
from vireo.errors import RowError


@dataclass(frozen=True)
class Plan:
    """How rows become steps: `rows` in the file, `per_step` over all ranks, dealt in `chunk`s.

    The last step of an epoch takes what is left; no step crosses an epoch.
    """

    rows: int
    per_step: int
    chunk: int = 1
    seed: int = 0
    shuffle: bool = True

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.rows // self.per_step)

    def order(self, epoch: int) -> torch.Tensor:
        """Row numbers of an epoch in the order of training, int64 [rows]."""
        if not self.shuffle:
            return torch.arange(self.rows)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.rows, generator=generator)

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
    """Iterates `StepRows` from `start` to `stop` (positions) for one rank."""

    def __init__(
        self,
        rows: Sequence[Conversation],
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
            generator=torch.Generator(),  # starting to read leaves the run's random state alone
        )

    def steps(self) -> Iterator[tuple[list[int], int]]:
        """(this rank's row numbers, position after the step) for each step."""
        position, epoch, order = self.start, -1, torch.empty(0)
        while position < self.stop:
            if position // self.plan.rows != epoch:
                epoch = position // self.plan.rows
                order = self.plan.order(epoch)
            end = min(self.plan.after(position), self.stop)
            base = epoch * self.plan.rows
            taken = order[position - base : end - base].tolist()
            mine = [
                row
                for i, row in enumerate(taken)
                if share(i, self.plan.chunk, self.world) == self.rank
            ]
            yield mine, end
            position = end

    def __iter__(self) -> Iterator[StepRows]:
        stream = iter(self.loader)
        try:
            for mine, end in self.steps():
                got = [next(stream) for _ in mine]
                yield StepRows(
                    [item.example() for item in got if isinstance(item, _Sent)],
                    [item for item in got if isinstance(item, RowError)],
                    end,
                )
        finally:  # else the traceback of an error keeps the workers
            getattr(stream, "_shutdown_workers", lambda: None)()


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
    def __init__(self, rows: Sequence[Conversation], renderer: Renderer):
        self.rows, self.renderer = rows, renderer

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> _Sent | RowError:
        try:
            return _Sent(self.renderer.example(self.rows[index]))
        except RowError as error:
            return error


class _Mine(Sampler):
    """Row numbers of this rank, in order, made as they are needed."""

    def __init__(self, loader: StepLoader):
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        for mine, _ in self.loader.steps():
            yield from mine
