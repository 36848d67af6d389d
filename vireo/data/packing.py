"""Rows into micro-batches: by a number of rows, or by a budget of tokens, even over the ranks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import replace
from math import ceil, inf
from typing import NamedTuple

from vireo.data.ragged import Batch, Example
from vireo.errors import RowError
from vireo.parallel import Parallel

SPREAD = 0.02  # how far apart the ranks' tokens of a step may be, as a share of their mean

PARTNERS = 4  # how many of the emptiest ranks a rank tries to give a row to


class Move(NamedTuple):
    """Row `row` of rank `source` goes to rank `target`."""

    source: int
    row: int
    target: int


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
    """Micro-batches of at most `budget` tokens: longest first, each into the fullest that it fits.

    `padded`: count each row as long as the longest of its micro-batch. A row is never parted.
    Raises RowError for one that is longer than the budget.
    """
    rows = sorted(examples, key=len, reverse=True)
    if rows and len(rows[0]) > budget:
        raise RowError(
            "too_long",
            f"{len(rows[0])} tokens do not fit a micro-batch of {budget}",
            rows[0].where,
        )
    made: list[list[Example]] = []
    if padded:  # rows of like length side by side
        at = 0
        while at < len(rows):
            made.append(rows[at : at + budget // len(rows[at])])
            at += len(made[-1])
    else:
        room: list[tuple[int, int]] = []  # (tokens left, number) of each micro-batch, ascending
        for example in rows:
            at = bisect_left(room, (len(example), 0))
            left, number = room.pop(at) if at < len(room) else (budget, len(made))
            if number == len(made):
                made.append([])
            made[number].append(example)
            insort(room, (left - len(example), number))
    return [Batch.of(members) for members in made]


def evened(examples: Sequence[Example], parallel: Parallel, budget: int) -> list[Example]:
    """This rank's rows of a step once ranks with many tokens gave some to the others; collective.

    Only the rows that move are sent.
    """
    moves = balance(parallel.gather([len(example) for example in examples]), budget)
    if not moves:
        return list(examples)
    outgoing: list[list[Example]] = [[] for _ in range(parallel.world)]
    given = {move.row: move.target for move in moves if move.source == parallel.rank}
    for row, target in given.items():
        # Copies: a tensor that is a part of a larger one would take all of it along.
        fields = {name: value.clone() for name, value in examples[row].fields.items()}
        outgoing[target].append(replace(examples[row], fields=fields))
    stay = [example for row, example in enumerate(examples) if row not in given]
    return stay + parallel.exchange(outgoing)


def balance(lengths: Sequence[Sequence[int]], budget: int | None = None) -> list[Move]:
    """The rows to move, so that ranks have as many tokens; the same list wherever it is computed.

    lengths: tokens of each row of each rank. The fullest and the emptiest rank are SPREAD of the
    mean apart afterwards, and a quarter of `budget` (else they could differ by micro-batches), or
    as near as whole rows get by moving or exchanging one at a time. Long rows go first, so that
    few move.
    """
    held = [sorted((n, rank, i) for i, n in enumerate(mine)) for rank, mine in enumerate(lengths)]
    tokens = [sum(mine) for mine in lengths]
    mean = sum(tokens) / len(tokens)
    allowed = SPREAD * mean if budget is None else min(SPREAD * mean, budget / 4)
    full = inf if budget is None else ceil(mean / budget) * budget
    # Ranks from the emptiest to the fullest, without those that whole rows leave fuller than that.
    ranks = sorted(range(len(tokens)), key=lambda rank: tokens[rank])
    while len(ranks) > 1:
        high, most = ranks[-1], tokens[ranks[-1]]
        if most - tokens[ranks[0]] <= allowed and most <= full:
            break
        for low in ranks[:-1][:PARTNERS]:
            found = _trade(held[high], held[low], most - tokens[low], allowed / 8)
            if found:
                break
        else:
            ranks.pop()
            continue
        for row, source, target in zip(found, (high, low), (low, high)):
            del held[source][bisect_left(held[source], row)]
            insort(held[target], row)
            tokens[source] -= row[0]
            tokens[target] += row[0]
        ranks.sort(key=lambda rank: tokens[rank])
    return sorted(
        Move(source, row, rank)
        for rank, rows in enumerate(held)
        for _, source, row in rows
        if source != rank
    )


_Row = tuple[int, int, int]  # its tokens, the rank that it is from, its number there


def _trade(
    fuller: list[_Row], emptier: list[_Row], difference: int, least: float
) -> tuple[_Row, ...]:
    """The row to give, or the row to give and the one to take for it, nearest to half of the
    `difference` of two ranks; () where none brings them closer.

    An exchange moves two rows, so it must bring them closer by `least` tokens.
    """

    def near(size: float) -> list[_Row]:  # the rows on either side of a size
        at = bisect_left(fuller, (size,))
        return fuller[max(at - 1, 0) : at + 1]

    half = difference / 2
    best: tuple[float, tuple[_Row, ...]] = (inf, ())
    for row in near(half):
        if 0 < row[0] < difference:
            best = min(best, (abs(row[0] - half), (row,)))
    if best[0] <= half / 2 or not fuller or fuller[-1][0] <= half:
        return best[1]  # a good step, or the longest row, which no exchange could better
    for back in emptier:
        for row in near(back[0] + half):
            over = row[0] - back[0]
            if least <= over <= difference - least and abs(over - half) < best[0]:
                best = (abs(over - half), (row, back))
    return best[1]
