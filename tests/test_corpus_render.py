"""Every chat file of the corpus, from the file to ids, labels and pixels."""

from __future__ import annotations

import pytest
import torch

from tests.corpus import chat_cases, corpus
from tests.tiny_models import STYLES, assistant, controls, marked, renderer, row, runs, user
from vireo.data.conversation import Conversation, ImageRef, read_rows
from vireo.data.ragged import Example
from vireo.data.render import Renderer
from vireo.errors import RowError
from vireo.families import FAMILIES

# Others have turns of another kind, and tests of these files of their own.
VISION = [name for name in FAMILIES if FAMILIES[name].has_vision and name in STYLES]
# Refused by one image processor alone, which cannot resize so thin a picture.
QWEN_ALONE = "chats/image_thin.json"
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
    style, slot = STYLES[made.family.name], made.family.placeholder or ""
    got, text = runs(made, example), marked(made, example)
    if wanted["assistant_texts"] is not None:
        texts = [one.replace("⟨EOT⟩", style.end) for one in wanted["assistant_texts"]]
        assert got == texts  # exact, so `trim_ok` is not needed
    for one in wanted.get("supervised_contains", ()):
        assert any(one.replace("⟨EOT⟩", style.end) in part for part in got)
    for one in wanted.get("not_supervised", ()):
        assert one in text
        assert not any(one in part for part in got)

    slots = wanted["image_slots"]
    count = controls(made, example)
    assert example.images == slots
    assert all(count.pop(token, 0) == slots for token in style.slot)
    opened = {count.pop(token) for token in style.turn}
    assert len(opened) == 1
    assert style.start == "" or count.pop(style.start) == 1
    if "turns" in wanted:
        system = style.opening.format(role="system") + "You are a helpful assistant." in text
        assert opened == {wanted["turns"] + system}
    check_pixels(made, example, wanted["images"], count)
    assert count == {}  # no other control id, whatever was typed

    plain = text.replace("«", "").replace("»", "")
    question = style.opening.format(role="user")
    assert all(one in plain for one in wanted.get("literal", ()))
    if "layout" in wanted:
        layout = "".join(slot if isinstance(one, int) else one for one in wanted["layout"])
        assert f"{question}{layout}{style.end}" in plain
    if "image_position" in wanted:
        assert f"{question}{slot}" in plain
    weights = example.fields["loss_weight"][example.fields["labels"] != -100]
    assert (weights == wanted.get("weight", 1)).all()


def check_pixels(made: Renderer, example: Example, names: list[str], count: dict[str, int]) -> None:
    """The pictures are the wanted ones, in order, and have the tokens that their grids say.

    Takes what belongs to images out of `count`.
    """
    keys = [name for name, key in made.family.keys.items() if key.kind != "token"]
    image_tokens = count.pop("<|image_pad|>", 0)
    if not names:
        assert image_tokens == 0
        assert not set(keys) & set(example.fields)
        return
    refs = [ImageRef(name, str(corpus() / "chats")) for name in names]
    alone = made.example(row(user(*range(len(refs))), assistant("ok"), images=refs)).fields
    for key in keys:
        assert torch.equal(example.fields[key], alone[key])
    if "image_grid_thw" in keys:
        assert image_tokens == example.fields["image_grid_thw"].prod(-1).sum() // 4
        assert int(example.fields["mm_token_type_ids"].sum()) == image_tokens
    elif "target_sizes" in keys:
        sizes = example.fields["target_sizes"]
        assert image_tokens == sizes.prod(-1).sum() // 16
        slices = {count.pop("<slice>", 0), count.pop("</slice>", 0)}
        assert slices == {len(sizes) - len(names)}


@pytest.mark.parametrize("family", VISION)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["file"])
def test_chat_file(case, family):
    made = renderer(family)
    got = render(made, case)
    for wanted in case["expect"]["rows"]:
        result = got[wanted["row"]]
        if case["file"] == QWEN_ALONE and not family.startswith("qwen"):
            assert isinstance(result, Example)
        elif wanted["outcome"] == "accept":
            assert isinstance(result, Example), result
            check_accepted(made, result, wanted)
        else:
            assert isinstance(result, RowError)
            assert result.reason == wanted["reason"]
            assert all(name in str(result) for name in wanted["names"])
            assert all(str(number) in str(result) for number in wanted.get("numbers", ()))
