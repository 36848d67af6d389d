"""Rows without end: epoch after epoch, each in its own order."""

from __future__ import annotations

from functools import lru_cache

from vireo.data.conversation import Conversation
from vireo.data.loader import Plan
from vireo.data.mixture import Mixture


class Endless:
    """Row number i, counted from the start of training: the same in every process of a run."""

    def __init__(self, rows: Mixture, seed: int, shuffle: bool):
        self.rows = rows
        self.plan = Plan.mixed(rows.files, 1, seed=seed, shuffle=shuffle)
        self._order = lru_cache(2)(self.plan.order)

    @property
    def epoch(self) -> int:
        """Rows of an epoch."""
        return self.plan.rows

    def __getitem__(self, i: int) -> Conversation:
        number, place = divmod(i, self.plan.rows)
        return self.rows[int(self._order(number)[place])]
