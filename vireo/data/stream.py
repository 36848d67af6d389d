"""Data files read as an endless stream: nothing is looked at before it is needed.

For files too large to be checked row by row at the start, and for data sets of the hub that are not
to be downloaded. Row i of a stream is the same one in every process and run, so a position in it is
all that a resume needs, and any number of ranks and workers can share it.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from vireo.data.conversation import Conversation
from vireo.data.mixture import check_weights, short_names
from vireo.data.order import interleave, permutation
from vireo.data.readers import (
    Streamed,
    conversation,
    is_hub_name,
    load_hub_rows,
    open_source,
)
from vireo.data.rows import NOTHING_TO_LEARN
from vireo.errors import InputError, RowError

Located = tuple[Streamed, str | None]  # a container, and the folder that its image paths start from
Read = Callable[[], Conversation]

_ROUND = 100_000  # rows after which files with weights are taken in the same turns again


class Stream:
    """Row i of data files that start again when they end; it has no length and no epochs.

    Made to be asked for growing i: a process reads forward from the first row that it is asked for
    and holds one block of rows. Going back is allowed and reads from the file's start.
    """

    skipped: tuple[RowError, ...] = ()  # none is known before it is read

    def __init__(self, readings: Sequence[_Reading], turns: Sequence[int], digest: int):
        self._readings, self._turns, self.digest = readings, turns, digest
        self._whose = interleave(turns)
        self._before = np.empty_like(self._whose)  # rows of the same file earlier in the round
        for file, count in enumerate(turns):
            self._before[self._whose == file] = np.arange(count)

    def __getitem__(self, i: int) -> Conversation:
        """Raises RowError for a bad row, InputError when the data as a whole is of no use."""
        if i < 0:
            raise IndexError(f"a stream has no row {i}")
        rounds, turn = divmod(i, len(self._whose))
        file = int(self._whose[turn])
        return self._readings[file].row(rounds * self._turns[file] + int(self._before[turn]))


def open_stream(
    paths: Sequence[str | Path],
    weights: Sequence[float] | None = None,
    *,
    image_root: str | Path | None = None,
    seed: int = 0,
    shuffle: bool = True,
    buffer: int = 1000,
    on_bad_row: Literal["error", "skip"] = "error",
) -> Stream:
    """Open data files, of the kinds that `open_rows` knows, as one stream.

    weights: the files are taken in turns, in this ratio (to one in 100,000), and each starts again
        when it ends. Default: one after the other, and from the first again.
    buffer: with `shuffle`, as many rows of the files' order are put in a random order at a time.
    on_bad_row: `error` raises RowError here when the first row of a file is bad. Every other bad
        row is raised when it is asked for, and so is one with nothing to learn.

    Raises InputError for a path that is no data and for wrong weights, RowError for a file that
    cannot be read from its start.
    """
    if buffer < 1:
        raise InputError(f"the buffer of a stream is {buffer} rows, expected 1 or more")
    weights = check_weights(paths, weights)
    texts = [os.fspath(path) for path in paths]
    located = [_locate(path, image_root, name) for path, name in zip(texts, short_names(texts))]
    for path, (source, root) in zip(texts, located):
        _check_start(source, root, path, on_bad_row)
    if weights is None:
        parts = [(located, ", ".join(texts))]
    else:
        parts = [([one], path) for one, path in zip(located, texts)]
    block = buffer if shuffle else 1
    readings = [
        _Reading(sources, name, number, seed, block) for number, (sources, name) in enumerate(parts)
    ]
    content = [_stamp(source, path) for path, (source, _) in zip(texts, located)]
    digest = zlib.crc32(repr((content, weights and [*map(float, weights)], block)).encode())
    return Stream(readings, _turns(weights or [1.0]), digest)


def _locate(path: str, image_root: str | Path | None, name: str | None) -> Located:
    if not is_hub_name(path):
        return open_source(path, image_root, name)
    from vireo.data.arrow_file import HubStream

    source = HubStream(partial(load_hub_rows, path, streaming=True), path)
    return source, None if image_root is None else os.path.abspath(image_root)


def _check_start(source: Streamed, root: str | None, path: str, on_bad_row: str) -> None:
    with contextlib.closing(source.stream(0)) as rows:
        try:
            at, read = next(rows)
        except StopIteration:
            raise RowError("no_rows", "there are no rows in it", path) from None
        try:
            conversation(source, root, at, read)
        except RowError as error:
            if on_bad_row == "error" and error.reason not in NOTHING_TO_LEARN:
                raise


def _stamp(source: Streamed, path: str) -> object:
    """What tells a data set from another one without reading it."""
    files = [(os.path.basename(file), os.path.getsize(file)) for file in source.files]
    return files or path


def _turns(weights: Sequence[float]) -> list[int]:
    """The rows of each file in a round of turns, in the ratio of the weights, at least 1."""
    turns = [max(1, round(_ROUND * weight / sum(weights))) for weight in weights]
    common = int(np.gcd.reduce(turns))
    return [count // common for count in turns]


class _Reading:
    """The rows of some containers, one after the other, and from the start when they end.

    Each pass over them is cut in blocks of `block` rows (the last of a pass may be short), each
    with an order of its own: so a pass has every row once. Nothing is open before the first row is
    asked for, and a forked process opens anew.
    """

    def __init__(self, sources: Sequence[Located], name: str, number: int, seed: int, block: int):
        self.sources, self.name, self.number = sources, name, number
        self.seed, self.block = seed, block
        self._total: int | None = None  # rows of a pass, once its end was met
        self._usable = False  # whether a good row was met
        self._start_anew()

    def _start_anew(self) -> None:
        self._pid = os.getpid()
        self._rest: Iterator[Read] | None = None  # the rows behind the block
        self._next = 0  # the number in the pass of the first of them
        self._held: list[Read] = []  # the block, unread
        self._here: tuple[int, int] | None = None  # its pass, and its number in the pass
        self._order = np.empty(0, dtype=np.int64)

    def row(self, i: int) -> Conversation:
        """Row i of the endless reading. Raises as `Stream`."""
        if self._pid != os.getpid():
            self._start_anew()
        read = self._find(i)
        if self._total is not None and i >= self._total and not self._usable:
            self._look_for_a_good_row()
            self._usable = True
        row = read()
        self._usable = True
        return row

    def _find(self, i: int) -> Read:
        passes, place = divmod(i, self._total or i + 1)
        block, at = divmod(place, self.block)
        if self._here != (passes, block):
            self._take(block)
            if self._total is not None and place >= self._total:
                return self._find(i)  # now that the length of a pass is known
            number = block
            if self._total is not None:
                number += passes * -(-self._total // self.block)
            self._order = permutation(len(self._held), self.seed, number, self.number)
            self._here = passes, block
        return self._held[self._order[at]]

    def _take(self, block: int) -> None:
        """Hold a block of the pass, as much of it as there is."""
        first, self._here, self._held = block * self.block, None, []
        rest, ahead = self._rest, first - self._next
        if rest is None or ahead < 0:
            rest, ahead = self._from(first), 0
        self._rest = None  # until it is known that it goes on
        try:
            self._held = list(islice(rest, ahead, ahead + self.block))
        except RowError as error:  # not a row's: the file cannot be read any further
            raise InputError(str(error)) from error
        if len(self._held) == self.block:
            self._rest, self._next = rest, first + self.block

    def _from(self, first: int) -> Iterator[Read]:
        """The rows of a pass from number `first` on, unread; its end sets the number of all."""
        before = 0
        for source, root in self.sources:
            rows = source.stream(max(first - before, 0))
            while True:
                try:
                    at, read = next(rows)
                except StopIteration as end:
                    before += end.value
                    break
                yield partial(conversation, source, root, at, read)
        if not before:
            raise InputError(f"{self.name}: there are no rows in it any more")
        self._total = before

    def _look_for_a_good_row(self) -> None:
        """Raise InputError when a whole pass has none: else a run of skipped rows would not end.

        This process may have been asked for bad rows only, so all of them are read here.
        """
        first: RowError | None = None
        for read in self._from(0):
            try:
                read()
            except RowError as error:
                first = first or error
            else:
                return
        raise InputError(
            f"{self.name}: every one of the {self._total} rows is refused; the first: {first}"
        )
