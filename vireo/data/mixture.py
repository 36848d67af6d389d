"""Several data files as one sequence of rows, each with a weight: how often an epoch has it."""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, overload

from vireo.data.conversation import Conversation
from vireo.data.readers import Rows, open_rows
from vireo.errors import InputError, RowError


class Mixture(Sequence[Conversation]):
    """The good rows of several files; those of the second are numbered after those of the first.

    `skipped` and `total` are those of all files. `files`, for `Plan.mixed`: of each file, its rows
    and how many of them an epoch takes.
    """

    def __init__(self, parts: Sequence[Rows], weights: Sequence[float]):
        self.parts, self.weights = parts, weights
        self._ends = list(accumulate(len(rows) for rows in parts))
        self.skipped: list[RowError] = [error for rows in parts for error in rows.skipped]
        self.total = sum(rows.total for rows in parts)
        self.files = tuple(
            (len(rows), max(1, round(weight * len(rows)))) for rows, weight in zip(parts, weights)
        )

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def digest(self) -> int:
        """A checksum of the rows of all files and the weights; that of the rows for plain ones."""
        first, *others = (rows.digest for rows in self.parts)
        if not others and self.weights[0] == 1:
            return first
        return zlib.crc32(repr((first, *others, *map(float, self.weights))).encode())

    @overload
    def __getitem__(self, i: int) -> Conversation: ...
    @overload
    def __getitem__(self, i: slice) -> list[Conversation]: ...
    def __getitem__(self, i: int | slice) -> Conversation | list[Conversation]:
        """Raises RowError as `Rows`."""
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        number = range(len(self))[i]
        part = bisect_right(self._ends, number)
        return self.parts[part][number - self._ends[part] + len(self.parts[part])]


def open_mixture(
    paths: Sequence[str | Path],
    weights: Sequence[float] | None = None,
    *,
    image_root: str | Path | None = None,
    on_bad_row: Literal["error", "skip"] = "error",
    progress: bool = False,
    **options: Any,
) -> Mixture:
    """Open data files as `open_rows` does each of them (`options` are its own), and mix them.

    weights: how often an epoch has the rows of each file, above 0. Default: once. 2 is every row
        twice, 0.5 is half of the rows now and the other half in the next epoch.

    Raises InputError for other weights, and what `open_rows` raises.
    """
    weights = check_weights(paths, weights) or [1.0] * len(paths)
    parts = [
        open_rows(
            path,
            image_root=image_root,
            on_bad_row=on_bad_row,
            progress=progress,
            name=name,
            **options,
        )
        for path, name in zip(paths, short_names(paths))
    ]
    return Mixture(parts, weights)


def check_weights(
    paths: Sequence[str | Path], weights: Sequence[float] | None
) -> Sequence[float] | None:
    """The weights, if they fit the files; raises InputError otherwise."""
    if not paths:
        raise InputError("no data file is given")
    if weights is not None:
        if len(weights) != len(paths):
            raise InputError(
                f"{len(weights)} weight(s) for {len(paths)} data file(s): give one for each"
            )
        for path, weight in zip(paths, weights):
            if not 0 < weight < float("inf"):
                raise InputError(
                    f"the weight of {os.fspath(path)!r} is {weight}: it must be above 0 and finite"
                )
    return weights


def short_names(paths: Sequence[str | Path]) -> list[str | None]:
    """How messages call each path: by as few of its last parts as tell it from the others.

    None for a path that stands alone, which is called by its own name.
    """
    if len(paths) == 1:
        return [None]
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    names: list[str | None] = []
    for mine in parts:
        others = [one for one in parts if one != mine]
        length = next(
            n for n in range(1, len(mine) + 1) if all(o[-n:] != mine[-n:] for o in others)
        )
        names.append(str(Path(*mine[-length:])))
    return names
