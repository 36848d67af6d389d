"""Every chat file of the corpus, from the file to ids, labels and pixels."""

from __future__ import annotations

import pytest
import torch

from tests.corpus import chat_cases, corpus
from tests.tiny_models import assistant, controls, marked, renderer, row, runs, user
from vireo.data.conversation import Conversation, ImageRef, read_rows
from vireo.data.ragged import Example
from vireo.data.render import Renderer
from vireo.errors import RowError

EOT = "<|im_end|>"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
CASES = [case for case in chat_cases() if "rows" in case["expect"]]


def render(made: Renderer, case: dict) -> dict[int, Example | RowError]:
    """What became of each row, by its number in the file."""
    rows = read_rows(corpus() / case["file"], image_root=corpus() / "chats", on_bad_row="skip")
    numbers = [one["row"] for one in case["expect"]["rows"]]
    out: dict[int, Example | RowError] = {}
    for place in [*rows.skipped, *rows]:
        number = next(n for n in numbers if f" row {n} " in place.where + " ")
        numbers.remove(number)
        out[number] = place if isinstance(place, RowError) else example_of(made, place)
    assert not numbers
    return out


def example_of(made: Renderer, conversation: Conversation) -> Example | RowError:
    try:
        return made.example(conversation)
    except RowError as error:
        return error


def check_accepted(made: Renderer, example: Example, wanted: dict) -> None:
    got, text = runs(made, example), marked(made, example)
    if wanted["assistant_texts"] is not None:
        texts = [one.replace("⟨EOT⟩", EOT) for one in wanted["assistant_texts"]]
        assert got == texts  # exact, so `trim_ok` is not needed
    for one in wanted.get("supervised_contains", ()):
        assert any(one.replace("⟨EOT⟩", EOT) in part for part in got)
    for one in wanted.get("not_supervised", ()):
        assert one in text
        assert not any(one in part for part in got)

    slots = wanted["image_slots"]
    count = controls(made, example)
    assert example.images == slots == count.pop("<|vision_start|>", 0)
    assert slots == count.pop("<|vision_end|>", 0)
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>" in text
    opened = count.pop("<|im_start|>")
    assert count.pop(EOT) == opened
    if "turns" in wanted:
        assert opened == wanted["turns"] + system
    check_pixels(made, example, wanted["images"], count.pop("<|image_pad|>", 0))
    assert count == {}  # no other control id, whatever was typed

    plain = text.replace("«", "").replace("»", "")
    assert all(one in plain for one in wanted.get("literal", ()))
    if "layout" in wanted:
        layout = "".join(IMAGE if isinstance(one, int) else one for one in wanted["layout"])
        assert f"<|im_start|>user\n{layout}<|im_end|>" in plain
    if "image_position" in wanted:
        assert f"<|im_start|>user\n{IMAGE}" in plain
    weights = example.fields["loss_weight"][example.fields["labels"] != -100]
    assert (weights == wanted.get("weight", 1)).all()


def check_pixels(made: Renderer, example: Example, names: list[str], image_tokens: int) -> None:
    """The pictures are the wanted ones, in order, and have the tokens that their grids say."""
    if not names:
        assert image_tokens == 0
        assert "pixel_values" not in example.fields
        return
    refs = [ImageRef(name, str(corpus() / "chats")) for name in names]
    alone = made.example(row(user(*range(len(refs))), assistant("ok"), images=refs)).fields
    for key in ("pixel_values", "image_grid_thw"):
        assert torch.equal(example.fields[key], alone[key])
    assert image_tokens == example.fields["image_grid_thw"].prod(-1).sum() // 4
    assert int(example.fields["mm_token_type_ids"].sum()) == image_tokens


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["file"])
def test_chat_file(case, family):
    made = renderer(family)
    got = render(made, case)
    for wanted in case["expect"]["rows"]:
        result = got[wanted["row"]]
        if wanted["outcome"] == "accept":
            assert isinstance(result, Example), result
            check_accepted(made, result, wanted)
        else:
            assert isinstance(result, RowError)
            assert result.reason == wanted["reason"]
            assert all(name in str(result) for name in wanted["names"])
            assert all(str(number) in str(result) for number in wanted.get("numbers", ()))
