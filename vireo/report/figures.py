"""Figures of a report as plain JSON values: shares, spreads and histograms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_BINS = 24  # bars of a histogram at most


def share(part: float, whole: float) -> float:
    """`part` of `whole`, to four places; 0 of nothing."""
    return round(part / whole, 4) if whole else 0.0


def spread(values: Any) -> dict[str, Any] | None:
    """min, median, mean, p95 and max; None for no values."""
    found = np.asarray(values)
    if not found.size:
        return None
    return {
        "min": found.min().item(),
        "median": round(float(np.median(found)), 1),
        "mean": round(float(found.mean()), 1),
        "p95": round(float(np.percentile(found, 95)), 1),
        "max": found.max().item(),
    }


def histogram(values: Any, doubling: bool = False) -> dict[str, list[int]]:
    """`counts[i]` whole numbers from `edges[i]` to below `edges[i + 1]`.

    Bins of one round width, or (`doubling`) each twice as wide as the one before.
    """
    found = np.asarray(values)
    if not found.size:
        return {"edges": [], "counts": []}
    low, high = int(found.min()), int(found.max())
    if doubling:
        first, last = max(0, low.bit_length() - 1), high.bit_length()
        edges = [2**power for power in range(first, max(last, first + 1) + 1)]
        edges[0] = min(edges[0], low)
    else:
        step = _round_step((high - low + 1) / _BINS)
        start = low // step * step
        edges = list(range(start, high + step + 1, step))
        if edges[-2] > high:
            edges.pop()
    counts = np.histogram(found, bins=[*edges[:-1], edges[-1] - 0.5])[0]
    return {"edges": edges, "counts": counts.tolist()}


def _round_step(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that is at least `least`."""
    power = 10 ** max(0, math.floor(math.log10(max(least, 1))))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least)
