"""Steps that are full and even: tokens over ranks, tokens of micro-batches, and what that moves."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.launch import torchrun
from tests.ranks import balance as runs
from tests.rows import losses, picture
from vireo.data.packing import SPREAD, Move, balance, by_tokens, evened, share
from vireo.data.ragged import BASE_KEYS, Example
from vireo.errors import RowError
from vireo.families.tiny import build
from vireo.parallel import Parallel, alone

Rows = list[tuple[int, int, int]]  # tokens, rank that it was dealt to, place there


def after(lengths: Sequence[Sequence[int]], moves: Sequence[Move]) -> list[Rows]:
    """The rows of each rank once the moves are made."""
    held: list[Rows] = [[(n, rank, i) for i, n in enumerate(m)] for rank, m in enumerate(lengths)]
    for source, row, target in moves:
        moved = (lengths[source][row], source, row)
        held[source].remove(moved)
        held[target].append(moved)
    return held


def sums(held: Sequence[Rows]) -> list[int]:
    return [sum(n for n, *_ in rows) for rows in held]


def spread(tokens: Sequence[int]) -> float:
    """How far the fullest and the emptiest are apart, as a share of the mean."""
    return (max(tokens) - min(tokens)) * len(tokens) / sum(tokens)


def mix(rows: int, sigma: float, seed: int) -> tuple[list[int], int]:
    """Log-normal lengths, and a budget of 8 times their mean that the longest are cut to."""
    drawn = np.random.default_rng(seed).lognormal(5.5, sigma, rows).astype(int) + 1
    budget = int(8 * drawn.mean())
    return drawn.clip(max=budget).tolist(), budget


def dealt(lengths: Sequence[int], world: int) -> list[list[int]]:
    return [
        [n for i, n in enumerate(lengths) if share(i, 1, world) == rank] for rank in range(world)
    ]


def examples_of(lengths: Sequence[int]) -> list[Example]:
    return [
        Example({"input_ids": torch.full((n,), i)}, BASE_KEYS, where=f"row {i}")
        for i, n in enumerate(lengths)
    ]


# -- which rows move -----------------------------------------------------------------------------

uneven = st.lists(st.lists(st.integers(1, 300), max_size=12), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(uneven, st.none() | st.integers(300, 900))
def test_no_row_is_lost_or_doubled_and_ranks_are_as_near_as_whole_rows_allow(lengths, budget):
    before, moves = after(lengths, []), balance(lengths, budget)
    assert moves == balance(tuple(map(tuple, lengths)), budget)
    assert all(source != target for source, _, target in moves)
    held = after(lengths, moves)
    assert sorted(chain(*held)) == sorted(chain(*before))
    tokens = sums(held)
    gap = max(tokens) - min(tokens)
    assert gap <= max(sums(before)) - min(sums(before))
    if gap * len(tokens) > SPREAD * sum(tokens):
        # The fullest has no row that would bring it and the emptiest closer.
        assert min(n for n, *_ in held[tokens.index(max(tokens))]) >= gap


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 8),
    st.integers(50, 100),
    st.floats(0.3, 1.2),
    st.floats(1, 4),
    st.integers(0, 2**32),
)
def test_ranks_of_many_short_rows_come_within_two_per_cent(world, rows, sigma, skew, seed):
    """`skew`: how much longer the rows of the last rank are than those of the first."""
    draw = np.random.default_rng(seed)
    lengths = [
        (draw.lognormal(4, sigma, rows) * skew ** (rank / world)).astype(int).clip(1, 500).tolist()
        for rank in range(world)
    ]
    assert spread(sums(after(lengths, balance(lengths)))) <= SPREAD


@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_few_rows_move_and_no_more_tokens_than_are_too_many(world, sigma):
    for seed in range(5):
        lengths, budget = mix(128 * world, sigma, seed)
        ranks = dealt(lengths, world)
        moves = balance(ranks, budget)
        assert len(moves) <= 4 * world  # of 128 rows a rank
        too_many = sum(max(0.0, sum(rows) - sum(lengths) / world) for rows in ranks)
        moved = sum(ranks[source][row] for source, row, _ in moves)
        assert moved <= 1.05 * too_many + 0.01 * sum(lengths) / world
        assert spread(sums(after(ranks, moves))) <= SPREAD


def test_moves_by_hand():
    assert balance([[5, 5, 5, 5]]) == []
    assert balance([[100, 50], [99, 50]]) == []  # near enough
    assert balance([[30, 10, 20], []]) == [Move(0, 0, 1)]
    assert balance([[10, 8, 12], [8]]) == [Move(0, 0, 1)]  # 20 and 18
    assert balance([[10, 10], [9, 9]]) == [Move(0, 0, 1), Move(1, 0, 0)]  # an exchange
    assert balance([[100], [1, 1]]) == []  # no row makes it better
    # The emptiest has nothing to give for one of 50, the next one has.
    assert balance([[50, 50], [80], [42, 42]]) == [Move(0, 0, 2), Move(2, 0, 0)]
    assert balance([[100], [9, 2], [1]]) == [Move(1, 1, 2)]


def test_ranks_move_rows_for_the_sake_of_a_micro_batch():
    """100 and 102 tokens are near enough by themselves, but not where a micro-batch holds 101."""
    lengths = [[50, 51, 1], [50, 50]]
    assert balance(lengths) == balance(lengths, 200) == []
    assert sums(after(lengths, balance(lengths, 101))) == [101, 101]


def test_a_large_step_is_even_to_a_part_of_a_micro_batch():
    lengths, budget = mix(8000, 1.0, 0)
    ranks = dealt(lengths, 4)
    tokens = sums(after(ranks, balance(ranks, budget)))
    assert max(tokens) - min(tokens) <= budget / 4 < SPREAD * sum(lengths) / 4


# -- how full micro-batches are ------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
@pytest.mark.parametrize(("rows", "filled"), [(256, 0.95), (512, 0.98), (2048, 0.99)])
def test_micro_batches_of_a_large_step_are_full(rows, filled, sigma):
    for seed in range(5):
        lengths, budget = mix(rows, sigma, seed)
        batches = by_tokens(examples_of(lengths), budget)
        assert max(batch.tokens for batch in batches) <= budget
        assert sum(lengths) / (budget * len(batches)) >= filled


@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_have_as_many_micro_batches_and_these_are_full(world, sigma):
    counts = []
    for seed in range(3):
        lengths, budget = mix(256 * world, sigma, seed)
        ranks = dealt(lengths, world)
        held = after(ranks, balance(ranks, budget))
        counts = [len(by_tokens(examples_of([n for n, *_ in rows]), budget)) for rows in held]
        assert max(counts) - min(counts) <= 1
        # Of the budget of what every rank runs, the empty ones of ranks that have fewer included.
        assert sum(lengths) / (budget * max(counts) * world) >= 0.95


def test_a_row_that_is_too_long_is_named_whatever_its_rank():
    with pytest.raises(RowError, match="row 2: 90 tokens do not fit a micro-batch of 80") as caught:
        by_tokens(evened(examples_of([8, 80, 90, 1]), alone(), 80), 80)
    assert caught.value.reason == "too_long"


# -- rows that change ranks ----------------------------------------------------------------------


class Posted(Parallel):
    """One of two ranks, in one process: what the other has is given, what goes out is kept."""

    def __init__(self, rank: int, lengths: list[list[int]], coming: list[Example]):
        super().__init__(rank, len(lengths), torch.device("cpu"), None)
        self.lengths, self.coming, self.gone = lengths, coming, []

    def gather(self, value):
        assert value == self.lengths[self.rank]
        return self.lengths

    def exchange(self, outgoing):
        self.gone = outgoing
        return self.coming


def test_rows_that_stay_keep_their_order_and_those_that_come_are_last():
    rows = examples_of([40, 7, 30, 9])
    ranks = Posted(0, [[40, 7, 30, 9], [8]], examples_of([5]))
    left = evened(rows, ranks, budget=100)
    moves = balance(ranks.lengths, 100)
    gone = [row for source, row, target in moves if source == 0]
    assert gone
    assert left[:-1] == [row for i, row in enumerate(rows) if i not in gone]
    assert left[-1] is ranks.coming[0]
    assert [one.where for one in ranks.gone[1]] == [f"row {i}" for i in gone]


def test_ranks_that_are_even_exchange_nothing(monkeypatch):
    monkeypatch.setattr(Posted, "exchange", None)
    rows = examples_of([5, 6])
    assert evened(rows, Posted(1, [[11], [5, 6]], []), budget=100) == rows


def test_a_row_takes_no_more_along_than_its_own_tensors():
    whole = torch.arange(100_000)
    row = Example({"input_ids": whole[:10]}, BASE_KEYS)
    ranks = Posted(0, [[10, 10], []], [])
    evened([row, row], ranks, budget=100)
    (sent,) = ranks.gone[1]
    assert sent.fields["input_ids"].untyped_storage().nbytes() == 80
    assert torch.equal(sent.fields["input_ids"], whole[:10])


def test_one_rank_exchanges_with_itself():
    assert alone().exchange([["a", 1]]) == ["a", 1]


# -- a training run ------------------------------------------------------------------------------

ROWS, STEP, STEPS, BUDGET = 48, 24, 2, 360
RUNS = {2: ("qwen2_5_vl", "mllama"), 3: ("qwen2_5_vl",)}  # by the number of ranks


def write_uneven(folder: Path) -> None:
    """Rows whose every sixth is long and has a picture: in ranks' turns, one rank gets them all."""
    folder.mkdir()
    draw, rows = random.Random(0), []
    for i in range(ROWS):
        long = i % 6 == 0
        names = [f"{i}.png"] * (long or i % 5 == 1)
        for name in names:
            picture(i, (112, 84) if long else (56, 56)).save(folder / name)
        answer = "so " * (40 + draw.randrange(15) if long else draw.randrange(12))
        turns = [
            {"from": "human", "value": "<image>" * len(names) + f"What is {i}?"},
            {"from": "gpt", "value": answer + f"it is {i}"},
        ]
        rows.append({"id": f"r{i}", "image": names, "conversations": turns})
    (folder / "rows.json").write_text(json.dumps(rows))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each family with its run on one rank."""
    base = tmp_path_factory.mktemp("balance")
    for name in RUNS[2]:
        build(name, base / "models" / name, size="test")
        write_uneven(base / name)
        flags = [
            f"--vlm_model_name_or_path={base / 'models' / name}",
            f"--train_file={base / name / 'rows.json'}",
            *("--output_dir={out}", "--lr=1e-3", f"--max_steps={STEPS}", "--shuffle=false"),
            *(f"--global_batch_size={STEP}", f"--max_tokens_per_gpu={BUDGET}", "--num_workers=0"),
            *("--fsdp_mp_dtype=fp32", "--report_to=none", "--freeze_vision=false"),
        ]
        (base / name / "flags.json").write_text(json.dumps(flags))
        runs.train(base / name, alone())
    return base


def on_ranks(base: Path, world: int) -> None:
    if not (base / f"exchange-{world}-0.json").exists():
        torchrun(world, "-m", "tests.ranks.balance", str(base), *RUNS[world])


def noted(run: Path, rank: int) -> list[tuple[dict[str, str], list[int]]]:
    """(checksum of each row, tokens of each micro-batch) of each step of a rank."""
    return [json.loads(line) for line in (run / f"rank-{rank}.jsonl").open()]


@pytest.mark.parametrize(
    ("world", "name"),
    [pytest.param(w, name, marks=[pytest.mark.slow] * (w > 2)) for w in RUNS for name in RUNS[w]],
)
def test_a_run_with_uneven_rows_is_even_over_ranks_and_the_run_of_one_rank(base, world, name):
    on_ranks(base, world)
    alone_run, run = base / name / "1", base / name / str(world)
    assert losses(run) == pytest.approx(losses(alone_run), rel=1e-6)
    pictures_moved = 0
    for (whole, _), *parts in zip(noted(alone_run, 0), *(noted(run, r) for r in range(world))):
        held = [rows for rows, _ in parts]
        assert sum(map(len, held)) == len(whole) == STEP
        # Each row is what one rank has of it, to the last pixel, wherever it is now.
        assert {where: seen for rows in held for where, seen in rows.items()} == whole
        assert spread([sum(batches) for _, batches in parts]) <= SPREAD
        assert all(0 < tokens <= BUDGET for _, batches in parts for tokens in batches)
        numbers = [{int(re.search(r"row (\d+)", w)[1]) for w in rows} for rows in held]
        start = min(set.union(*numbers))
        for rank, mine in enumerate(numbers):
            came = {n for n in mine if share(n - start, 1, world) != rank}
            assert came != mine
            pictures_moved += len([n for n in came if n % 6 == 0 or n % 5 == 1])
    assert pictures_moved >= STEPS


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_what_a_rank_sends_reaches_its_target_alone(base, world: int) -> None:
    on_ranks(base, world)
    last = world - 1
    for rank in range(world):
        found = json.loads((base / f"exchange-{world}-{rank}.json").read_text())
        assert found["nothing"] == []
        if rank == last:
            parts = [[r, [r, r, r, "torch.bfloat16"]] for r in range(world)]
            assert found["got"] == [*chain(*parts), "mine"]
            assert found["sent"] == []
        else:
            assert found["got"] == ["mine"]
            assert found["sent"] == [last]
