"""The made data sets: their counts, their form, and the same bytes each time."""

import json
import sys
from collections import Counter

import pytest
from PIL import Image

from vireo.data.synthetic import COLOURS, SHAPES, write_digits, write_shapes
from vireo.errors import InputError


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    pytest.importorskip("sklearn")
    return write_digits(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return write_shapes(tmp_path_factory.mktemp("shapes"), rows=200)


def rows_of(folder):
    return [json.loads((folder / f"{part}.json").read_text()) for part in ("train", "val")]


def files_of(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def check_rows(folder, rows):
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        human, answer = row["conversations"]
        assert human["from"] == "human"
        assert answer["from"] == "gpt"
        assert human["value"].startswith("<image>\n")
        with Image.open(folder / row["image"]) as image:
            assert image.size == (56, 56)


def test_digits_counts_and_form(digits):
    train, val = rows_of(digits)
    assert (len(train), len(val)) == (1497, 300)
    check_rows(digits, train + val)
    assert train[0]["conversations"][0]["value"] == "<image>\nWhich digit is this?"
    answers = Counter(row["conversations"][1]["value"] for row in train)
    assert set(answers) == set("0123456789")
    assert min(answers.values()) > 120


def test_digits_credit_their_source(digits):
    readme = (digits / "README.md").read_text()
    assert all(word in readme for word in ("Alpaydin", "Kaynak", "CC BY 4.0", "scikit-learn"))


def test_writing_again_gives_the_same_bytes(digits, shapes, tmp_path):
    before = files_of(shapes)
    write_shapes(shapes, rows=200)
    assert files_of(shapes) == before == files_of(write_shapes(tmp_path / "new", rows=200))

    before = files_of(digits)
    write_digits(digits)
    assert files_of(digits) == before


def test_the_seed_changes_the_rows(shapes, tmp_path):
    assert rows_of(write_shapes(tmp_path, rows=200, seed=1)) != rows_of(shapes)


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match="pip install scikit-learn"):
        write_digits(tmp_path)


def test_shapes_counts_and_form(shapes):
    train, val = rows_of(shapes)
    assert (len(train), len(val)) == (180, 20)
    check_rows(shapes, train + val)
    answers = {row["conversations"][1]["value"] for row in train + val}
    assert answers == {*COLOURS, *SHAPES, "1", "2", "3", "4"}


def test_the_named_colour_is_in_the_picture(shapes):
    for row in rows_of(shapes)[0]:
        answer = row["conversations"][1]["value"]
        if answer in COLOURS:
            with Image.open(shapes / row["image"]) as image:
                seen = {colour for _, colour in image.getcolors()} - {(255, 255, 255)}
            red, green, blue = bytes.fromhex(COLOURS[answer][1:])
            assert seen == {(red, green, blue)}


def test_too_few_shapes_are_refused(tmp_path):
    with pytest.raises(InputError, match="at least 10 rows"):
        write_shapes(tmp_path, rows=3)
