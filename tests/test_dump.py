"""Samples written to a file and read back: equal, complete, readable by a person."""

from __future__ import annotations

import datetime
import io
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.rows import picture
from vireo.data.conversation import Conversation, Image, ImageRef, Text, Turn, read_rows
from vireo.data.images import load_image
from vireo.errors import InputError
from vireo.rollout.dump import append, as_record, from_record, read, write
from vireo.rollout.sample import Sample, Sampling

KINDS = ["samples.jsonl", "samples.parquet"]


def jpeg(seed: int) -> bytes:
    out = io.BytesIO()
    picture(seed).save(out, "JPEG")
    return out.getvalue()


def full(folder: Path) -> list[Sample]:
    """Two samples of a group that have a value in every field, and images of every kind."""
    picture(0).save(folder / "a.png")
    (folder / "b.jpg").write_bytes(jpeg(1))
    images = (
        ImageRef("a.png", str(folder)),
        ImageRef(str(folder / "b.jpg")),
        ImageRef(jpeg(2), "/root"),
        ImageRef({"bytes": jpeg(3), "path": "http://x/3.jpg"}, "/root"),
        ImageRef({"bytes": None, "path": "a.png"}, str(folder)),
        ImageRef("data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAACAkQBADs="),
        ImageRef(picture(4)),
    )
    call = {"function": {"name": "look", "arguments": {"at": [1, 2]}}}
    turns = (
        Turn("system", (Text("Se\u00e9 \u2028."),)),
        Turn("user", tuple(Image(i) for i in range(7))),
        Turn("assistant", (), (call,), reasoning_content="Hm."),
        Turn("tool", (Text("a cat"),), name="look", tool_call_id="1"),
    )
    row = Conversation(turns, images, "r1", 0.5, ({"name": "look"},), "f.json row 1", {"answer": 4})
    one = Sample(
        "00000001",
        0,
        row,
        prompt_ids=[5, 6],
        response_ids=[7, 8, 9],
        logprobs=[-0.1, -2.5e-8, -3.0],
        mask=[1, 0, 1],
        finish="stop",
        spans=[("step-1", 2), ("step-2", 1)],
        status="done",
        text="a \ud83d\udc08".encode("utf-16", "surrogatepass").decode("utf-16"),
        answer="a cat",
        reward=0.75,
        rewards={"exact_match": 1.0, "my:own": 0.5},
        sampling=Sampling(9, 0.5, 0.9, 3, 11),
        metadata={"server": "http://a", "seconds": 1.5, "deep": [None, {"x": True}]},
    )
    return [one, Sample("00000001", 1, row)]


@pytest.mark.parametrize("name", KINDS)
def test_what_is_written_is_read_back_equal(name: str, tmp_path: Path) -> None:
    samples = full(tmp_path)
    defaults = Sample("", -1, Conversation(()))
    for field in fields(Sample):  # a field that is added must be given a value above
        assert getattr(samples[0], field.name) != getattr(defaults, field.name), field.name
    write(tmp_path / "out" / name, samples)
    found = read(tmp_path / "out" / name)
    assert found == samples
    assert found[0].conversation.extra == {"answer": 4}
    assert [type(ref.value) for ref in found[0].conversation.images] == [
        *(str, str, bytes, dict, dict, str, PIL.Image.Image)
    ]


@pytest.mark.parametrize("name", KINDS)
def test_pictures_are_there_when_their_files_are_gone(name: str, tmp_path: Path) -> None:
    samples = full(tmp_path)
    seen = [load_image(ref).tobytes() for ref in samples[0].conversation.images]
    write(tmp_path / "out" / name, samples)
    (tmp_path / "a.png").unlink()
    (tmp_path / "b.jpg").unlink()
    for sample in read(tmp_path / "out" / name):
        assert [load_image(ref).tobytes() for ref in sample.conversation.images] == seen


def test_a_picture_is_one_file_however_often_it_is_shown(tmp_path: Path) -> None:
    samples = full(tmp_path)
    write(tmp_path / "out" / "samples.jsonl", samples)
    append(tmp_path / "out" / "samples.jsonl", [replace(s, group="2") for s in samples])
    files = sorted((tmp_path / "out" / "images").iterdir())
    assert sorted(file.suffix for file in files) == [".gif", *[".jpeg"] * 3, *[".png"] * 2]
    assert [PIL.Image.open(file).size for file in files if file.suffix == ".png"] == [(56, 56)] * 2
    assert [s.group for s in read(tmp_path / "out" / "samples.jsonl")] == [
        *["00000001"] * 2,
        "2",
        "2",
    ]


def test_a_state_of_json_alone_holds_pictures_without_a_file(tmp_path: Path) -> None:
    samples = full(tmp_path)
    records = json.loads(json.dumps([as_record(sample) for sample in samples]))
    assert [from_record(record) for record in records] == samples
    assert not (tmp_path / "images").exists()
    assert "copy" not in records[0]["conversation"]["images"][0]  # files stay where they are


def test_other_columns_of_a_row_that_json_lacks_become_text(tmp_path: Path) -> None:
    row = Conversation((), extra={"day": datetime.date(2026, 12, 1), "n": [1, {"a": None}]})
    write(tmp_path / "s.jsonl", [Sample("g", 0, row)])
    extra = read(tmp_path / "s.jsonl")[0].conversation.extra
    assert extra == {"day": "2026-12-01", "n": [1, {"a": None}]}


def test_rows_of_a_data_file_come_back(tmp_path: Path) -> None:
    picture(0).save(tmp_path / "0.png")
    turns = [{"role": "user", "content": "<image>Who?"}, {"role": "assistant", "content": "Me."}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns, "images": ["0.png"]}))
    rows = read_rows(tmp_path / "rows.jsonl")
    for name in KINDS:
        write(tmp_path / name, [Sample("g", 0, rows[0])])
        assert read(tmp_path / name)[0].conversation == rows[0]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | FLOATS | TEXT
PLAIN = st.recursive(
    LEAVES, lambda x: st.lists(x, max_size=2) | st.dictionaries(TEXT, x, max_size=2)
)
IDS = st.lists(st.integers(0, 200_000), max_size=4)
SAMPLES = st.builds(
    Sample,
    group=TEXT,
    index=st.integers(0, 9),
    conversation=st.just(Conversation(())),
    prompt_ids=IDS,
    response_ids=IDS,
    logprobs=st.lists(st.floats(max_value=0, allow_infinity=False), max_size=4),
    mask=st.lists(st.integers(0, 1), max_size=4),
    finish=st.sampled_from(["stop", "length", "abort", None]),
    spans=st.lists(st.tuples(TEXT, st.integers(1, 9)), max_size=3),
    text=TEXT,
    answer=st.none() | TEXT,
    reward=st.none() | FLOATS,
    rewards=st.dictionaries(TEXT, FLOATS, max_size=2),
    metadata=st.dictionaries(TEXT, PLAIN, max_size=2),
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(samples=st.lists(SAMPLES, max_size=3))
@pytest.mark.parametrize("name", KINDS)
def test_any_values_come_back(name: str, tmp_path: Path, samples: list[Sample]) -> None:
    write(tmp_path / name, samples)
    assert read(tmp_path / name) == samples


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("s.jsonl", b'{"group": "a"', r"sample 0 cannot be read: JSONDecodeError"),
        ("s.jsonl", b'{"group": "a"}\n', r"sample 0 cannot be read: KeyError: 'conversation'"),
        ("s.parquet", b"PAR1", r"cannot be read: ArrowInvalid"),
        ("absent.jsonl", None, r"cannot be read: FileNotFoundError"),
    ],
)
def test_a_file_of_something_else_is_named(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read(tmp_path / name)


def test_a_name_that_says_no_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"written to \.jsonl or \.parquet"):
        write(tmp_path / "samples.json", [])


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    write(tmp_path / "s.jsonl", [Sample("a", 0, Conversation(()))])
    bad: Any = Sample("b", 0, Conversation(()), metadata={"x": object()})
    with pytest.raises(TypeError):
        write(tmp_path / "s.jsonl", [bad])
    assert [s.group for s in read(tmp_path / "s.jsonl")] == ["a"]
