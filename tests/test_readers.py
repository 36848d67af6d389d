"""Opening data files: every container, the places of rows, broken files."""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import pickle
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage

from tests.rowmakers import attempt, llava, messages, user, values
from vireo.data import arrow_file, json_file
from vireo.data.conversation import Image, Text
from vireo.data.images import load_image
from vireo.data.readers import open_rows
from vireo.errors import InputError, RowError

ROWS = [llava("a"), llava("b", "It is café-grün, 雪.", image="x.png"), llava("c")]


def write(path, rows, form: str = "lines"):
    if form == "lines":
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    else:
        text = json.dumps(rows, ensure_ascii=False, indent=1 if form == "pretty" else None)
    path.write_text(text)
    return path


def ids(rows) -> list[str | None]:
    return [row.id for row in rows]


def fails(path, **options) -> RowError:
    with pytest.raises(RowError) as caught:
        open_rows(path, **options)
    assert len(str(caught.value)) < 1000
    return caught.value


# -- containers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [7, 64, 1 << 20])
@pytest.mark.parametrize("form", ["lines", "pretty", "array"])
@pytest.mark.parametrize("packed", [False, True])
def test_json_containers_are_known_by_content(tmp_path, monkeypatch, form, packed, chunk):
    monkeypatch.setattr(json_file, "_CHUNK", chunk)
    path = write(tmp_path / "data.txt", ROWS, form)
    if packed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    rows = open_rows(path)
    assert (len(rows), rows.total, rows.skipped) == (3, 3, [])
    assert ids(rows) == ["a", "b", "c"]
    assert rows[1].turns[1].text == "It is café-grün, 雪."
    assert rows[-1].id == "c"
    assert ids(rows[1:]) == ["b", "c"]
    with pytest.raises(IndexError):
        rows[3]
    line = {"lines": 3, "pretty": 29, "array": 1}[form]
    assert rows[2].where == f"data.txt row 2 (id 'c', line {line})"


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + json.dumps(ROWS),
        "\ufeff" + "\n".join(map(json.dumps, ROWS)),
        "\r\n".join(map(json.dumps, ROWS)) + "\r\n",
        "\n\n \n" + "\n\n\t\n".join(map(json.dumps, ROWS)) + "\n\n",
        "\n\n  " + json.dumps(ROWS, indent=4) + "\n \n",
        "[\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]",
    ],
    ids=["bom array", "bom lines", "crlf", "blank lines", "blank array", "lines in brackets"],
)
def test_white_space_and_byte_order_marks(tmp_path, text):
    path = tmp_path / "data.json"
    path.write_bytes(text.encode())
    rows = open_rows(path)
    assert ids(rows) == ["a", "b", "c"]
    for row in rows:
        line = next(n for n, part in enumerate(text.split("\n"), 1) if f'"id": "{row.id}"' in part)
        assert row.where.endswith(f"line {line})") or "indent" in text or "    " in text


@pytest.mark.parametrize(
    ("data", "word", "line"),
    [
        (b"", "no_rows", None),
        (b"\n \n\t\n", "no_rows", None),
        (b"\xef\xbb\xbf", "no_rows", None),
        (b"[]", "no_rows", None),
        (b"[ \n ]\n", "no_rows", None),
        (gzip.compress(b"", mtime=0), "no_rows", None),
        (json.dumps(ROWS).encode("utf-16"), "encoding", None),
        (json.dumps(ROWS).encode("utf-16-le"), "encoding", None),
        (json.dumps(ROWS).encode("utf-32"), "encoding", None),
        (gzip.compress(json.dumps(ROWS).encode() * 99, mtime=0)[:-20], "truncated", None),
        (b"\x1f\x8b\x08\x00garbage", "truncated", None),
        (b"PAR1 but no parquet", "truncated", None),
        (b'{"data": [1, 2]}', "not_a_list", None),
        (json.dumps({"rows": ROWS}, indent=1).encode(), "not_a_list", None),
        (json.dumps(ROWS[0], indent=1).encode(), "not_a_list", None),
        (b'"text"', "not_a_list", None),
        (b"17\n\n", "not_a_list", None),
        (b"null", "not_a_list", None),
        (b"id,image\n1,a.png\n", "json", 1),
        (b"PK\x03\x04zip", "json", 1),
        (json.dumps(ROWS[0]).encode() + b",\n" + json.dumps(ROWS[1]).encode(), "json", 1),
        (json.dumps(ROWS[0]).encode() + b"\n{'id': 1}\n", "json", 2),
        (json.dumps(ROWS, indent=1).encode()[:-1], "json", 42),
        (b"[\n" + json.dumps(ROWS[0]).encode() + b",\n]", "json", 3),
        (b"[\n" + json.dumps(ROWS[0]).encode() + b"\n{}]", "json", 3),
        (b"[" + json.dumps(ROWS[0]).encode() + b"]\n[]", "json", 2),
        (b"[\n\n" + json.dumps(ROWS[0]).encode() + b" {}]", "json", 3),
        (b"[\n nul]", "json", 2),
        (b'[\n "no end', "json", 2),
        (b"[" * 100_000, "json", 1),
        (b"[" + b"7" * 5000 + b"]", "json", 1),
        (b"[" + json.dumps(llava()).encode().replace(b"Red.", b"\xe9") + b"]", "encoding", 1),
        (json.dumps(llava()).encode() + b"\n\xff\xfe\n", "encoding", 2),
        (b'{"id": 1, "id": 2, "conversations": []}\n', "json", 1),
        (json.dumps(llava()).replace("}]", ', "value": "Blue."}]').encode(), "json", 1),
        (b"[" + json.dumps(llava()).replace("}]", ', "from": "x"}]').encode() + b"]", "json", 1),
    ],
)
@pytest.mark.parametrize("chunk", [16, 1 << 20])
def test_broken_files_name_reason_and_line(tmp_path, monkeypatch, data, word, line, chunk):
    monkeypatch.setattr(json_file, "_CHUNK", chunk)
    path = tmp_path / "broken.json"
    path.write_bytes(data)
    error = fails(path)
    assert error.reason == word
    assert "broken.json" in str(error)
    assert line is None or f"line {line}" in str(error)
    assert isinstance(error, InputError)


def test_a_bad_line_can_be_skipped(tmp_path, caplog):
    good, bad = json.dumps(llava()).encode(), [b'{"id": "x"', b"\xff", b"7", b"{}"]
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n".join([good, *bad, good]))
    rows = open_rows(path, on_bad_row="skip")
    assert (len(rows), rows.total) == (2, 6)
    reasons = [error.reason for error in rows.skipped]
    assert reasons == ["json", "encoding", "row_type", "no_conversation"]
    assert rows[1].where == "data.jsonl row 5 (id 'a', line 6)"
    assert "4 of 6 rows" in caplog.text
    assert "row 2 (line 3)" in caplog.text


def test_no_row_left_is_an_error(tmp_path):
    error = fails(write(tmp_path / "data.json", [{"id": "x"}], "array"), on_bad_row="skip")
    assert error.reason == "no_rows"
    assert "'x'" in str(error)


def test_wrong_paths_are_input_errors(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    data = write(tmp_path / "data.json", ROWS)
    for path in (tmp_path / "gone.json", "data/gone.jsonl", tmp_path / "empty", "/dev/null"):
        with pytest.raises(InputError, match=str(path)):
            open_rows(path)
    with pytest.raises(InputError, match="hub"):
        open_rows("nobody-here/no-such-set")
    with pytest.raises(InputError, match="image_root"):
        open_rows(data, image_root=tmp_path / "gone")
    with pytest.raises(InputError, match="on_bad_row"):
        open_rows(data, on_bad_row="ignore")


def test_rows_are_found_again_in_other_processes(tmp_path):
    rows = open_rows(write(tmp_path / "data.jsonl", ROWS))
    packed = tmp_path / "data.gz"
    packed.write_bytes(gzip.compress((tmp_path / "data.jsonl").read_bytes()))
    for given_rows in (rows, open_rows(packed)):
        assert ids(pickle.loads(pickle.dumps(given_rows))) == ["a", "b", "c"]
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(given_rows.__getitem__, range(3)) == list(given_rows)


def test_a_file_changed_under_us_is_an_error(tmp_path):
    path = write(tmp_path / "data.jsonl", ROWS)
    rows = open_rows(path)
    path.write_text("short")
    with pytest.raises(RowError, match=r"data\.jsonl row 1"):
        rows[1]


def test_a_large_file_is_never_held(tmp_path):
    text = json.dumps(llava(answer="word " * 1000)) + "\n"
    for form in ("lines", "array"):
        path = tmp_path / form
        count = 4000
        body = text * count if form == "lines" else "[" + ",".join([text] * count) + "]"
        path.write_text(body)
        tracemalloc.start()
        rows = open_rows(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(rows) == count
        assert peak < 0.4 * path.stat().st_size


def test_progress_waits_two_seconds(tmp_path, capsys):
    open_rows(write(tmp_path / "data.jsonl", ROWS), progress=True)
    assert capsys.readouterr().err == ""


# -- Arrow ---------------------------------------------------------------------------------------


def png(colour: str = "red") -> bytes:
    file = io.BytesIO()
    PILImage.new("RGB", (4, 3), colour).save(file, "PNG")
    return file.getvalue()


def arrow_rows() -> list[dict]:
    picture = {"bytes": png(), "path": "../not/looked/at.png"}
    none = user("Say hi.", "Hi.", id="text")
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "What?"}]
    return [
        user(parts, [{"type": "text", "text": "Red."}], id="one", images=[picture]),
        user(parts[1:], [{"type": "text", "text": "No."}], id="none", images=[]),
        user(parts[1:], [{"type": "text", "text": "No."}], id="null", images=None),
        none | user(parts[1:], [{"type": "text", "text": "No."}], id="text"),
    ]


def check_arrow_rows(rows) -> None:
    assert ids(rows) == ["one", "none", "null", "text"]
    assert rows[0].turns[0].parts == (Image(0), Text("What?"))
    assert [len(row.images) for row in rows] == [1, 0, 0, 0]
    assert load_image(rows[0].images[0]).getpixel((0, 0)) == (255, 0, 0)


def test_parquet_file_and_folder(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    table = pa.Table.from_pylist(arrow_rows())
    pq.write_table(table, tmp_path / "data.bin", row_group_size=3)
    rows = open_rows(tmp_path / "data.bin")
    check_arrow_rows(rows)
    assert rows[3].where == "data.bin row 3 (id 'text')"
    pq.write_table(table.slice(0, 2), folder / "train-00000-of-00002.parquet")
    pq.write_table(table.slice(2), folder / "train-00001-of-00002.parquet")
    rows = open_rows(folder)
    check_arrow_rows(rows)
    assert rows[3].where == "train-00001-of-00002.parquet row 1 (id 'text')"
    check_arrow_rows(pickle.loads(pickle.dumps(rows)))
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert [len(row.images) for row in pool.map(rows.__getitem__, range(4))] == [1, 0, 0, 0]
    pq.write_table(table, folder / "test-00000-of-00001.parquet")
    with pytest.raises(InputError, match="splits"):
        open_rows(folder)


def test_parquet_pictures_are_not_read_at_start(tmp_path, monkeypatch):
    columns_read = []
    batches = pq.ParquetFile.iter_batches

    def spy(self, *args, **options):
        columns_read.extend(options["columns"])
        return batches(self, *args, **options)

    monkeypatch.setattr(arrow_file.pq.ParquetFile, "iter_batches", spy)
    pq.write_table(pa.Table.from_pylist(arrow_rows()), tmp_path / "data.parquet")
    check_arrow_rows(open_rows(tmp_path / "data.parquet"))
    assert columns_read
    assert not [name for name in columns_read if name.endswith("bytes")]


@pytest.mark.parametrize(
    "image",
    [
        "a.png",
        {"path": "a.png"},
        {"bytes": png()},
        {"bytes": None, "path": "a.png"},
        png(),
        [{"bytes": png()}],
        ["a.png"],
    ],
    ids=lambda value: str(value)[:20],
)
def test_image_columns_of_parquet(tmp_path, image):
    (tmp_path / "a.png").write_bytes(png())
    row = llava(image=image)
    pq.write_table(pa.Table.from_pylist([row, llava("t", image=None)]), tmp_path / "d.parquet")
    first, second = open_rows(tmp_path / "d.parquet")
    assert load_image(first.images[0]).size == (4, 3)
    assert (len(first.images), len(second.images)) == (1, 0)


def test_bad_rows_of_parquet(tmp_path):
    rows = [llava("ok"), llava("up", image="../x.png"), llava("nul", image="a.png", weight=-1.0)]
    path = tmp_path / "data.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.Table.from_pylist(rows[::-1]).schema), path)
    assert "data.parquet row 1 (id 'up')" in str(fails(path))
    skipped = open_rows(path, on_bad_row="skip").skipped
    assert [error.reason for error in skipped] == ["outside_root", "weight"]
    path.write_bytes(path.read_bytes()[:-30])
    assert fails(path).reason == "truncated"
    pq.write_table(pa.table({"id": ["a"], "text": ["b"]}), path)
    assert fails(path).reason == "no_conversation"
    pq.write_table(pa.table({"text": ["b"]}), path)
    assert fails(path).reason == "no_conversation"
    pq.write_table(pa.Table.from_pylist(rows).slice(0, 0), path)
    assert fails(path).reason == "no_rows"
    broken = pa.array([b"ok", b"\xff"]).view(pa.string())
    table = pa.Table.from_pylist([llava("a"), llava("b")]).set_column(0, "id", broken)
    pq.write_table(table, path)
    error = fails(path)
    assert (error.reason, "row 1" in str(error)) == ("encoding", True)


def test_null_and_path_entries_of_parquet_are_refused_when_read(tmp_path):
    rows = [llava("ok", image={"bytes": png(), "path": None})]
    rows += [llava("empty", image={"bytes": None, "path": None})]
    rows += [llava("up", image={"bytes": None, "path": "../x.png"})]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    opened = open_rows(tmp_path / "data.parquet")
    assert opened[0].images
    for i, word in ((1, "bad_image_value"), (2, "outside_root")):
        with pytest.raises(RowError, match=rf"row {i} \(id '{rows[i]['id']}'\).*{word}"):
            opened[i]


def test_saved_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    images = datasets.List(datasets.Image())
    found = datasets.Dataset.from_list(arrow_rows()).cast_column("images", images)
    found.save_to_disk(tmp_path / "saved")
    check_arrow_rows(open_rows(tmp_path / "saved"))
    check_arrow_rows(pickle.loads(pickle.dumps(open_rows(tmp_path / "saved"))))
    pictures = [PILImage.new("RGB", (4, 3), "red"), None]
    single = datasets.Dataset.from_list([llava(image=p) for p in pictures])
    single = single.cast_column("image", datasets.Image())
    single.save_to_disk(tmp_path / "one")
    one, none = open_rows(tmp_path / "one")
    assert load_image(one.images[0]).size == (4, 3)
    assert (none.images, one.where) == ((), "one row 0 (id 'a')")
    datasets.DatasetDict(train=found, test=found).save_to_disk(tmp_path / "dict")
    with pytest.raises(InputError, match="train"):
        open_rows(tmp_path / "dict")
    check_arrow_rows(open_rows(tmp_path / "dict" / "train"))


def test_hub_datasets_have_no_image_root(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    found = datasets.Dataset.from_list([llava(image="/somewhere/else.png")])
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: found)
    (row,) = open_rows("org/name")
    assert (row.images[0].value, row.images[0].root) == ("/somewhere/else.png", None)


def test_errors_name_row_and_value_but_dump_nothing(tmp_path):
    rows = [llava("ok"), messages(("moderator", "x" * 100_000), id="the bad one" * 50)]
    error = fails(write(tmp_path / "train.json", rows, "pretty"))
    assert str(error).startswith("train.json row 1 (id 'the bad one")
    assert "line 15" in str(error)
    assert "moderator" in str(error)
    huge = {"messages": [{"role": "user", "content": {"k" * 9999: "v" * 9999}}]}
    assert fails(write(tmp_path / "huge.json", [huge], "array")).reason == "content_type"


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60) | st.lists(values, max_size=3).map(lambda v: json.dumps(v).encode()))
def test_any_bytes_are_rows_or_a_row_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "data.json"
    path.write_bytes(data)
    for mode in ("error", "skip"):
        rows = attempt(lambda mode=mode: open_rows(path, on_bad_row=mode))
        if isinstance(rows, RowError):
            assert "data.json" in str(rows)
        else:
            assert len(rows) + len(rows.skipped) == rows.total
