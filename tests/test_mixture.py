"""Weighted mixtures of files: what an epoch has of each, in which order, through any stop."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rowmakers import llava
from tests.test_loader import flat, steps
from vireo.data.loader import Plan
from vireo.data.mixture import Mixture, open_mixture
from vireo.data.order import epoch_order, interleave
from vireo.data.readers import open_rows
from vireo.errors import InputError, RowError

files = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 20)), min_size=1, max_size=4)
mixtures = st.builds(
    Plan.mixed,
    files.map(tuple),
    per_step=st.integers(1, 12),
    chunk=st.integers(1, 4),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
)
worlds = st.integers(1, 3)


def quick(test):
    return settings(max_examples=60, deadline=None)(test)


def of_files(plan: Plan, order) -> list[list[int]]:
    """Row numbers of an order, file by file, each counted from its file's start."""
    found, before = [], 0
    for rows, _ in plan.files:
        found.append([row - before for row in order if before <= row < before + rows])
        before += rows
    return found


# -- the order -----------------------------------------------------------------------------------


@quick
@given(mixtures)
def test_an_epoch_takes_of_each_file_what_its_weight_says(plan):
    assert plan.rows == sum(take for _, take in plan.files)
    for epoch in range(3):
        counts = list(map(len, of_files(plan, plan.order(epoch))))
        assert counts == [take for _, take in plan.files]
        assert sum(counts) == len(plan.order(epoch))


@quick
@given(mixtures)
def test_no_row_comes_again_before_every_row_of_its_file_came(plan):
    """Over the ends of epochs too: the rows of a file, in the order of training, are passes."""
    order = [int(row) for epoch in range(4) for row in plan.order(epoch)]
    for (rows, _), mine in zip(plan.files, of_files(plan, order)):
        for start in range(0, len(mine), rows):
            one = mine[start : start + rows]
            assert len(set(one)) == len(one)
        if not plan.shuffle:
            assert mine == [i % rows for i in range(len(mine))]


@quick
@given(mixtures, st.integers(0, 5))
def test_the_order_of_an_epoch_needs_no_other_epoch(plan, epoch):
    alone = list(Plan.mixed(plan.files, 1, 1, plan.seed, plan.shuffle).order(epoch))
    assert alone == list(plan.order(epoch))


@quick
@given(mixtures, worlds, worlds, st.data())
def test_a_resumed_run_takes_each_row_of_the_plan_once(plan, before, after, data):
    stop = 3 * plan.rows
    planned = [row for epoch in range(3) for row in plan.order(epoch)]
    middle = plan.position(data.draw(st.integers(0, 3 * plan.steps_per_epoch)))
    first, second = steps(plan, before, 0, middle), steps(plan, after, middle, stop)
    assert Counter(flat(first)) == Counter(planned[:middle])
    assert Counter(flat(second)) == Counter(planned[middle:])
    everything = [sorted(flat([step])) for step in first + second]
    assert everything == [sorted(flat([step])) for step in steps(plan, 1, 0, stop)]


@quick
@given(st.integers(1, 30), st.integers(0, 5), st.booleans(), st.integers(0, 3))
def test_one_file_of_weight_one_is_no_mixture(rows, seed, shuffle, epoch):
    plain, mixed = Plan(rows, 4, 1, seed, shuffle), Plan.mixed([(rows, rows)], 4, 1, seed, shuffle)
    assert list(mixed.order(epoch)) == list(plain.order(epoch))


@quick
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_without_shuffle_files_are_spread_evenly(counts):
    """The start of an epoch has of each file what its share is, up to a rounding."""
    taken = interleave(counts)
    for length in range(len(taken) + 1):
        for file, count in enumerate(counts):
            share = length * count / len(taken)
            assert abs((taken[:length] == file).sum() - share) <= 0.5 + len(counts) / 2


def test_orders_by_hand():
    """3 rows once, 2 rows twice, 4 rows half."""
    order = [
        list(epoch_order(((3, 3), (2, 4), (4, 2)), epoch, seed=0, shuffle=False))
        for epoch in (0, 1)
    ]
    assert order[0] == [3, 0, 5, 4, 1, 3, 6, 2, 4]
    assert order[1] == [3, 0, 7, 4, 1, 3, 8, 2, 4]


def test_shuffled_files_are_mixed_and_have_orders_of_their_own():
    plan = Plan.mixed([(60, 60), (60, 60)], 8, seed=1)
    first, second = of_files(plan, plan.order(0))
    assert first != second  # files of one size would else go in step
    assert all(20 < n < 40 for n in map(len, of_files(plan, plan.order(0)[:60])))
    orders = {
        tuple(Plan.mixed(plan.files, 8, seed=seed).order(epoch))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 4
    owners = {tuple(row < 60 for row in plan.order(epoch)) for epoch in range(3)}
    assert len(owners) == 3


# -- the rows ------------------------------------------------------------------------------------


def write(path, *names: str, **columns):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(llava(name, **columns)) + "\n" for name in names))
    return str(path)


def ids(rows) -> list:
    return [row.id for row in rows]


def test_files_are_one_sequence(tmp_path):
    paths = [write(tmp_path / "x.jsonl", "a", "b", "c"), write(tmp_path / "y.jsonl", "d")]
    rows = open_mixture(paths, [0.5, 3])
    assert (len(rows), rows.total, rows.skipped) == (4, 4, [])
    assert ids(rows) == ids(rows[:]) == ["a", "b", "c", "d"]
    assert (rows[-1].id, rows[-4].id) == ("d", "a")
    assert [row.where.split(" (")[0] for row in rows[2:]] == ["x.jsonl row 2", "y.jsonl row 0"]
    for outside in (4, -5):
        with pytest.raises(IndexError):
            rows[outside]


def test_weights_become_numbers_of_rows(tmp_path):
    names = [f"r{i}" for i in range(7)]
    paths = [write(tmp_path / f"{i}.jsonl", *names) for i in range(4)]
    assert open_mixture(paths).files == ((7, 7),) * 4
    assert open_mixture(paths, [2, 0.5, 0.01, 1.3]).files == ((7, 14), (7, 4), (7, 1), (7, 9))


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=3), st.integers(1, 50))
def test_any_weight_gives_at_least_a_row(weights, rows):
    mixture = Mixture([_Plain(rows) for _ in weights], weights)
    assert mixture.files == tuple((rows, max(1, round(weight * rows))) for weight in weights)


class _Plain(list):
    """Rows that no file has."""

    def __init__(self, rows: int):
        super().__init__(range(rows))
        self.skipped, self.total = [], rows


def test_images_start_from_the_folder_of_their_own_file(tmp_path):
    paths = [write(tmp_path / name / "data.jsonl", name, image="p.png") for name in ("one", "two")]
    rows = open_mixture(paths)
    assert [row.images[0].root for row in rows] == [str(tmp_path / n) for n in ("one", "two")]
    rows = open_mixture(paths, image_root=tmp_path)
    assert [row.images[0].root for row in rows] == [str(tmp_path)] * 2


def test_messages_tell_files_of_one_name_apart(tmp_path):
    good = write(tmp_path / "one" / "data.jsonl", "a", "b")
    bad = write(tmp_path / "two" / "data.jsonl", "c", image="../up.png")
    with pytest.raises(RowError, match=r"^two/data.jsonl row 0 \(id 'c'"):
        open_mixture([good, bad])
    assert open_mixture([good, good])[3].where.startswith("data.jsonl row 1")
    with pytest.raises(RowError, match=r"^data.jsonl row 0"):
        open_mixture([bad])


def test_skipped_rows_of_all_files_are_known(tmp_path):
    text = json.dumps(llava("ok")) + "\n{}\n"
    paths = []
    for name in ("x", "y"):
        (tmp_path / f"{name}.jsonl").write_text(text)
        paths.append(tmp_path / f"{name}.jsonl")
    rows = open_mixture(paths, on_bad_row="skip")
    assert (len(rows), rows.total) == (2, 4)
    found = [error.where for error in rows.skipped]
    assert found == ["x.jsonl row 1 (line 2)", "y.jsonl row 1 (line 2)"]
    with pytest.raises(RowError, match=r"x.jsonl row 1"):
        open_mixture(paths)


def test_the_digest_tells_files_and_weights_apart(tmp_path):
    x, y = write(tmp_path / "x.jsonl", "a", "b"), write(tmp_path / "y.jsonl", "longer", "d")
    assert open_mixture([x]).digest == open_rows(x).digest  # as earlier releases saved it
    assert open_mixture([x, y], [1, 2]).digest == open_mixture([x, y], [1.0, 2.0]).digest
    chosen = ([x], None), ([x], [2]), ([x, y], None), ([y, x], None), ([x, y], [1, 2])
    assert len({open_mixture(*one).digest for one in chosen}) == len(chosen)


@pytest.mark.parametrize(
    ("count", "weights", "message"),
    [
        (0, None, "no data file"),
        (2, [1], r"1 weight\(s\) for 2 data file\(s\)"),
        (1, [0], "weight of .* is 0"),
        (1, [-1.0], "weight of .* is -1.0"),
        (1, [float("nan")], "weight of .* is nan"),
        (1, [float("inf")], "weight of .* is inf"),
    ],
)
def test_wrong_weights_are_refused(tmp_path, count, weights, message):
    path = write(tmp_path / "x.jsonl", "a")
    with pytest.raises(InputError, match=message):
        open_mixture([path] * count, weights)
