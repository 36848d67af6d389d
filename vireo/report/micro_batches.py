"""How rows of known lengths fill micro-batches: the trainer's own packing, run on lengths alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vireo.data.packing import by_kind, by_rows, by_tokens
from vireo.data.ragged import BASE_KEYS, Batch, Example


def stand_ins(lengths: Sequence[int], images: Sequence[int]) -> list[Example]:
    """Examples that are as long as the rows, and take no memory for their tokens."""
    zero = torch.zeros(1, dtype=torch.long)
    return [
        Example({"input_ids": zero.expand(length)}, BASE_KEYS, count)
        for length, count in zip(lengths, images)
    ]


def by_budget(
    examples: Sequence[Example], budget: int, *, can_mix: bool, padded: bool
) -> list[Batch]:
    """Micro-batches of at most `budget` tokens, joined or (`padded`) with their padding counted."""
    kinds = [kind for kind in by_kind(examples, can_mix) if kind]
    return [batch for kind in kinds for batch in by_tokens(kind, budget, padded)]


def of_rows(examples: Sequence[Example], rows: int, *, can_mix: bool) -> list[Batch]:
    """Micro-batches of `rows` rows."""
    return [batch for kind in by_kind(examples, can_mix) if kind for batch in by_rows(kind, rows)]


def filled_share(batches: Sequence[Batch], budget: int) -> float:
    """Share of the budgets that holds tokens."""
    return sum(batch.tokens for batch in batches) / max(1, budget * len(batches))


def padding_share(batches: Sequence[Batch]) -> float:
    """Share of the padded micro-batches that is padding."""
    cells = sum(len(batch) * max(batch.lengths) for batch in batches)
    return 1 - sum(batch.tokens for batch in batches) / max(1, cells)
