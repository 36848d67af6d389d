"""Which row comes when: pure functions of seed and place, so a resume needs just a position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

FileRows = tuple[int, int]  # the rows that a file has, and those of them that an epoch takes


def permutation(rows: int, seed: int, number: int, file: int = 0) -> np.ndarray:
    """The numbers below `rows` in a random order, int64 [rows]; each `number` has its own."""
    # A generator of torch looks at 32 bits of its seed: the factor spreads files over all of them.
    mixed = seed * 1_000_003 + file * 2_654_435_761 + number
    generator = torch.Generator().manual_seed(mixed % (1 << 63))
    return torch.randperm(rows, generator=generator).numpy()


def interleave(counts: Sequence[int]) -> np.ndarray:
    """File numbers, counts[k] times k and each of them evenly spread, int64 [sum of counts]."""
    files = np.repeat(np.arange(len(counts)), counts)
    middles = [(np.arange(count) + 0.5) / count for count in counts]
    return files[np.argsort(np.concatenate(middles), kind="stable")]


def chain(rows: int, start: int, count: int, seed: int, file: int, shuffle: bool) -> np.ndarray:
    """`count` row numbers from place `start` of the file's permutations laid end to end.

    Without shuffle the file's own order is repeated. Returns int64 [count].
    """
    pieces = [np.empty(0, dtype=np.int64)]
    while count:
        number, at = divmod(start, rows)
        one = permutation(rows, seed, number, file) if shuffle else np.arange(rows)
        pieces.append(one[at : at + count])
        start, count = start + len(pieces[-1]), count - len(pieces[-1])
    return np.concatenate(pieces)


def epoch_order(files: Sequence[FileRows], epoch: int, seed: int, shuffle: bool) -> np.ndarray:
    """Row numbers of an epoch over several files, int64 [rows that the epoch takes].

    The rows of file 2 are numbered after those of file 1. What is shuffled is which file comes
    next; each file's rows come in the order of its chain, so that at no place of the training has
    a row come twice before all rows of its file came once.
    """
    if len(files) == 1:
        ((rows, take),) = files
        return chain(rows, epoch * take, take, seed, 0, shuffle)
    whose = interleave([take for _, take in files])
    if shuffle:
        whose = whose[permutation(len(whose), seed, epoch, file=len(files))]
    order = np.empty(len(whose), dtype=np.int64)
    before = 0
    for file, (rows, take) in enumerate(files):
        order[whose == file] = before + chain(rows, epoch * take, take, seed, file, shuffle)
        before += rows
    return order
