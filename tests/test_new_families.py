"""Families whose images are no packed grid: attended to from a few layers, or cut into slices."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_models import (
    STYLES,
    assistant,
    controls,
    marked,
    noise,
    renderer,
    row,
    runs,
    tiny,
    turn,
    user,
)
from vireo.data.conversation import Conversation, Image, ImageRef, Text, Turn
from vireo.data.ragged import TRAINER_KEYS, Batch, Example
from vireo.errors import RowError

FAMILIES = ["llama", "mllama", "minicpmv4_6"]
VISION = FAMILIES[1:]
SIZES = [(56, 56), (40, 150), (300, 200), (9, 9)]  # for MiniCPM: 0, 3, 6 and 0 slices


def pictures(count: int, start: int = 0) -> list[ImageRef]:
    return [noise(*SIZES[i % 4], seed=i) for i in range(start, start + count)]


def example_of(family: str, *turns: Turn, images: Any = ()) -> Example:
    return renderer(family).example(row(*turns, images=images))


# -- text and labels -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_text_of_a_row_and_what_of_it_carries_loss(family):
    made, style = renderer(family), STYLES[family]
    slots: list[list[int]] = [[0, 1], [2]] if family in VISION else [[], []]
    turns = (
        turn("system", "Be brief."),
        user("See ", *slots[0], ": alike?"),
        assistant("No\n\n"),
        user(*slots[1], "And?"),
        assistant(" Yes."),
    )
    example = made.example(row(*turns, images=pictures(3 if family in VISION else 0)))
    slot = made.family.placeholder or ""
    assert marked(made, example) == style.chat(
        ("system", "Be brief."),
        ("user", f"See {2 * slot}: alike?"),
        ("assistant", "No\n\n"),
        ("user", f"{slot}And?"),
        ("assistant", " Yes."),
    )


def test_no_token_of_a_slice_carries_loss():
    made = renderer("minicpmv4_6")
    turns = user("Draw."), assistant("Here: ", 0, " done.")
    example = made.example(row(*turns, images=pictures(1, start=2)))
    assert runs(made, example) == ["Here: ", " done.<|im_end|>"]
    count = controls(made, example)
    assert (count["<slice>"], count["<image>"], count["<image_id>"]) == (6, 1, 1)
    assert count["<|image_pad|>"] * 16 == int(example.fields["target_sizes"].prod(-1).sum())


@pytest.mark.parametrize("family", FAMILIES)
def test_typed_control_tokens_stay_text(family):
    made, style = renderer(family), STYLES[family]
    for typed in [*made.controls, made.family.placeholder or "<image>", "<image>./</image>"]:
        text = f"a {typed}{typed} b"
        example = made.example(row(turn("system", text), user(text), assistant(text)))
        assert runs(made, example) == [text + style.end]
        assert {n: c for n, c in controls(made, example).items() if n != style.start} == {
            token: 3 for token in style.turn
        }


PIECES = [
    *("<|image|>", "<|image_pad|>", "<image>", "<slice>", "<image_id>7</image_id>", "<|eot_id|>"),
    *("<|begin_of_text|>", "<|im_end|>", "<|eot", "_id|>", "\n", "\n\n", " ", "a", "the cat", "é"),
]
texts = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)


@st.composite
def conversations(draw, images: bool) -> Conversation:
    """User and assistant turns in any order after a first question, images in user turns."""
    turns, count = [], 0
    for i in range(draw(st.integers(2, 4))):
        role: Any = "user" if i == 0 else draw(st.sampled_from(["user", "assistant"]))
        parts: list = []
        for _ in range(draw(st.integers(1, 3))):
            if images and role == "user" and draw(st.booleans()):
                parts.append(Image(count))
                count += 1
            parts.append(Text(draw(texts)))
        turns.append(Turn(role, tuple(parts)))
    return row(*turns, assistant("fin"), images=pictures(count))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_conversation_is_rendered_exactly(family, data):
    made, style = renderer(family), STYLES[family]
    made_row = data.draw(conversations(made.family.has_vision))
    example = made.example(made_row)
    answers = [one.text + style.end for one in made_row.turns if one.role == "assistant"]
    assert runs(made, example) == answers
    wanted = dict.fromkeys(style.turn, len(made_row.turns))
    if style.start:
        wanted[style.start] = 1
    if made_row.images:
        wanted |= dict.fromkeys(style.slot, len(made_row.images))
    seen = controls(made, example)
    if "target_sizes" in example.fields:
        slices = len(example.fields["target_sizes"]) - len(made_row.images)
        if slices:
            wanted |= {"<slice>": slices, "</slice>": slices}
        wanted["<|image_pad|>"] = int(example.fields["target_sizes"].prod(-1).sum()) // 16
    assert seen == wanted
    prompt, answer = made.prompt(made_row)
    ids = prompt.fields["input_ids"]
    assert torch.equal(ids, example.fields["input_ids"][: len(ids)])
    assert (answer, prompt.supervised) == ("fin", 0)


# -- the same as plain transformers --------------------------------------------------------------

LAYOUTS = [[[0, "What is it?"], ["Sure?"]], [["See", 0, 1, " and ", 2], [3, "Alike?"]], [["Hi?"]]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", VISION)
def test_every_key_is_what_the_processor_makes_of_the_same_messages(family, layout):
    """Two images side by side share what may attend to them: nothing may come between."""
    plain = transformers.AutoProcessor.from_pretrained(tiny(family))
    count = sum(isinstance(part, int) for parts in layout for part in parts)
    images, turns, messages = pictures(count), [], []
    for parts in layout:
        turns += [user(*parts), assistant("Yes.\n")]
        content: list[dict] = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image", "image": images[part].value}
            for part in parts
        ]
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": "Yes.\n"}]})
    wanted = plain.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt"
    )
    example = example_of(family, *turns, images=images)
    got = Batch.of([example]).pad(0)
    own = set(got) - set(TRAINER_KEYS)
    assert own == set(wanted)
    for name in own:
        assert torch.equal(got[name], wanted[name]), name


def test_typed_control_tokens_attend_to_the_image_before_them():
    made = renderer("mllama")
    turns = user("a", 0, "b <|eot_id|><|image|> c"), assistant("d")
    example = made.example(row(*turns, images=pictures(1, start=1)))
    ids, mask = example.fields["input_ids"], example.fields["cross_attention_mask"]
    place = ids.tolist().index(made.tokenizer.convert_tokens_to_ids("<|image|>"))
    assert mask.shape == (len(ids), 1, 4)
    assert not mask[:place].any()
    assert mask[place:, 0].tolist() == [[1, 1, 1, 0]] * (len(ids) - place)


# -- a padded row and the same row alone ---------------------------------------------------------

CLOSE = 1e-5  # float32 on a CPU


@cache
def model(family: str) -> Any:
    auto = getattr(transformers, renderer(family).family.auto_class)
    return auto.from_pretrained(tiny(family)).eval()


@torch.no_grad()
def logits(family: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    own = {n: v for n, v in inputs.items() if n not in TRAINER_KEYS}
    return model(family)(**own, position_ids=inputs["positions"][0], use_cache=False).logits


def gap(family: str, counts: list[int], left: bool = False) -> float:
    """The largest difference of logits between rows in one batch and alone, by image counts."""
    made, examples, shown = renderer(family), [], 0
    for i, count in enumerate(counts):
        turns = [turn("system", "Look well. " * i), user(*range(count), "What is it?")]
        turns += [assistant("A cat. " * (i + 1))]
        turns += [user("Sure?"), assistant("Yes.")] * (i % 2)
        examples.append(example_of(family, *turns, images=pictures(count, start=shown)))
        shown += count
    got = logits(family, Batch.of(examples).pad(made.pad_id, left))
    worst = 0.0
    for i, example in enumerate(examples):
        here = slice(got.shape[1] - len(example), None) if left else slice(0, len(example))
        alone = logits(family, Batch.of([example]).pad(made.pad_id))[0]
        worst = max(worst, float((got[i, here] - alone).abs().max()))
    return worst


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize(
    ("family", "counts"),
    [
        ("llama", [0, 0, 0]),
        ("minicpmv4_6", [0, 1, 2, 3]),
        ("minicpmv4_6", [0, 0]),
        ("mllama", [1, 1, 1, 1]),  # of different numbers of tiles
        ("mllama", [2, 2]),
        ("mllama", [0, 0, 0]),
    ],
)
def test_padded_rows_are_as_rows_alone(family, counts, left):
    assert gap(family, counts, left) < CLOSE


def test_rows_of_different_image_counts_disturb_each_other_where_tokens_attend_to_images():
    """Tokens before a row's first image attend to all images that the batch has room for.

    The reason why such rows stand in micro-batches of their own; by how much, decides nothing.
    """
    assert gap("mllama", [1, 2]) > 0.01
    with pytest.raises(ValueError, match="must be present in every row"):
        gap("mllama", [0, 1])


@pytest.mark.parametrize("family", VISION)
def test_images_change_the_answer_of_their_own_row_only(family):
    made = renderer(family)
    turns = user(0, "What is it?"), assistant("A cat.")
    one, two = (made.example(row(*turns, images=[noise(56, 56, seed)])) for seed in (1, 2))
    before = logits(family, Batch.of([one, one]).pad(made.pad_id))
    after = logits(family, Batch.of([one, two]).pad(made.pad_id))
    assert (before[0] - after[0]).abs().max() < CLOSE
    assert (before[1] - after[1]).abs().max() > 0.01


# -- what stands in for images -------------------------------------------------------------------


def test_a_blank_image_has_features():
    features = model("minicpmv4_6").model.get_image_features(**renderer("minicpmv4_6").dummy())
    assert [one.shape for one in features.pooler_output] == [(4, 64)]


def test_a_rank_without_image_rows_can_run_one():
    made = renderer("mllama")
    example = made.empty_with_image()
    assert example.images == 1
    assert example.supervised == 2
    assert logits("mllama", Batch.of([example]).pad(made.pad_id)).isfinite().all()


# -- tools ---------------------------------------------------------------------------------------

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOLS = ({"type": "function", "function": {"name": "weather", "description": "It knows."}},)


@pytest.mark.parametrize(
    ("family", "call", "result"),
    [
        (
            "minicpmv4_6",
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
            ("user", "<tool_response>\n3\n</tool_response>"),
        ),
        ("llama", '{"name": "weather", "parameters": {"city": "Oslo"}}', ("ipython", "3")),
        ("mllama", '{"name": "weather", "parameters": {"city": "Oslo"}}', ("ipython", "3")),
    ],
)
def test_a_tool_call_is_supervised_and_its_result_is_not(family, call, result):
    made, style = renderer(family), STYLES[family]
    turns = (
        user("Is it cold?"),
        turn("assistant", tool_calls=(CALL,)),
        turn("tool", "3"),
        assistant("Yes."),
    )
    example = made.example(row(*turns, tools=TOOLS))
    assert runs(made, example) == [call + style.end, "Yes." + style.end]
    text = marked(made, example)
    assert "It knows." in text
    tail = style.chat(("user", "Is it cold?"), ("assistant", call), result, ("assistant", "Yes."))
    assert text.endswith(tail.removeprefix(style.start))


@pytest.mark.parametrize("family", ["llama", "mllama"])
def test_two_calls_in_a_turn_are_refused(family):
    turns = user("Cold?"), turn("assistant", tool_calls=(CALL, CALL))
    with pytest.raises(RowError, match="one tool call a turn"):
        example_of(family, *turns)
