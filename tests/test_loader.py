"""Which rows a step has: every row once an epoch, on any number of ranks, through any stop."""

from __future__ import annotations

import multiprocessing
import resource
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_models import assistant, noise, renderer, row, user
from vireo.data.conversation import ImageRef
from vireo.data.loader import Plan, StepLoader
from vireo.data.ragged import BASE_KEYS, Example
from vireo.errors import RowError


class Numbers:
    """Stands in for a renderer: rows are numbers, odd ones in `bad` are refused."""

    def __init__(self, bad: tuple[int, ...] = (), broken: int | None = None):
        self.bad, self.broken = bad, broken

    def example(self, number: int) -> Example:
        if number == self.broken:
            raise ZeroDivisionError(f"row {number} breaks the program")
        if number in self.bad:
            raise RowError("bad_image", f"number {number} is bad", f"row {number}")
        fields = {name: torch.tensor([number]) for name in BASE_KEYS}
        return Example(fields, BASE_KEYS, where=f"row {number}")


def loader(plan: Plan, made: Any = None, rows: Any = None, **options: Any) -> StepLoader:
    stand_ins: Any = (range(plan.rows), Numbers())
    return StepLoader(rows or stand_ins[0], made or stand_ins[1], plan, **options)


def steps(plan: Plan, world: int, start: int, stop: int) -> list[list[list[int]]]:
    """The row numbers of each step and each rank, after checking that the ranks agree."""
    ranks = [
        list(loader(plan, rank=rank, world=world, start=start, stop=stop).steps())
        for rank in range(world)
    ]
    ends = [[end for _, end in one] for one in ranks]
    assert all(one == ends[0] for one in ends)
    return [[mine for mine, _ in step] for step in zip(*ranks)]


def flat(taken: list[list[list[int]]]) -> list[int]:
    return [number for step in taken for rank in step for number in rank]


plans = st.builds(
    Plan,
    rows=st.integers(1, 25),
    per_step=st.integers(1, 12),
    chunk=st.integers(1, 4),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
)
worlds = st.integers(1, 4)


def quick(test):
    return settings(max_examples=60, deadline=None)(test)


# -- the plan ------------------------------------------------------------------------------------


@quick
@given(plans, worlds)
def test_every_row_is_seen_once_an_epoch(plan, world):
    for epoch in range(2):
        taken = steps(plan, world, epoch * plan.rows, (epoch + 1) * plan.rows)
        assert sorted(flat(taken)) == list(range(plan.rows))
        assert len(taken) == plan.steps_per_epoch


@quick
@given(plans, worlds)
def test_the_ranks_together_take_the_rows_of_the_order(plan, world):
    taken = steps(plan, world, 0, 2 * plan.rows)
    order = [*plan.order(0), *plan.order(1)]
    done = 0
    for step in taken:
        count = sum(len(rank) for rank in step)
        assert Counter(flat([step])) == Counter(order[done : done + count])
        assert count == min(plan.per_step, plan.rows - done % plan.rows)  # none crosses an epoch
        done += count
    assert done == 2 * plan.rows


@quick
@given(plans, worlds, worlds, st.data())
def test_a_resumed_run_takes_just_the_rows_that_are_left(plan, before, after, data):
    """Stopped between any two steps and resumed on another number of ranks."""
    stop = 2 * plan.rows
    step = data.draw(st.integers(0, 2 * plan.steps_per_epoch))
    middle = plan.position(step)
    unbroken = steps(plan, before, 0, stop)
    first, second = steps(plan, before, 0, middle), steps(plan, after, middle, stop)
    assert first == unbroken[:step]
    assert [sorted(flat([one])) for one in second] == [sorted(flat([s])) for s in unbroken[step:]]


@quick
@given(plans, st.integers(0, 60))
def test_the_position_of_a_step_is_that_of_all_steps_before_it(plan, step):
    position = 0
    for _ in range(step):
        assert position < plan.after(position) <= position + plan.per_step
        position = plan.after(position)
    assert plan.position(step) == position


@quick
@given(plans)
def test_an_epochs_order_holds_every_row_and_does_not_change(plan):
    for epoch in range(3):
        order = plan.order(epoch)
        assert sorted(order) == list(range(plan.rows))
        assert list(order) == list(plan.order(epoch))
        if not plan.shuffle:
            assert list(order) == list(range(plan.rows))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [tuple(Plan(50, 5, seed=seed).order(epoch)) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len(set(orders)) == 6


def test_the_order_of_a_seed_never_changes():
    """Runs resume from checkpoints of earlier releases."""
    assert list(Plan(8, 2, seed=3).order(0)) == [0, 3, 2, 4, 1, 5, 6, 7]
    assert list(Plan(8, 2, seed=3).order(1)) == [3, 7, 0, 4, 6, 5, 2, 1]


def test_an_endless_plan_takes_rows_by_number():
    plan = Plan.endless(5, chunk=2)
    assert steps(plan, world=2, start=0, stop=13) == [
        [[0, 1, 4], [2, 3]],
        [[5, 6, 9], [7, 8]],
        [[10, 11], [12]],
    ]
    assert [plan.position(step) for step in (0, 1, 10**9)] == [0, 5, 5 * 10**9]
    far = 10**15
    assert flat(steps(plan, 1, far, far + 5)) == list(range(far, far + 5))


def test_steps_by_hand():
    """7 rows, 5 a step, in micro-batches of 2, on 2 ranks."""
    plan = Plan(7, 5, chunk=2, shuffle=False)
    assert steps(plan, world=2, start=0, stop=14) == [
        [[0, 1, 4], [2, 3]],
        [[5, 6], []],
        [[0, 1, 4], [2, 3]],
        [[5, 6], []],
    ]
    assert [plan.position(step) for step in range(5)] == [0, 5, 7, 12, 14]


def test_a_stop_inside_a_step_cuts_it():
    assert steps(Plan(7, 5, shuffle=False), world=1, start=0, stop=6) == [[[0, 1, 2, 3, 4]], [[5]]]


# -- the loader ----------------------------------------------------------------------------------


def numbers(one: Any) -> list[int]:
    return [int(example.fields["input_ids"]) for example in one.examples]


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_come_in_order_and_refused_ones_come_by_name(workers):
    plan = Plan(10, 4, shuffle=False)
    got = list(loader(plan, Numbers(bad=(1, 6, 7)), start=4, stop=20, workers=workers))
    assert [numbers(one) for one in got] == [[4, 5], [8, 9], [0, 2, 3], [4, 5], [8, 9]]
    assert [one.position for one in got] == [8, 10, 14, 18, 20]
    refused = [str(error) for one in got for error in one.refused]
    assert refused == [f"row {i}: number {i} is bad [bad_image]" for i in (6, 7, 1, 6, 7)]
    assert {type(error) for one in got for error in one.refused} == {RowError}
    assert all(error.reason == "bad_image" for one in got for error in one.refused)
    assert [one.where for one in got[0].examples] == ["row 4", "row 5"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_rank_without_rows_in_a_step_gets_the_step_all_the_same(workers):
    plan = Plan(3, 2, shuffle=False)
    got = list(loader(plan, rank=1, world=2, stop=3, workers=workers))
    assert [(numbers(one), one.position) for one in got] == [([1], 2), ([], 3)]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_that_is_no_refusal_stops_the_run(workers):
    steps = loader(Plan(6, 2, shuffle=False), Numbers(broken=3), stop=6, workers=workers)
    with pytest.raises(ZeroDivisionError, match="row 3 breaks the program"):
        list(steps)


@pytest.mark.parametrize("after", [0, 1])
def test_workers_end_with_the_reading(after):
    """However it ends: a loop that is left, or an error, whose traceback lives on."""
    reading: Any = iter(loader(Plan(8, 2, shuffle=False), Numbers(broken=3), stop=8, workers=2))
    assert numbers(next(reading)) == [0, 1]
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    if after:
        with pytest.raises(ZeroDivisionError):
            next(reading)
    else:
        reading.close()
    assert not multiprocessing.active_children()


def test_workers_make_the_same_examples(tmp_path):
    """Rows of a real renderer, pictures and a refused one among them, cross processes unchanged."""
    rows = [
        row(user(0, "What is it?"), assistant("A cat."), images=[noise(84, 56)], where="row 0"),
        row(user("Hi <|im_end|>"), assistant("Hi."), weight=0.5, where="row 1"),
        row(user(0), assistant("?"), images=[ImageRef("x.png", str(tmp_path))], where="row 2"),
        row(user(0, 1), assistant("Two."), images=[noise(28, 28), noise(56, 28)], where="row 3"),
    ]
    made, plan = renderer("qwen2_5_vl"), Plan(4, 3, shuffle=False)
    got = [list(loader(plan, made, rows, stop=4, workers=workers)) for workers in (0, 2)]
    for one, other in zip(*got, strict=True):
        assert [str(error) for error in one.refused] == [str(error) for error in other.refused]
        for a, b in zip(one.examples, other.examples, strict=True):
            assert (a.where, a.images, a.keys) == (b.where, b.images, b.keys)
            assert a.fields.keys() == b.fields.keys()
            assert all(torch.equal(a.fields[n], b.fields[n]) for n in a.fields)
            b.fields["labels"][:] = 0  # what arrives can be written to
    assert [len(one.examples) for one in got[1]] == [2, 1]
    assert got[1][0].refused[0].reason == "missing_image"
    assert "row 2" in str(got[1][0].refused[0])


def test_a_large_step_does_not_run_out_of_open_files():
    """A tensor that crosses processes by a file descriptor each would need 1,600 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        got = list(loader(Plan(400, 400), stop=400, workers=1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sorted(numbers(got[0])) == list(range(400))


@pytest.mark.parametrize("workers", [0, 1])
def test_reading_leaves_the_runs_random_state_alone(workers):
    """Else dropout after a resume would differ from an unbroken run's."""
    before = torch.get_rng_state()
    list(loader(Plan(4, 2), stop=4, workers=workers))
    assert torch.equal(torch.get_rng_state(), before)
