"""Rows into micro-batches: by a number of rows, or by a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from vireo.data.ragged import Batch, Example
from vireo.errors import RowError


def share(position: int, chunk: int, world: int) -> int:
    """The rank that gets row `position` of an optimizer step: micro-batches are dealt in turn."""
    return position // chunk % world


def micro_batches(
    examples: Sequence[Example],
    *,
    rows: int,
    budget: int | None = None,
    can_mix: bool = True,
    packing: bool = True,
) -> list[Batch]:
    """One rank's rows of a step as the trainer runs them: `rows` rows in each micro-batch or, with
    a `budget`, as many as its tokens hold, joined (`packing`) or padded.

    Raises RowError for a row that is longer than the budget.
    """
    made: list[Batch] = []
    for kind in by_kind(examples, can_mix):
        made += by_rows(kind, rows) if budget is None else by_tokens(kind, budget, not packing)
    return made


def padding_share(batches: Sequence[Batch]) -> float:
    """Share of the cells of padded micro-batches that is padding, 0 to 1."""
    cells = sum(len(batch) * max(batch.lengths) for batch in batches)
    return 1 - sum(batch.tokens for batch in batches) / cells if cells else 0.0


def by_kind(examples: Sequence[Example], can_mix: bool) -> list[Sequence[Example]]:
    """Rows that may share a micro-batch: all, or those with as many images."""
    if can_mix:
        return [examples]
    counts = sorted({example.images for example in examples})
    return [[e for e in examples if e.images == count] for count in counts]


def by_rows(examples: Sequence[Example], rows: int) -> list[Batch]:
    """Micro-batches of `rows` consecutive examples, the last one perhaps short."""
    return [Batch.of(examples[i : i + rows]) for i in range(0, len(examples), rows)]


def by_tokens(examples: Sequence[Example], budget: int, padded: bool = False) -> list[Batch]:
    """Micro-batches of at most `budget` tokens: longest first, each into the first that fits.

    `padded`: count each row as long as the longest of its micro-batch. A row is never parted.
    Raises RowError for one that is longer than the budget.
    """
    bins: list[tuple[int, list[Example]]] = []
    for example in sorted(examples, key=len, reverse=True):
        if len(example) > budget:
            raise RowError(
                "too_long",
                f"{len(example)} tokens do not fit a micro-batch of {budget}",
                example.where,
            )
        for i, (used, members) in enumerate(bins):
            size = len(members[0]) if padded else len(example)
            if used + size <= budget:
                bins[i] = (used + size, [*members, example])
                break
        else:
            bins.append((len(example), [example]))
    return [Batch.of(members) for _, members in bins]
