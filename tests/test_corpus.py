"""Every picture and every chat file of the corpus, as far as reading goes."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.corpus import chat_cases, corpus, image_cases, image_file
from vireo.data.conversation import Conversation, ImageRef, Text
from vireo.data.images import ImageError, as_row_error, image_size_from_header, load_image
from vireo.data.readers import open_rows
from vireo.errors import RowError

LATER = {"too_long"}  # refused when the row is rendered, not when it is read


# -- pictures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", image_cases(), ids=lambda case: ascii(case["file"].replace(str(corpus()), ""))[-50:]
)
def test_image(case):
    ref = ImageRef(image_file(case), str(corpus() / "images"))
    allowed = [case["expect"], *case.get("also_ok", [])]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of what it ignores in a broken EXIF
            got = load_image(ref)
            size = image_size_from_header(ref)
    except ImageError as error:
        named = case["file"].rsplit("/", 1)[-1] in str(error)
        if named and error.reason in {other.get("error") for other in allowed}:
            return
        raise
    wanted = next(other for other in allowed if "rgb" in other)
    assert (got.mode, list(got.size), list(size)) == ("RGB", wanted["size"], wanted["size"])
    with Image.open(corpus() / wanted["rgb"]) as file:
        difference = np.asarray(file.convert("RGB")).astype(int) - np.asarray(got)
    assert abs(difference).max() <= wanted["tolerance"]


# -- chat files ----------------------------------------------------------------------------------


def read(path: Path, on_bad_row: str) -> tuple[list[Conversation], list[RowError]]:
    """The file's rows with all images decoded, and the refused ones."""
    rows = open_rows(path, on_bad_row=on_bad_row)
    good, bad = [], list(rows.skipped)
    for row in rows:
        try:
            for ref in row.images:
                load_image(ref)
            good.append(row)
        except ImageError as error:
            bad.append(as_row_error(error, row.where))
            if on_bad_row == "error":
                raise bad[-1] from error
    return good, bad


def check(row: Conversation, wanted: dict, what: str) -> None:
    identity = wanted["id"]
    assert row.id == (None if identity is None else str(identity))
    answers = [turn for turn in row.turns if turn.role == "assistant"]
    if wanted["assistant_texts"] is not None:
        texts = [part.text for turn in answers for part in turn.parts if isinstance(part, Text)]
        assert texts == [text.removesuffix("⟨EOT⟩") for text in wanted["assistant_texts"]]
    for text in wanted.get("supervised_contains", ()):
        assert text.removesuffix("⟨EOT⟩") in str(answers)
    slots = [part for turn in row.turns for part in turn.parts if not isinstance(part, Text)]
    assert [slot.index for slot in slots] == list(range(wanted["image_slots"]))
    assert len(row.images) == len(wanted["images"]) == len(slots)
    for ref, name in zip(row.images, wanted["images"]):
        expected = load_image(corpus() / "chats" / name)
        assert load_image(ref).tobytes() == expected.tobytes()
    if "turns" in wanted:
        assert len(row.turns) == wanted["turns"]
    if "layout" in wanted:
        user = next(turn for turn in row.turns if turn.role == "user")
        layout = [part.text if isinstance(part, Text) else part.index for part in user.parts]
        assert layout == wanted["layout"]
    if "image_position" in wanted:
        assert slots[0] == row.turns[0].parts[0], what
    everything = "".join(turn.text for turn in row.turns)
    assert all(text in everything for text in wanted.get("literal", ()))
    assert row.weight == wanted.get("weight", 1)


@pytest.mark.parametrize("case", chat_cases(), ids=lambda case: case["file"])
def test_chat_file(case):
    path, expect = corpus() / case["file"], case["expect"]
    if "rows" not in expect:
        with pytest.raises(RowError) as caught:
            read(path, "error")
        assert caught.value.reason == expect["reason"]
        assert path.name in str(caught.value)
        assert f"line {expect['names_line']}" in str(caught.value) if "names_line" in expect else 1
        return
    wanted = [row for row in expect["rows"] if row["outcome"] == "accept"]
    refused = [row for row in expect["rows"] if row["outcome"] != "accept"]
    if any(row.get("reason") in LATER for row in refused) or "thin" in path.name:
        assert len(read(path, "error")[0]) == len(expect["rows"])
        return
    good, bad = read(path, "skip")
    assert len(good) == expect.get("n_examples", len(wanted)) == len(wanted)
    for row, one in zip(good, wanted):
        check(row, one, case["what"])
    assert [error.reason for error in bad] == [row["reason"] for row in refused]
    for error, row in zip(bad, refused):
        assert all(text in str(error) for text in [*row["names"], path.name, f"row {row['row']}"])
        assert all(str(number) in str(error) for number in row.get("numbers", ()))
    if expect["outcome"] == "error":
        with pytest.raises(RowError) as caught:
            read(path, "error")
        assert str(caught.value) == str(bad[0])
    else:
        assert len(read(path, "error")[0]) == len(wanted)  # nothing to learn: never an error


def test_rows_left_out_are_named_in_a_warning(caplog):
    rows = open_rows(corpus() / "chats" / "only_system.json")
    assert len(rows) == 2
    assert "1 of 3 rows" in caplog.text
    assert "'os'" in caplog.text
