"""Streams: row i is the same in every process, wherever the reading starts."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import tracemalloc
from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rowmakers import llava
from vireo.data import json_file
from vireo.data.loader import Plan, StepLoader
from vireo.data.ragged import BASE_KEYS, Example
from vireo.data.readers import open_rows
from vireo.data.stream import open_stream
from vireo.errors import InputError, RowError, VireoError

CONTAINERS = ["lines", "lines.gz", "array", "array.gz", "parquet", "shards", "saved", "hub"]


def rows_of(count: int, start: int = 0) -> list[dict]:
    return [llava(str(i)) for i in range(start, start + count)]


def write(folder, rows: list[dict], container: str = "lines", monkeypatch: Any = None) -> str:
    """A container of rows: its path, or a hub name that `datasets` is made to know."""
    folder.mkdir(exist_ok=True)
    kind, _, packed = container.partition(".")
    path = folder / f"data.{kind}"
    if kind in ("lines", "array"):
        text = "\n".join(map(json.dumps, rows)) if kind == "lines" else json.dumps(rows)
        path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    elif kind == "shards":
        path.mkdir()
        for shard, start in enumerate(range(0, len(rows), 4)):
            table = pa.Table.from_pylist(rows[start : start + 4])
            pq.write_table(table, path / f"train-{shard:05d}.parquet", row_group_size=3)
    else:
        datasets = pytest.importorskip("datasets")
        found = datasets.Dataset.from_list(rows)
        if kind == "saved":
            found.save_to_disk(path)
        else:
            streamed = found.to_iterable_dataset(num_shards=min(3, len(rows)))
            known = {("train", True): streamed}
            monkeypatch.setattr(
                datasets, "load_dataset", lambda name, split, streaming: known[split, streaming]
            )
            return "org/name"
    return str(path)


def ids(stream, numbers) -> list[int]:
    return [int(stream[i].id) for i in numbers]


class Ids:
    """Stands in for a renderer: a row is its id, and those in `bad` are refused."""

    def __init__(self, bad: tuple[int, ...] = ()):
        self.bad = bad

    def example(self, row: Any) -> Example:
        if int(row.id) in self.bad:
            raise RowError("bad_image", "it is bad", row.where)
        return Example({name: torch.tensor([int(row.id)]) for name in BASE_KEYS}, BASE_KEYS)


def taken(path, plan: Plan, world: int, start: int, stop: int, workers: int = 0, **options):
    """The ids that all ranks together take, step by step, from streams of their own."""
    ranks = [
        list(
            StepLoader(
                open_stream([path], **options),
                Ids(),  # type: ignore[arg-type]
                plan,
                rank=rank,
                world=world,
                start=start,
                stop=stop,
                workers=workers,
            )
        )
        for rank in range(world)
    ]
    return [
        sorted(int(one.fields["input_ids"]) for rank in step for one in rank.examples)
        for step in zip(*ranks, strict=True)
    ]


# -- containers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_is_read_from_any_row_on_and_again(tmp_path, monkeypatch, container):
    path = write(tmp_path / "x", rows_of(10), container, monkeypatch)
    stream = open_stream([path], shuffle=False)
    assert ids(stream, range(25)) == [i % 10 for i in range(25)]
    assert stream[23].turns[1].text == "Red."
    for start in (0, 4, 9, 10, 11, 37):
        opened = open_stream([path], shuffle=False)
        assert ids(opened, range(start, start + 12)) == [i % 10 for i in range(start, start + 12)]
    assert not stream.skipped


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("workers", [0, 2])
def test_every_container_is_shared_by_ranks_and_workers(tmp_path, monkeypatch, container, workers):
    """A data set of `datasets` would give each worker its own part of the shards."""
    path = write(tmp_path / "x", rows_of(10), container, monkeypatch)
    got = taken(path, Plan.endless(4), 2, 0, 20, workers, seed=3, buffer=3)
    assert sorted(i for step in got for i in step) == sorted([*range(10)] * 2)
    alone = open_stream([path], seed=3, buffer=3)
    assert got == [sorted(ids(alone, range(i, i + 4))) for i in range(0, 20, 4)]


@pytest.mark.parametrize("container", CONTAINERS[:-1])
def test_a_stream_names_rows_as_other_readers_do(tmp_path, container):
    path = write(tmp_path / "x", rows_of(6), container)
    stream = open_stream([path], shuffle=False)
    assert [stream[i].where for i in range(6)] == [row.where for row in open_rows(path)]
    assert [stream[i] for i in range(6)] == list(open_rows(path))


def test_several_files_follow_one_another(tmp_path):
    paths = [
        write(tmp_path / "x", rows_of(3)),
        write(tmp_path / "y", rows_of(4, 3), "parquet"),
        write(tmp_path / "z", rows_of(2, 7), "lines.gz"),
    ]
    for start in (0, 2, 5, 8, 13):
        stream = open_stream(paths, shuffle=False)
        assert ids(stream, range(start, 20)) == [i % 9 for i in range(start, 20)]
    stream = open_stream(paths, buffer=100)
    assert sorted(ids(stream, range(9))) == list(range(9))
    same = [write(tmp_path / name, rows_of(1)) for name in ("one", "two")]
    stream = open_stream(same, shuffle=False)
    assert [stream[i].where.split()[0] for i in (0, 1)] == ["one/data.lines", "two/data.lines"]


# -- the order -----------------------------------------------------------------------------------

orders = {
    "rows": st.integers(1, 30),
    "buffer": st.integers(1, 12),
    "seed": st.integers(0, 3),
}


@settings(max_examples=60, deadline=None)
@given(**orders)
def test_a_pass_has_every_row_once_and_shuffles_within_blocks(tmp_path_factory, rows, buffer, seed):
    path = write(tmp_path_factory.mktemp("x"), rows_of(rows))
    stream = open_stream([path], seed=seed, buffer=buffer)
    order = ids(stream, range(3 * rows))
    for start in range(0, 3 * rows, rows):
        for block in range(0, rows, buffer):
            end = min(block + buffer, rows)
            assert sorted(order[start + block : start + end]) == list(range(block, end))


@settings(max_examples=60, deadline=None)
@given(**orders, starts=st.lists(st.integers(0, 100), max_size=4), stride=st.integers(1, 5))
def test_a_row_depends_on_its_number_alone(tmp_path_factory, rows, buffer, seed, starts, stride):
    """Not on where the reading began, what was left out, or whether it went back."""
    path = write(tmp_path_factory.mktemp("x"), rows_of(rows))
    order = ids(open_stream([path], seed=seed, buffer=buffer), range(140))
    jumping = open_stream([path], seed=seed, buffer=buffer)
    for start in starts:
        numbers = range(start, start + 40, stride)
        assert ids(jumping, numbers) == [order[i] for i in numbers]
        fresh = open_stream([path], seed=seed, buffer=buffer)
        assert ids(fresh, numbers) == [order[i] for i in numbers]


@settings(max_examples=25, deadline=None)
@given(
    **orders,
    per_step=st.integers(1, 9),
    chunk=st.integers(1, 3),
    worlds=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    cut=st.integers(0, 6),
)
def test_a_resumed_run_takes_just_the_rows_that_are_left(
    tmp_path_factory, rows, buffer, seed, per_step, chunk, worlds, cut
):
    path = write(tmp_path_factory.mktemp("x"), rows_of(rows))
    plan, options = Plan.endless(per_step, chunk), {"seed": seed, "buffer": buffer}
    middle, stop = plan.position(cut), plan.position(8)
    unbroken = taken(path, plan, 1, 0, stop, **options)
    first = taken(path, plan, worlds[0], 0, middle, **options)
    second = taken(path, plan, worlds[1], middle, stop, **options)
    assert first + second == unbroken


def test_blocks_passes_and_seeds_have_orders_of_their_own(tmp_path):
    path = write(tmp_path, rows_of(100))
    orders = set()
    for seed in (0, 1):
        order = ids(open_stream([path], seed=seed, buffer=50), range(200))
        orders |= {tuple(i % 50 for i in order[start : start + 50]) for start in range(0, 200, 50)}
    assert len(orders) == 8
    assert ids(open_stream([path], seed=1, buffer=50), range(200)) == order


def _inherit(stream) -> None:
    global _inherited
    _inherited = stream


def _inherited_id(number: int) -> int:
    return int(_inherited[number].id)


def test_a_forked_process_reads_for_itself(tmp_path, monkeypatch):
    """The parent's reading goes on from where it was, whatever its children read meanwhile."""
    monkeypatch.setattr(json_file, "_CHUNK", 64)  # a process holds no more of the file than that
    path = write(tmp_path, rows_of(40))
    stream = open_stream([path], shuffle=False)
    assert ids(stream, range(3)) == [0, 1, 2]
    with multiprocessing.get_context("fork").Pool(2, _inherit, (stream,)) as pool:
        assert pool.map(_inherited_id, range(20)) == [*range(20)]
    assert ids(stream, range(3, 45)) == [i % 40 for i in range(3, 45)]


# -- weights -------------------------------------------------------------------------------------


def test_weights_are_the_ratio_in_which_files_are_taken(tmp_path):
    paths = [write(tmp_path / "x", rows_of(5)), write(tmp_path / "y", rows_of(7, 100))]
    stream = open_stream(paths, [0.5, 1.5], shuffle=False)
    order = ids(stream, range(40))
    assert order[:8] == [100, 0, 101, 102, 103, 1, 104, 105]
    for start in range(0, 40, 4):
        assert sum(i < 100 for i in order[start : start + 4]) == 1
    assert [i for i in order if i < 100] == [i % 5 for i in range(10)]
    assert [i for i in order if i >= 100] == [100 + i % 7 for i in range(30)]


@pytest.mark.parametrize("weights", [(1, 1), (2, 1), (0.3, 0.33), (1, 1e-7)])
def test_weighted_rows_depend_on_their_number_alone(tmp_path, weights):
    paths = [write(tmp_path / "x", rows_of(5)), write(tmp_path / "y", rows_of(7, 100), "array")]
    order = ids(open_stream(paths, weights, seed=2, buffer=3), range(300))
    for start in (1, 50, 299):
        stream = open_stream(paths, weights, seed=2, buffer=3)
        assert ids(stream, range(start, 300)) == order[start:]
    share = Counter(i < 100 for i in order)[True] / 300
    assert share == pytest.approx(weights[0] / sum(weights), abs=0.01)
    first = [i for i in order if i < 100]
    for start in range(0, len(first) - 4, 5):  # a file's own passes stay whole
        assert sorted(first[start : start + 5]) == list(range(5))


def test_wrong_weights_and_buffers_are_refused(tmp_path):
    path = write(tmp_path, rows_of(2))
    with pytest.raises(InputError, match=r"1 weight\(s\) for 2"):
        open_stream([path, path], [1])
    with pytest.raises(InputError, match=r"weight of .* is 0"):
        open_stream([path], [0])
    with pytest.raises(InputError, match="buffer of a stream is 0"):
        open_stream([path], buffer=0)


# -- what is not read ----------------------------------------------------------------------------


@pytest.mark.parametrize("container", ["lines", "lines.gz"])
def test_lines_that_are_passed_over_are_not_decoded(tmp_path, monkeypatch, container):
    path = write(tmp_path, rows_of(1000), container)
    decoded = []
    decode = json_file.decode_text
    monkeypatch.setattr(json_file, "decode_text", lambda raw: decoded.append(raw) or decode(raw))
    stream = open_stream([path], buffer=100)
    assert len(decoded) <= 2  # the first row, looked at twice
    decoded.clear()
    assert ids(stream, [925, 926]) != [925, 926]
    assert len(decoded) <= 3  # and the first line, which tells what kind of file it is


def test_row_groups_that_are_passed_over_are_not_decoded(tmp_path, monkeypatch):
    path = write(tmp_path, rows_of(30), "shards")
    read, real = [], pq.ParquetFile.read_row_group

    def spy(self, group, **options):
        read.append(group)
        return real(self, group, **options)

    stream = open_stream([path], shuffle=False)
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", spy)
    assert ids(stream, [24, 25, 26]) == [24, 25, 26]  # file 6, whose first group has three rows
    assert read == [0]
    assert ids(stream, [27, 29]) == [27, 29]
    assert read == [0, 1, 0]


def test_opening_looks_at_the_first_row_only(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(llava("0")) + "\n" + "{]\n" * 5)
    stream = open_stream([path], shuffle=False)
    assert ids(stream, [0]) == [0]
    with pytest.raises(RowError, match=r"data.jsonl row 3 \(line 4\).*\[json\]"):
        stream[3]


def test_a_long_file_takes_no_more_memory_than_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(json_file, "_CHUNK", 1 << 14)
    path = write(tmp_path, [llava(str(i), "word " * 100) for i in range(2000)])
    stream = open_stream([path], buffer=50)
    tracemalloc.start()
    try:
        for i in range(0, 5_000, 3):
            stream[i]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200_000  # of 1.2 MB


def test_a_stream_has_no_length(tmp_path):
    stream: Any = open_stream([write(tmp_path, rows_of(2))])
    with pytest.raises(TypeError):
        len(stream)
    with pytest.raises(IndexError):
        stream[-1]


# -- bad rows and bad files ----------------------------------------------------------------------


def with_bad(tmp_path, container: str) -> str:
    """Rows 1 and 2 of 4 are refused."""
    rows = [llava(str(i), image="../up.png" if i == 1 else "") for i in range(4)]
    rows[2] = llava("2", answer="", image="")
    return write(tmp_path / "x", rows, container)


@pytest.mark.parametrize("container", CONTAINERS[:-1])
def test_a_bad_row_is_named_and_the_stream_goes_on(tmp_path, container):
    stream = open_stream([with_bad(tmp_path, container)], shuffle=False)
    assert ids(stream, [0]) == [0]
    for number in (1, 5):
        with pytest.raises(RowError, match=r"row 1 \(id '1'") as caught:
            stream[number]
        assert caught.value.reason == "outside_root"
    with pytest.raises(RowError, match=r"row 2 \(id '2'.*empty_assistant"):
        stream[6]
    assert ids(stream, [7, 8]) == [3, 0]


def test_a_bad_first_row_is_found_when_a_stream_is_opened(tmp_path):
    path = write(tmp_path, [llava("0", image="../up.png"), llava("1")])
    with pytest.raises(RowError, match=r"data.lines row 0 \(id '0', line 1\).*outside_root"):
        open_stream([path])
    stream = open_stream([path], on_bad_row="skip", shuffle=False)
    assert ids(stream, [1]) == [1]
    path = write(tmp_path, [llava("0", answer=""), llava("1")])
    assert ids(open_stream([path], shuffle=False), [1]) == [1]  # nothing to learn: no error


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_without_a_usable_row_ends(tmp_path, workers):
    path = write(tmp_path, [llava(str(i), answer=" ") for i in range(5)])
    stream = open_stream([path], on_bad_row="skip", buffer=2)
    loader = StepLoader(stream, Ids(), Plan.endless(2), stop=10**9, workers=workers)  # type: ignore[arg-type]
    with pytest.raises(InputError) as caught:
        assert not any(step.examples for _, step in zip(range(100), loader))
    assert not isinstance(caught.value, RowError)
    assert str(caught.value).startswith(f"{path}: every one of the 5 rows is refused; the first: ")
    assert "data.lines row 0 (id '0', line 1)" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_process_that_meets_bad_rows_only_goes_on(tmp_path):
    """Of two workers one may get every bad row, for ever, and the other every good one."""
    path = write(tmp_path, [llava("0"), llava("1", answer="")])
    stream = open_stream([path], shuffle=False)
    for number in range(1, 21, 2):
        with pytest.raises(RowError, match="row 1"):
            stream[number]


def test_refused_rows_of_the_renderer_come_by_name(tmp_path):
    path = write(tmp_path, rows_of(4))
    stream = open_stream([path], shuffle=False)
    loader = StepLoader(stream, Ids(bad=(2,)), Plan.endless(4), stop=8)  # type: ignore[arg-type]
    for step in loader:
        assert [str(error) for error in step.refused] == [
            "data.lines row 2 (id '2', line 3): it is bad [bad_image]"
        ]


@pytest.mark.parametrize("container", ["lines.gz", "array", "parquet"])
def test_a_file_that_is_cut_short_stops_the_run(tmp_path, container):
    path = write(tmp_path, [llava(str(i), f"{i * 12345}" * 9) for i in range(2000)], container)
    with open(path, "r+b") as file:
        file.truncate(file.seek(0, 2) * 2 // 3)
    with pytest.raises(InputError, match=r"data\.\w+.*(cut|damaged|Unterminated)"):
        ids(open_stream([path]), range(3000))


def test_no_data_is_refused_when_opened(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "object.json").write_text('{"data": []}')
    pq.write_table(pa.Table.from_pylist(rows_of(1)).slice(0, 0), tmp_path / "none.parquet")
    for name, message in (
        ("empty.jsonl", "empty"),
        ("object.json", "not a list"),
        ("none.parquet", "no rows"),
        ("gone.jsonl", "not found"),
        (".", "neither parquet"),
    ):
        if name == ".":
            (tmp_path / "none.parquet").unlink()
        with pytest.raises(InputError, match=message):
            open_stream([tmp_path / name])
    with pytest.raises(InputError, match="image_root"):
        open_stream([write(tmp_path, rows_of(1))], image_root=tmp_path / "gone")


def test_hub_errors_are_named(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def offline(*args, **options):
        raise ConnectionError("no way out")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(InputError, match=r"'org/name' is no file here.*no way out"):
        open_stream(["org/name"])

    def rows():
        yield from rows_of(300)
        raise ConnectionError("the line is cut")

    found = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: found)
    stream = open_stream(["org/name"], shuffle=False)
    assert stream[200].where == "org/name row 200 (id '200')"
    with pytest.raises(VireoError, match=r"org/name: rows from 256 on .*the line is cut"):
        stream[290]


# -- the digest ----------------------------------------------------------------------------------


@pytest.mark.parametrize("container", CONTAINERS[:-1])
def test_the_digest_notices_another_file(tmp_path, container):
    path = write(tmp_path / "x", rows_of(9), container)
    digest = open_stream([path]).digest
    assert open_stream([path]).digest == digest
    more = write(tmp_path / "y", rows_of(200), container)
    assert open_stream([more]).digest != digest
    moved = tmp_path / "z"
    (tmp_path / "x").rename(moved)
    assert open_stream([moved / f"data.{container.split('.')[0]}"]).digest == digest


def test_the_digest_notices_what_changes_the_order(tmp_path):
    x, y = write(tmp_path / "x", rows_of(3)), write(tmp_path / "y", rows_of(30))
    chosen: list[dict] = [
        {"paths": [x, y]},
        {"paths": [y, x]},
        {"paths": [x, y], "weights": [1, 1]},
        {"paths": [x, y], "weights": [1, 2]},
        {"paths": [x, y], "buffer": 7},
    ]
    assert len({open_stream(**options).digest for options in chosen}) == len(chosen)
    weights = {open_stream([x, y], weights).digest for weights in ([1, 2], [1.0, 2.0])}
    assert len(weights) == 1
