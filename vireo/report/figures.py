"""Figures of a report as plain JSON values: shares, spreads, histograms, and the first of many."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

SHOWN = 5  # examples of anything
_BINS = 24  # bars of a histogram at most


@dataclass
class First:
    """How many there are of something, and the first few of them."""

    count: int = 0
    examples: list[Any] = field(default_factory=list)

    def add(self, example: Any) -> None:
        self.count += 1
        if self.count <= SHOWN:
            self.examples.append(example)


def share(part: float, whole: float) -> float:
    """`part` of `whole`, to four places; 0 of nothing."""
    return round(part / whole, 4) if whole else 0.0


def spread(values: Any) -> dict[str, float] | None:
    """min, median, p95 and max; None for no values."""
    if not len(values):
        return None
    found = np.percentile(values, (0, 50, 95, 100)).round(1)
    return dict(zip(("min", "median", "p95", "max"), found.tolist()))


def histogram(values: Any) -> dict[str, list[int]] | None:
    """`counts[i]` whole numbers from `edges[i]` to below `edges[i + 1]`; None for no values."""
    if not len(values):
        return None
    low, high = int(min(values)), int(max(values))
    step = -(-(high - low + 1) // _BINS)
    edges = list(range(low, high + step + 1, step))
    return {"edges": edges, "counts": np.histogram(values, edges)[0].tolist()}
