"""`vireo doctor`: every row looked at, nothing decoded twice, each figure the trainer's own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import weakref
from collections import Counter
from html import unescape
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import browser
from tests.corpus import chat_cases, corpus
from tests.pictures import encoded, scene
from tests.tiny_models import renderer, tiny
from vireo import cli
from vireo.data import images as decoder
from vireo.data.loader import Plan, StepLoader
from vireo.data.packing import balance, by_tokens
from vireo.data.readers import open_rows
from vireo.errors import InputError, RowError
from vireo.report.doctor import doctor
from vireo.report.doctor_page import page
from vireo.report.figures import histogram, spread

ROOT = Path(__file__).parents[1]
MODEL = "qwen2_5_vl"
SCRIPT = "<script>document.title='it ran'</script>"


def make(question: str, answer: str, *images: str, **columns) -> dict:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"image": list(images), "conversations": turns, **columns}


def write(folder: Path, rows: list[dict], name: str = "rows.json") -> str:
    path = folder / name
    path.write_text(json.dumps(rows))
    return str(path)


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Pictures of every kind under several names, and rows with every kind of fault."""
    turned = PIL.Image.Exif()
    turned[0x0112] = 6
    (tmp_path / "a.png").write_bytes(encoded(scene(60, 40), "PNG"))
    (tmp_path / "copy of a.png").write_bytes(encoded(scene(60, 40), "PNG"))
    (tmp_path / "b.jpg").write_bytes(encoded(scene(90, 50), "JPEG", exif=turned))
    (tmp_path / "gray.png").write_bytes(encoded(scene(20, 300).convert("L"), "PNG"))
    (tmp_path / "broken.png").write_bytes((tmp_path / "a.png").read_bytes()[:200])
    rows = [
        make("<image>What?", "A.", "a.png", id="0"),
        make("<image>What?", "A.", "copy of a.png", id="1"),  # row 0 again
        make("<image>What?", "B.", "a.png", id="2"),  # another answer
        make("<image><image>Both?", "Yes.", "a.png", "b.jpg", id="3"),
        make("<image>Tall?", "Yes.", "gray.png", id="4"),
        make("No picture", "No.", id="5"),
        make("<image>?", "A.", "gone.png", id="6"),
        make("<image>?", "A.", "broken.png", id="7"),
        make("<image>?", "A.", "broken.png", id="8"),
        make("<image><image>", "A.", "a.png", id=SCRIPT),
        make("word " * 900, "A.", id="10"),
        {"id": "11", "conversations": [{"from": "human", "value": "Hi"}]},
    ]
    return write(tmp_path, rows)


def look(data: str, **options) -> dict:
    return doctor(train_file=data, **options)


# -- bad rows --------------------------------------------------------------------------------------


def test_every_bad_row_is_counted_by_its_reason_and_the_run_goes_on(data, capsys):
    flags = ["--train_file", data, "--vlm_model_name_or_path", tiny(MODEL)]
    assert cli.main(["doctor", *flags]) == 0
    out = capsys.readouterr().out
    assert out.startswith("6 of 12 rows are bad\n")
    report = look(data, vlm_model_name_or_path=tiny(MODEL))
    assert {reason: bad["count"] for reason, bad in report["bad_rows"].items()} == {
        "bad_image": 2,
        "missing_image": 1,
        "placeholder_count": 1,
        "no_assistant": 1,
        "too_long": 1,
    }
    assert report["rows"]["nothing_to_learn"] == 1
    first = next(iter(report["bad_rows"].values()))["examples"]
    assert [example.split(":")[0] for example in first] == [
        "rows.json row 7 (id '7', line 1)",
        "rows.json row 8 (id '8', line 1)",
    ]
    for reason, bad in report["bad_rows"].items():
        assert f"  {reason}: {bad['count']}" in out


def test_the_refused_rows_are_those_that_the_trainer_refuses(data):
    refused = []
    rows = open_rows(data, on_bad_row="skip")
    refused += [error.reason for error in rows.skipped]
    for item in StepLoader(rows, renderer(MODEL), Plan(len(rows), 4), stop=len(rows)):
        refused += [error.reason for error in item.refused]
    report = look(data, vlm_model_name_or_path=tiny(MODEL))
    assert {reason: bad["count"] for reason, bad in report["bad_rows"].items()} == Counter(refused)


def test_many_bad_rows_of_one_reason_are_few_lines(tmp_path, capsys):
    report = look(write(tmp_path, [make("<image>?", "A.", f"{i}.png") for i in range(200)]))
    ((reason, bad),) = report["bad_rows"].items()
    assert (reason, bad["count"], len(bad["examples"])) == ("missing_image", 200, 5)
    assert "and 195 more" in capsys.readouterr().out


def test_a_file_of_bad_rows_alone_is_a_report_not_an_error(tmp_path, capsys):
    path = write(tmp_path, [{"id": "a"}, make("<image>?", "A."), make("?", " ")])
    assert cli.main(["doctor", "--train_file", path, "--global_batch_size", "2"]) == 0
    assert capsys.readouterr().out.startswith("3 of 3 rows are bad\n")


@pytest.mark.parametrize("case", chat_cases(), ids=lambda case: case["file"])
def test_no_odd_file_ends_it_otherwise_than_with_a_report_or_bad_input(case, tmp_path):
    try:
        report = look(
            str(corpus() / case["file"]), image_root=str(corpus()), html_file=str(tmp_path / "p")
        )
    except InputError:
        return
    counts = report["rows"]
    assert counts["bad"] <= counts["total"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--train_file", "no/such.json"], "no/such.json"),
        (["--train_file", "{data}", "--max_tokens_per_gpu", "9"], "--global_batch_size"),
        (["--train_file", "{data}", "--vlm_model_name_or_path", "/no/model"], "/no/model"),
        (["--train_file", "{data}", "--json", "{data}/x.json"], "cannot be written"),
        (["--train_file", "{data}", "--image_size", "big"], "--image_size"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_exit_code_2(flags, words, data, capsys):
    assert cli.main(["doctor", *[flag.replace("{data}", data) for flag in flags]]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


# -- pictures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, MODEL])
def test_each_distinct_picture_is_decoded_once(model, data, monkeypatch):
    decoded = []
    honest = decoder._open

    def spy(stream, name, limit):
        decoded.append(name)
        return honest(stream, name, limit)

    monkeypatch.setattr(decoder, "_open", spy)
    look(data, vlm_model_name_or_path=model and tiny(model))
    good = [name for name in decoded if name != "'broken.png'"]
    assert sorted(good) == ["'a.png'", "'b.jpg'", "'gray.png'"]


def test_modes_sizes_and_oddities_of_pictures(data):
    images = look(data)["images"]
    assert (images["references"], images["distinct"]) == (9, 3)
    assert images["modes"] == {"RGB": 2, "L": 1}
    assert images["exif_turned"] == 1
    assert images["width"] == spread([60, 50, 20])  # upright: b.jpg is 90 x 50 in the file
    assert images["height"] == spread([40, 90, 300])
    row_4 = "rows.json row 4 (id '4', line 1): 20 x 300"
    assert images["longer_than_8_to_1"] == {"count": 1, "examples": [row_4]}


def test_no_picture_is_kept(tmp_path, monkeypatch):
    rows = []
    for i in range(8):
        scene(40 + i, 30).save(tmp_path / f"{i}.png")
        rows.append(make("<image>?", "A.", f"{i}.png"))
    path = write(tmp_path, rows)
    made, most = [], 0
    honest = decoder.pixels.upright_rgb

    def spy(image):
        nonlocal most
        most = max(most, sum(ref() is not None for ref in made))
        result = honest(image)
        made.extend(map(weakref.ref, (image, result)))
        return result

    monkeypatch.setattr(decoder.pixels, "upright_rgb", spy)
    assert look(path)["rows"]["bad"] == 0
    assert len(made) == 16
    assert most == 0


def test_pictures_inside_parquet_are_looked_at_too(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    picture = encoded(scene(60, 40), "PNG")
    rows = [
        make("<image>?", "A.") | {"image": {"bytes": content, "path": f"{i}.png"}}
        for i, content in enumerate([picture, picture, picture[:200]])
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    report = look(str(tmp_path / "rows.parquet"))
    assert report["images"]["distinct"] == 1
    assert report["rows"]["bad"] == 1
    assert report["duplicates"]["rows"]["count"] == 1


# -- rows ------------------------------------------------------------------------------------------


def test_duplicates_by_content_not_by_name(data):
    found = look(data)["duplicates"]
    row = "rows.json row {0} (id '{0}', line 1)".format
    assert found["rows"] == {"count": 1, "examples": [[row(0), row(1)]]}


def test_roles_and_images_of_rows(data):
    rows = look(data)["rows"]
    assert rows["roles"] == {"user": 10, "assistant": 10}
    assert rows["images_per_row"] == {"0": 2, "1": 7, "2": 1}


def test_several_files_are_one_data_set(data, tmp_path):
    folder = tmp_path / "more"
    folder.mkdir()
    other = write(folder, [make("No picture", "No."), make("Else", "No.")])
    report = look(f"{data},{other}")
    assert report["files"] == [data, other]
    assert (report["rows"]["total"], report["rows"]["bad"]) == (14, 5)
    places = [place.split(" row ")[0] for place in report["duplicates"]["rows"]["examples"][1]]
    assert places[1] == "more/rows.json"


# -- lengths and steps -----------------------------------------------------------------------------


def lengths_of(data: str) -> list[int | None]:
    """Each opened row's true length, with its own pictures; None where it is refused."""
    rows, made, found = open_rows(data, on_bad_row="skip"), renderer(MODEL), []
    for i in range(len(rows)):
        try:
            found.append(len(made.example(rows[i])))
        except RowError:
            found.append(None)
    return found


def test_lengths_are_the_renderers_own_with_the_too_long_ones(data):
    found = look(data, vlm_model_name_or_path=tiny(MODEL))["lengths"]
    true = [length for length in lengths_of(data) if length]
    assert found["unit"] == "tokens"
    assert found["total"] == sum(true)
    assert found["per_row"]["min"] == min(true)
    assert found["per_row"]["max"] > found["limit"] == 4096
    rows, made = open_rows(data, on_bad_row="skip"), renderer(MODEL)
    examples = [made.example(rows[i]) for i, length in enumerate(lengths_of(data)) if length]
    assert found["trained"] == sum(example.supervised for example in examples)
    ids = np.concatenate([example.fields["input_ids"].numpy() for example in examples])
    assert found["image"] == np.isin(ids, list(made.image_ids)).sum()


def test_without_a_model_lengths_are_named_characters_and_torch_stays_out(data):
    code = (
        "import sys; from vireo.cli import main\n"
        f"assert main(['doctor', '--train_file', {data!r}]) == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"unit +characters", done.stdout)


@pytest.mark.parametrize("world", [1, 2])
def test_steps_and_packing_are_those_of_the_trainers_loader(world, tmp_path):
    scene(56, 56).save(tmp_path / "a.png")
    rows = [make("Which?", "a " * (n * n % 29), *["a.png"] * (n % 2)) for n in range(1, 30)]
    path = write(tmp_path, [*rows, make("<image>?", "A.", "gone.png"), make("", "a " * 200)])
    report = look(
        path,
        vlm_model_name_or_path=tiny(MODEL),
        world=world,
        global_batch_size=6,
        max_tokens_per_gpu=120,
        num_epochs=3,
    )
    rows, made = open_rows(path, on_bad_row="skip"), renderer(MODEL, budget=120)
    plan, packs = Plan(len(rows), 6, 1, 42), []
    loaders = [
        StepLoader(rows, made, plan, rank=r, world=world, stop=len(rows)) for r in range(world)
    ]
    steps = list(zip(*([item.examples for item in loader] for loader in loaders)))
    for dealt in steps:
        moves = balance([[len(row) for row in mine] for mine in dealt], 120)
        away = {(move.source, move.row): move.target for move in moves}
        for rank in range(world):
            packs += by_tokens(
                [
                    row
                    for source, mine in enumerate(dealt)
                    for i, row in enumerate(mine)
                    if away.get((source, i), source) == rank
                ],
                120,
            )
    assert report["steps"]["per_epoch"] == len(steps)
    assert report["steps"]["total"] == 3 * len(steps)
    packed = report["micro_batches"]["packed"]
    assert packed["micro_batches"] == len(packs)
    assert packed["filled_share"] == round(sum(b.tokens for b in packs) / (120 * len(packs)), 4)
    padded = report["micro_batches"]["padded"]
    assert padded["filled_share"] <= packed["filled_share"]


def test_padding_of_micro_batches_of_rows(tmp_path):
    path = write(tmp_path, [make("Q", "A" * n) for n in (1, 1, 40, 40)])
    options = {"vlm_model_name_or_path": tiny("qwen3"), "global_batch_size": 4}
    found = look(path, per_device_train_batch_size=4, **options)["micro_batches"]
    lengths = [len(renderer("qwen3").example(row)) for row in open_rows(path)]
    assert "packed" not in found
    assert found["padded"]["padding_share"] == pytest.approx(1 - sum(lengths) / (4 * max(lengths)))


# -- figures and forms -----------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=50))
def test_every_value_is_in_one_bin_of_a_histogram(values):
    found = histogram(values)
    edges, counts = found["edges"], found["counts"]
    assert sum(counts) == len(values)
    assert edges == sorted(set(edges))
    assert len(edges) == len(counts) + 1 <= 25
    for low, high, count in zip(edges, edges[1:], counts):
        assert count == sum(low <= value < high for value in values)


def test_the_page_is_made_of_the_json_alone(data, tmp_path, capsys):
    flags = ["--train_file", data, "--vlm_model_name_or_path", tiny(MODEL)]
    flags += ["--global_batch_size", "4", "--max_tokens_per_gpu", "500"]
    out = str(tmp_path / "d.json"), str(tmp_path / "d.html")
    assert cli.main(["doctor", *flags, "--json", out[0], "--html", out[1]]) == 0
    report = json.loads(Path(out[0]).read_text())
    assert page(report) == Path(out[1]).read_text()


def test_the_docs_name_every_key_of_the_json(data):
    text = (ROOT / "docs" / "data-tools.md").read_text()
    report = look(
        data, vlm_model_name_or_path=tiny(MODEL), global_batch_size=4, max_tokens_per_gpu=900
    )
    names = set(report)
    for inside in report.values():
        names |= set(inside) if isinstance(inside, dict) else set()
    names |= set(report["micro_batches"]["packed"]) | set(report["micro_batches"]["padded"])
    names |= set(report["duplicates"]["rows"]) | set(report["lengths"]["histogram"])
    names |= set(report["lengths"]["per_row"])
    names -= set(report["bad_rows"])  # the reasons
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


@browser.needs_browser
def test_the_page_renders_in_a_browser_and_a_typed_script_stays_text(data, tmp_path):
    out = tmp_path / "d.html"
    look(data, html_file=str(out), global_batch_size=4)
    assert "<script" not in out.read_text()
    assert not re.search(r"https?://", out.read_text())
    dom, wider = browser.opened(out, tmp_path / "copy.html", width=620)
    assert "<title>Doctor: 5 of 12 rows are bad</title>" in dom
    shown = unescape(re.sub(r"<[^>]*>", "", dom))
    assert f"(id '{SCRIPT}', line 1)" in shown
    assert "missing_image: 1" in shown
    assert wider <= 0
    picture = browser.screenshot(out, tmp_path / "shot.png", height=1400)
    assert browser.count_pixels(picture, "#fde7e5") > 1000  # bad rows
    assert browser.count_pixels(picture, "#3b78d8") > 1000  # bars of histograms
    dark = browser.screenshot(out, tmp_path / "dark.png", dark=True)
    assert np.asarray(dark).mean() < 80 < 200 < np.asarray(picture).mean()
