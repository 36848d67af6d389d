"""`vireo preview`: every token in its colour, each picture as the model sees it, nothing unsafe."""

from __future__ import annotations

import json
import re
from html import unescape
from itertools import chain
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from tests import browser
from tests.tiny_models import CAT, assistant, noise, renderer, row, tiny, user
from vireo import cli
from vireo.data.conversation import ImageRef
from vireo.data.mixture import Mixture
from vireo.data.ragged import IGNORE, Batch
from vireo.report import seen
from vireo.report.opened import open_files
from vireo.report.preview import collect, pieces, visible
from vireo.report.preview_page import page, text
from vireo.report.seen import look
from vireo.settings import load_settings

VISION = ["qwen2_vl", "qwen2_5_vl"]
SCRIPT = "<script>document.title = 'it ran'</script>"


def scene(width: int, height: int) -> PIL.Image.Image:
    """Smooth, so that a resized copy is near; no two corners alike."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    pixels = np.stack([200 * x + 30, 180 * y + 40, 120 * x * y + 60], axis=-1)
    return PIL.Image.fromarray(pixels.astype(np.uint8))


def turns(question: str, answer: str) -> list[dict]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Good rows, odd rows, and one row of each kind of fault."""
    scene(56, 56).save(tmp_path / "small.png")
    scene(150, 100).save(tmp_path / "large.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "large.png").read_bytes()[:300])
    rows = [
        {"id": "one", "image": "small.png", "conversations": turns("<image>\nWhat?", "It is a.")},
        {
            "id": SCRIPT,
            "weight": 0.5,
            "image": ["large.png", "small.png"],
            "conversations": turns(f"<image><image>{SCRIPT}", f"No & {SCRIPT} \x1b[31m \u202e."),
        },
        {"id": "text", "conversations": turns("2 + 2?\n\t<|image_pad|>", "Four\nor so.")},
        {"id": "gone", "image": "gone.png", "conversations": turns("<image>?", "A.")},
        {"id": "bad", "image": "broken.png", "conversations": turns("<image>?", "A.")},
        {
            "id": f"\x1b[2J{SCRIPT}",
            "image": "small.png",
            "conversations": turns("<image><image>", "A."),
        },
        {"id": "long", "conversations": turns("word " * 400, "A.")},
    ]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    return path


def opened(data: Path) -> Mixture:
    return open_files(load_settings(["--vlm_model_name_or_path=m", f"--train_file={data}"]))


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    code = cli.main(["preview", *flags])
    out = capsys.readouterr()
    assert code == 0, out.err
    return out.out


def joined(before: str, out: str, after: str) -> list[str]:
    """What stands between two marks, without the spaces that part tokens."""
    found = re.findall(f"{re.escape(before)}(.*?){re.escape(after)}", out)
    return [words.replace(" ", "") for words in found]


# -- tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*VISION, "qwen3"])
def test_every_token_is_shown_once_and_in_its_kind(family):
    made = renderer(family)
    images = [noise(84, 56)] if made.family.has_vision else []
    example = made.example(row(*(CAT if images else CAT[2:]), images=images))
    found = pieces(made, example)
    ids, labels = example.fields["input_ids"].tolist(), example.fields["labels"].tolist()
    assert list(chain.from_iterable(piece.ids for piece in found)) == ids
    kinds = [piece.kind for piece in found for _ in piece.ids]
    for kind, token, label in zip(kinds, ids, labels, strict=True):
        expected = "masked" if label == IGNORE else "trained"
        assert kind == ("image" if token in made.image_ids else expected)


@pytest.mark.parametrize("answer", ["A cat.", "你好 🙂.", " two  blanks\n\tand a tab", "naïve �?"])
def test_the_trained_text_is_the_answer_and_its_end(answer):
    made = renderer("qwen2_5_vl")
    found = pieces(made, made.example(row(user("What?"), assistant(answer))))
    trained = "".join(piece.text for piece in found if piece.kind == "trained")
    assert trained == visible(answer + "<|im_end|>")


def test_tokens_of_one_character_are_one_piece():
    made = renderer("qwen2_5_vl")
    found = pieces(made, made.example(row(user("What?"), assistant("你"))))
    assert [p.label for p in found if p.text == "你"] == ["你(3)"]


def test_a_run_of_image_tokens_is_one_piece_and_typed_ones_are_text():
    made = renderer("qwen2_5_vl")
    asked = user(0, "and <|image_pad|>?")
    found = pieces(made, made.example(row(asked, assistant("Yes."), images=[noise(112, 56)])))
    pads = [piece.label for piece in found if len(piece.ids) > 1]
    assert pads == ["<|image_pad|> x 8"]
    shown = "".join(piece.text for piece in found if piece.kind == "masked")
    assert "and·<|image_pad|>?" in shown


# -- pictures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", VISION)
def test_a_picture_is_rebuilt_exactly_from_the_processors_tensor(family):
    made = renderer(family)
    picture = noise(84, 56, seed=3)
    asked = row(user(0, "What?"), assistant("A."), images=[picture])
    (found,) = look(made, asked, made.example(asked))
    assert found.rebuilt
    assert found.original == (84, 56)
    assert found.grids == {"image_grid_thw": [1, 4, 6]}
    assert found.tokens["<|image_pad|>"] == 6
    assert np.array_equal(np.asarray(found.pictures[0]), np.asarray(picture.value))


@pytest.mark.parametrize(
    "options", [{}, {"image_size": 100}, {"image_strategy": "pad_square", "image_size": 100}]
)
def test_a_resized_picture_has_the_processors_own_size_and_tokens(options):
    made = renderer("qwen2_5_vl", **options)
    asked = row(user(0, "What?"), assistant("A."), images=[ImageRef(scene(150, 100))])
    example = made.example(asked)
    (found,) = look(made, asked, example)
    _, high, wide = example.fields["image_grid_thw"][0].tolist()
    assert found.rebuilt
    assert found.pictures[0].size == (14 * wide, 14 * high)
    assert found.original == (150, 100)
    pads = made.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert found.tokens["<|image_pad|>"] == (example.fields["input_ids"] == pads).sum()
    fitted = made.pictures(asked)[0].resize(found.pictures[0].size, PIL.Image.Resampling.BICUBIC)
    gap = np.abs(np.asarray(fitted, dtype=int) - np.asarray(found.pictures[0]))
    assert gap.mean() < 2


def test_each_picture_of_a_row_gets_its_own_tensor():
    made = renderer("qwen2_5_vl")
    images = [noise(56, 56, seed=1), noise(84, 28, seed=2), noise(56, 56, seed=4)]
    asked = row(user(0, 1, "?"), assistant("A."), user(2), assistant("B."), images=images)
    found = look(made, asked, made.example(asked))
    assert [one.tokens["<|image_pad|>"] for one in found] == [4, 3, 4]
    for one, image in zip(found, images, strict=True):
        assert np.array_equal(np.asarray(one.pictures[0]), np.asarray(image.value))


def test_tiles_are_shown_as_tiles():
    made = renderer("mllama")
    picture = noise(112, 112)
    asked = row(user(0, "What?"), assistant("A."), images=[picture])
    (found,) = look(made, asked, made.example(asked))
    assert found.rebuilt
    assert "the model sees 4 of 56 x 56" in found.facts
    whole = np.asarray(picture.value)
    corners = [whole[y : y + 56, x : x + 56] for y in (0, 56) for x in (0, 56)]
    assert [np.array_equal(a, b) for a, b in zip(found.pictures, corners, strict=True)] == 4 * [
        True
    ]


def test_what_cannot_be_proved_is_not_called_the_models_view(monkeypatch):
    made = renderer("qwen2_5_vl")
    asked = row(user(0, "What?"), assistant("A."), images=[noise(84, 56)])
    honest = seen.unpack
    monkeypatch.setattr(seen, "unpack", lambda *given: [cell.flip(-1) for cell in honest(*given)])
    (found,) = look(made, asked, made.example(asked))
    assert not found.rebuilt
    assert found.pictures[0].size == (84, 56)


def test_slices_are_shown_as_the_picture_and_its_parts():
    made = renderer("minicpmv4_6")
    asked = row(user(0, "What?"), assistant("A."), images=[ImageRef(scene(336, 112))])
    (found,) = look(made, asked, made.example(asked))
    assert found.rebuilt
    overview, *parts = found.pictures
    assert found.grids["target_sizes"] == [[p.height // 14, p.width // 14] for p in found.pictures]
    joined = np.concatenate([np.asarray(part, dtype=int) for part in parts], axis=1)
    for shown in (joined, np.asarray(overview, dtype=int)):
        wanted = scene(336, 112).resize(shown.shape[1::-1], PIL.Image.Resampling.BICUBIC)
        assert np.abs(shown - np.asarray(wanted)).mean() < 3


# -- the command -----------------------------------------------------------------------------------


def test_text_without_colours_has_brackets_and_every_refusal(data, capsys):
    out = run(
        capsys,
        *("--train_file", str(data), "--vlm_model_name_or_path", tiny("qwen2_5_vl"), "-n", "9"),
        *("--max_tokens_per_gpu", "300"),
    )
    assert joined("[[ ", out, " ]]")[:2] == ["trained", "It·is·a.<|im_end|>"]
    made = renderer("qwen2_5_vl").example(opened(data)[0])
    counts = f"{len(made)} tokens, {made.supervised} trained, 6 image, loss weight 1"
    assert f"rows.json row 0 (id 'one', line 1)\n{counts}" in out
    assert "loss weight 0.5" in out
    assert "'large.png'; 150 x 100 in the file; the model sees 140 x 112" in out
    assert "image_grid_thw [1, 8, 10]; 20 <|image_pad|>" in out
    for reason in ("missing_image", "bad_image", "placeholder_count", "too_long"):
        assert f"[{reason}]" in out
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "\\x1b[2J" in out


def test_colours_only_on_a_terminal_that_wants_them(data, capsys, monkeypatch):
    flags = "--train_file", str(data), "--vlm_model_name_or_path", tiny("qwen2_5_vl"), "-n", "1"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = run(capsys, *flags)
    assert joined("\x1b[1;32m", coloured, "\x1b[0m") == ["trained", "It·is·a.<|im_end|>"]
    monkeypatch.setenv("NO_COLOR", "1")
    plain = run(capsys, *flags)
    assert "\x1b" not in plain
    assert joined("[[ ", plain, " ]]") == ["trained", "It·is·a.<|im_end|>"]


def test_the_padding_is_that_of_the_trainers_own_batch(data):
    made = renderer("qwen2_5_vl")
    _, padding = collect(made, opened(data), [str(data)], 3)
    examples = [made.example(opened(data)[i]) for i in range(3)]
    mask = Batch.of(examples).pad(made.pad_id)["attention_mask"]
    assert padding == pytest.approx(1 - mask.float().mean().item())


def test_a_file_without_one_good_row_is_shown_all_the_same(tmp_path, capsys):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps([{"id": "a"}, {"conversations": []}]))
    out = run(capsys, "--train_file", str(path), "--vlm_model_name_or_path", tiny("qwen3"))
    assert "2 rows, 2 refused" in out
    assert out.count("[no_conversation]") == 2


def test_each_of_several_files_is_shown(data, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    (other / "rows.json").write_text(json.dumps([{"conversations": turns("Hi", "Ho")}]))
    files = f"{data}, {other / 'rows.json'}"
    out = run(capsys, "--train_file", files, "--vlm_model_name_or_path", tiny("qwen2_5_vl"), "-n1")
    assert f"{data}: 7 rows, 1 refused" in out
    assert f"{other / 'rows.json'}: 1 rows, 0 refused" in out
    assert out.count("tokens, ") == 2
    assert "other/rows.json row 0" in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--train_file", "no/such.json"], "no/such.json"),
        (["--train_file", "{data},"], "--train_file"),
        (["--train_file", "{data}", "--chat_template", "qwem"], "chat_template"),
        (["--train_file", "{data}", "-n", "0"], "-n"),
    ],
)
def test_a_bad_setting_is_one_line_and_exit_code_2(flags, words, data, capsys):
    filled = [flag.replace("{data}", str(data)) for flag in flags]
    assert cli.main(["preview", "--vlm_model_name_or_path", tiny("qwen3"), *filled]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


# -- the page --------------------------------------------------------------------------------------


@pytest.fixture
def made_page(data: Path, tmp_path: Path, capsys) -> Path:
    out = tmp_path / "made" / "out.html"
    run(
        capsys,
        *("--train_file", str(data), "--vlm_model_name_or_path", tiny("qwen2_5_vl"), "-n", "9"),
        *("--max_tokens_per_gpu", "300", "--html", str(out)),
    )
    return out


def test_the_page_asks_nobody_for_anything_and_runs_nothing(made_page):
    html = made_page.read_text(encoding="utf-8")
    assert "<script" not in html
    assert "http://" not in html
    assert "https://" not in html
    sources = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert sources
    assert all(s.startswith("data:image/") for s in sources)
    assert html.count("<article") == 7
    assert html.count("data:image/") == 3


def test_the_page_and_the_text_say_the_same(data):
    files, _ = collect(renderer("qwen2_5_vl"), opened(data), [str(data)], 9)
    html = re.sub(r"<style>.*?</style>|<[^>]*>", " ", page(files, "1.5%"), flags=re.DOTALL)
    words = text(files, "1.5%", colour=False)
    figures = re.findall(r"[\d.,]+%|\d+ (?=tokens|trained|image)|\w+ \[[\d, ]+\]", words)
    assert len(figures) > 12
    assert [figure for figure in figures if figure.strip() not in html] == []


@browser.needs_browser
def test_the_page_renders_in_a_browser_and_a_typed_script_stays_text(made_page, tmp_path):
    dom, wider = browser.opened(made_page, tmp_path / "copy.html", width=620)
    assert "<title>Preview: what the trainer sees</title>" in dom
    shown = unescape(re.sub(r"<[^>]*>", "", dom))
    assert SCRIPT in shown  # whole, in a row's id
    assert SCRIPT.replace(" ", "\u00b7") in shown  # in its tokens
    assert "[missing_image]" in shown
    assert wider <= 0
    picture = browser.screenshot(made_page, tmp_path / "shot.png")
    assert browser.count_pixels(picture, "#c9f2d6") > 300  # trained
    assert browser.count_pixels(picture, "#ecdfff") > 300  # image tokens
    assert browser.count_pixels(picture, "#fde7e5") > 300  # refused
