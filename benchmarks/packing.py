"""How full micro-batches are and how even ranks, for steps of rows of log-normal lengths.

    python benchmarks/packing.py [--rows 32 256 1000] [--ranks 1 2 4 8] [--sigma 0.5 1.0 1.5]

`rows` are those of one rank in a step; the budget is 8 times the mean length, to which longer rows
are cut. Means over `--steps` steps:

filled  the tokens' share of the budget of all micro-batches (`least`: of the worst step)
run     their share of what ranks run: one with fewer micro-batches than another runs empty ones
spread  (fullest - emptiest rank) / mean, as rows are dealt and once some have moved
moved   the share of tokens that went to another rank
counts  the largest difference between ranks' numbers of micro-batches, dealt -> moved
ms      the time of one rank in a step: to find the moves, and to make its micro-batches
"""

from __future__ import annotations

import argparse
import time
from itertools import product

import numpy as np
import torch

from vireo.data.packing import balance, by_tokens, share
from vireo.data.ragged import BASE_KEYS, Batch, Example

ZERO = torch.zeros(1, dtype=torch.long)


def light(length: int) -> Example:
    """A row of that length, without memory for its tokens."""
    return Example({"input_ids": ZERO.expand(length)}, BASE_KEYS)


def spread(tokens: list[int]) -> float:
    return (max(tokens) - min(tokens)) * len(tokens) / sum(tokens)


def packed(ranks: list[list[int]], budget: int) -> list[list[Batch]]:
    return [by_tokens([light(length) for length in rows], budget) for rows in ranks]


def apart(batches: list[list[Batch]]) -> int:
    counts = [len(mine) for mine in batches]
    return max(counts) - min(counts)


def measure(rows: int, world: int, sigma: float, seed: int) -> dict[str, float]:
    drawn = np.random.default_rng(seed).lognormal(5.5, sigma, rows * world).astype(int) + 1
    budget = int(8 * drawn.mean())
    lengths = drawn.clip(max=budget).tolist()
    dealt: list[list[int]] = [[] for _ in range(world)]
    for i, length in enumerate(lengths):
        dealt[share(i, 1, world)].append(length)

    start = time.perf_counter()
    moves = balance(dealt, budget)
    found = time.perf_counter() - start
    gone = {(move.source, move.row) for move in moves}
    held = [
        [n for row, n in enumerate(mine) if (rank, row) not in gone]
        + [dealt[move.source][move.row] for move in moves if move.target == rank]
        for rank, mine in enumerate(dealt)
    ]
    start = time.perf_counter()
    batches = packed(held, budget)
    made = (time.perf_counter() - start) / world

    total = sum(lengths)
    counts = [len(mine) for mine in batches]
    return {
        "filled": total / (budget * sum(counts)),
        "run": total / (budget * max(counts) * world),
        "run dealt": total / (budget * max(map(len, packed(dealt, budget))) * world),
        "dealt": spread([sum(mine) for mine in dealt]),
        "spread": spread([sum(mine) for mine in held]),
        "moves": len(moves),
        "moved": sum(dealt[move.source][move.row] for move in moves) / total,
        "counts dealt": apart(packed(dealt, budget)),
        "counts": apart(batches),
        "find": found * 1e3,
        "pack": made * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256, 1000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.5, 1.0, 1.5])
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    print(
        "sigma   rows  ranks  filled  least    run (dealt)  spread: dealt   moved  (most)"
        "  moves  moved  counts  ms: find  pack"
    )
    for sigma, rows, world in product(args.sigma, args.rows, args.ranks):
        steps = [measure(rows, world, sigma, seed) for seed in range(args.steps)]
        mean = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
        most = {name: max(step[name] for step in steps) for name in steps[0]}
        print(
            f"{sigma:5.1f}  {rows:5d}  {world:5d}  {mean['filled']:6.3f}"
            f"  {min(step['filled'] for step in steps):5.3f}"
            f"  {mean['run']:5.3f}   {mean['run dealt']:5.3f}"
            f"  {mean['dealt']:13.3f}  {mean['spread']:6.4f}  {most['spread']:6.4f}"
            f"  {mean['moves']:5.1f}  {mean['moved']:5.3f}"
            f"  {most['counts dealt']:2.0f} -> {most['counts']:.0f}"
            f"  {mean['find']:7.2f}  {mean['pack']:5.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
