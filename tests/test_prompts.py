"""Prompts for both sides: what an engine makes of a request is what the trainer has."""

from __future__ import annotations

import io

import numpy as np
import PIL.Image
import pytest
import torch

from tests.tiny_models import FAMILIES, renderer
from vireo.data.conversation import Conversation, Image, ImageRef, Text, Turn
from vireo.data.prompt import Prompt
from vireo.data.ragged import IGNORE, Batch
from vireo.data.received import received
from vireo.data.response import with_response
from vireo.errors import RowError

VISION = [name for name, family in FAMILIES.items() if family.has_vision]
SIZES = ((61, 97), (120, 60))


def conversation(images: int, text: str = "? Really\n") -> Conversation:
    draw = np.random.default_rng(3)
    refs = [
        ImageRef(PIL.Image.fromarray(draw.integers(0, 256, (h, w, 3), dtype=np.uint8)))
        for w, h in SIZES[:images]
    ]
    parts = (Text("See "), *(Image(i) for i in range(images)), Text(text))
    return Conversation((Turn("user", parts), Turn("assistant", (Text("Fine."),))), tuple(refs))


def same(one: Prompt, other: Prompt) -> None:
    assert one.example.fields.keys() == other.example.fields.keys()
    for name, value in one.example.fields.items():
        assert torch.equal(value, other.example.fields[name]), name


def over_the_wire(prompt: Prompt) -> list[PIL.Image.Image]:
    return [PIL.Image.open(io.BytesIO(png)) for png in prompt.pngs]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_makes_the_trainers_tensors_of_a_request(family: str) -> None:
    render = renderer(family)
    images = 0 if not FAMILIES[family].has_vision else 1 if family == "mllama" else 2
    prompt = render.rollout(conversation(images))
    if FAMILIES[family].forms["embedded"] == "ids":
        same(prompt, received(render, over_the_wire(prompt), ids=prompt.ids))
    same(prompt, received(render, over_the_wire(prompt), text=prompt.text))
    trained, answer = render.prompt(conversation(images))
    assert answer == prompt.answer == "Fine."
    assert prompt.expanded == trained.fields["input_ids"].tolist()


@pytest.mark.parametrize("family", VISION)
def test_pictures_at_their_final_size_are_the_picture_that_training_sees(family: str) -> None:
    """Resizing before the processor changes no bit of what the processor makes."""
    render = renderer(family)
    row = conversation(1)
    prompt, (trained, _) = render.rollout(row), render.prompt(row)
    for name, value in trained.fields.items():
        assert torch.equal(value, prompt.example.fields[name]), name
    if FAMILIES[family].grid:
        grid = prompt.example.fields[FAMILIES[family].grid][0]
        patch = render.processor.image_processor.patch_size
        assert prompt.pictures[0].size == (int(grid[2]) * patch, int(grid[1]) * patch)
        assert prompt.pictures[0].size != SIZES[0]


@pytest.mark.parametrize("family", VISION)
def test_typed_control_tokens_stay_text_in_the_ids_of_a_prompt(family: str) -> None:
    if FAMILIES[family].forms["embedded"] != "ids" or not FAMILIES[family].expands:
        pytest.skip("goes as text")
    render = renderer(family)
    typed = conversation(1, f"? {FAMILIES[family].placeholder} is no picture\n")
    prompt = render.rollout(typed)
    same(prompt, received(render, over_the_wire(prompt), ids=prompt.ids))


def test_ids_have_one_placeholder_an_image() -> None:
    prompt = renderer("qwen2_5_vl").rollout(conversation(2))
    pad = renderer("qwen2_5_vl").tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert prompt.ids.count(pad) == 2
    assert prompt.expanded.count(pad) == 4 * 6 // 4 + 8 * 4 // 4
    assert prompt.text.count("<|image_pad|>") == 2


@pytest.mark.parametrize("family", ["qwen2_5_vl", "mllama", "gemma3"])
def test_pictures_without_placeholders_are_refused(family: str) -> None:
    render = renderer(family)
    prompt = render.rollout(conversation(1))
    text = render.rollout(conversation(0))
    with pytest.raises(RowError, match="1 pictures for 0 placeholders"):
        received(render, prompt.pictures, text=text.text)
    with pytest.raises(RowError, match="0 pictures for 1 placeholders"):
        received(render, [], text=prompt.text)
    if family != "gemma3":
        with pytest.raises(RowError, match="1 pictures for 0 placeholders"):
            received(render, prompt.pictures, ids=text.ids)


def test_ids_of_a_family_whose_images_melt_into_text_are_refused() -> None:
    render = renderer("gemma3")
    prompt = render.rollout(conversation(1))
    with pytest.raises(RowError, match="takes a prompt with pictures as text"):
        received(render, prompt.pictures, ids=prompt.ids)


def test_a_row_may_end_with_the_question() -> None:
    row = conversation(1)
    asked = Conversation(row.turns[:1], row.images)
    prompt = renderer("qwen2_5_vl").rollout(asked)
    assert prompt.answer is None
    same(prompt, renderer("qwen2_5_vl").rollout(row))


def test_banned_are_image_tokens_and_rows_without_a_token() -> None:
    render = renderer("qwen2_5_vl")
    tokenizer = render.tokenizer
    words = {i for i in tokenizer.get_vocab().values() if i != render.mark_id}
    rows = render.config.get_text_config().vocab_size
    banned = set(render.banned_ids)
    assert render.image_ids <= banned
    assert banned - render.image_ids == set(range(rows)) - words
    assert not banned & set(render.stop_ids)
    assert tokenizer.eos_token_id in render.stop_ids


def test_a_response_is_labelled_and_nothing_else() -> None:
    render = renderer("qwen2_5_vl")
    prompt = render.rollout(conversation(1))
    whole = with_response(prompt.example, [5, 6, 7], render.positions, [1, 0, 1])
    size = len(prompt.expanded)
    assert whole.fields["labels"].tolist() == [IGNORE] * size + [5, 6, 7]
    assert whole.fields["loss_weight"].tolist() == [0.0] * size + [1.0, 0.0, 1.0]
    assert whole.fields["input_ids"].tolist() == [*prompt.expanded, 5, 6, 7]
    assert whole.fields["mm_token_type_ids"][-3:].tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="a mask of 1 values for 2"):
        with_response(prompt.example, [1, 2], render.positions, [1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_response_has_the_tensors_that_training_has_of_the_same_text(family: str) -> None:
    """Prompt and answer as tokens are the row as it is trained on, in every key."""
    render = renderer(family)
    row = conversation(1 if FAMILIES[family].has_vision else 0)
    trained, prompt = render.example(row), render.rollout(row)
    size = len(prompt.expanded)
    answer = trained.fields["input_ids"][size:]
    whole = with_response(prompt.example, answer.tolist(), render.positions)
    assert whole.fields.keys() == trained.fields.keys()
    for name, value in trained.fields.items():
        if name not in ("labels", "loss_weight"):
            assert torch.equal(whole.fields[name], value), name
    Batch.of([whole, trained]).pad(render.pad_id)
