"""A conversation becomes an example: right ids, right labels, right pictures, or a refusal."""

from __future__ import annotations

import pickle
import re
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_models import (
    CAT,
    assistant,
    controls,
    marked,
    noise,
    policy,
    renderer,
    row,
    runs,
    tiny,
    turn,
    user,
    with_newline_runs,
    with_template,
)
from vireo.data.conversation import Image, ImageRef, Text, Turn
from vireo.data.ragged import Batch
from vireo.data.render import MARK, Renderer
from vireo.errors import InputError, RowError

VISION = ["qwen2_vl", "qwen2_5_vl"]
FAMILIES = [*VISION, "qwen3"]
EOT = "<|im_end|>"
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def example_of(*turns, images=(), family="qwen2_5_vl", **options):
    return renderer(family).example(row(*turns, images=images, **options))


def runs_of(*turns, images=(), family="qwen2_5_vl") -> list[str]:
    return runs(renderer(family), example_of(*turns, images=images, family=family))


# -- labels --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_only_answers_and_their_ends_carry_loss(family):
    turns = (
        turn("system", "Be yes."),
        user("yes"),
        assistant("yes"),
        user("assistant\nyes<|im_end|>"),
        assistant("no, yes"),
    )
    assert runs_of(*turns, family=family) == ["yes" + EOT, "no, yes" + EOT]


def test_the_whole_text_of_a_row_with_images_in_several_turns():
    made = renderer("qwen2_vl")
    turns = (
        turn("system", "Look well."),
        user("Compare ", 0, " with ", 1, "."),
        assistant("Red."),
        user(2),
        assistant("Blue."),
    )
    images = [noise(28, 28), noise(56, 28), noise(28, 84)]
    assert marked(made, example_of(*turns, images=images, family="qwen2_vl")) == (
        "<|im_start|>system\nLook well.<|im_end|>\n"
        f"<|im_start|>user\nCompare {IMAGE} with {IMAGE}.<|im_end|>\n"
        "<|im_start|>assistant\n«Red.<|im_end|>»\n"
        f"<|im_start|>user\n{IMAGE}<|im_end|>\n"
        "<|im_start|>assistant\n«Blue.<|im_end|>»\n"
    )


def test_an_image_inside_an_answer_carries_no_loss_and_the_text_round_it_does():
    turns = user("Draw."), assistant("Here: ", 0, " and ", 1, 2, " done.")
    images = [noise(56, 56), noise(28, 28), noise(28, 56)]
    assert runs_of(*turns, images=images) == ["Here: ", " and ", " done." + EOT]
    assert runs_of(user("Draw."), assistant(0), images=images[:1]) == [EOT]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("answer", ["\n\n- one\n", "\n", " yes", "\n\n\n  x", "", "\t"])
def test_white_space_of_an_answer_is_kept(family, answer):
    turns = user("yes"), assistant(answer), user("q"), assistant(answer)
    assert runs_of(*turns, family=family) == [answer + EOT] * 2


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3"])
@pytest.mark.parametrize("answer", ["\n\n- one\n", "\n", "\n\n\n  x", "\n<|im_end|>"])
def test_line_ends_of_an_answer_do_not_melt_into_the_prompt(family, answer):
    made = Renderer(with_newline_runs(family))
    assert len(made.tokenizer.encode("\n\n\n")) == 1
    turns = user("yes"), assistant(answer), user("q"), assistant(answer)
    example, (prompt, _) = made.example(row(*turns)), made.prompt(row(*turns))
    assert runs(made, example) == [answer + EOT] * 2
    assert torch.equal(example.fields["input_ids"][: len(prompt)], prompt.fields["input_ids"])
    assert example.fields["labels"][len(prompt)] != -100


def test_a_placeholder_token_that_a_template_writes_in_an_answer_carries_no_loss():
    template = (
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}"
        "{{ '<|vision_pad|><|im_end|>' }}{% endfor %}"
    )
    made = Renderer(with_template("qwen2_5_vl", template, "pads"))
    # No control token but the image's follows the answer at once, so it is taken for its end.
    assert runs(made, made.example(row(user("q"), assistant("yes")))) == ["yes"]


def test_the_first_token_of_a_row_carries_no_loss():
    """Nothing stands before it, and in a packed sequence another row would."""
    template = (
        "{% for m in messages if m.role != 'user' %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    )
    made = Renderer(with_template("qwen3", template, "bare"))
    example = made.example(row(user(""), assistant("42")))
    assert marked(made, example) == "4«2<|im_end|>»"
    assert example.fields["loss_weight"].tolist() == [0, 1, 1]


def test_a_row_ending_with_a_question_keeps_it_without_loss():
    turns = user("q"), assistant("a"), user("and?")
    assert marked(renderer("qwen3"), example_of(*turns, family="qwen3")).endswith(
        "«a<|im_end|>»\n<|im_start|>user\nand?<|im_end|>\n"
    )


def test_a_row_without_an_answer_is_refused():
    with pytest.raises(RowError, match="carries loss") as caught:
        example_of(user("q"), where="a.json row 3")
    assert caught.value.reason == "no_assistant"
    assert str(caught.value).startswith("a.json row 3: ")


@pytest.mark.parametrize("weight", [0.25, 0.0, 3.0])
def test_a_rows_weight_multiplies_its_loss_weights(weight):
    example = example_of(*CAT, images=[noise(28, 28)], weight=weight)
    wanted = torch.where(example.fields["labels"] == -100, 0.0, weight)
    assert torch.equal(example.fields["loss_weight"], wanted)
    words = [renderer("qwen2_5_vl").tokenizer.encode(text) for text in ("A cat.", "Yes.")]
    assert example.supervised == sum(len(ids) + 1 for ids in words)


# -- what a person typed stays text --------------------------------------------------------------

TYPED = ["<|im_end|>", "<|im_start|>user", "<|image_pad|>", "<|endoftext|>", IMAGE, MARK]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("typed", TYPED)
def test_a_typed_control_token_stays_text(family, typed):
    text = f"a {typed}{typed} b"
    turns = turn("system", text), user(text), assistant(text)
    example = example_of(*turns, family=family)
    assert runs(renderer(family), example) == [text + EOT]
    assert controls(renderer(family), example) == {"<|im_start|>": 3, EOT: 3}
    assert marked(renderer(family), example).replace("«", "").replace("»", "") == re.sub(
        r"(<\|image_pad\|>)+",
        "<|image_pad|>",
        f"<|im_start|>system\n{text}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n"
        f"<|im_start|>assistant\n{text}<|im_end|>\n",
    )


@pytest.mark.parametrize("name", [None, "llava"])
def test_a_control_token_typed_in_two_parts_stays_text(name):
    """Templates join text parts, and LLaVA's moves the image from between them."""
    made = renderer("qwen2_5_vl", chat_template=name)
    for parts in (("<|im_", "end|>"), ("a <|", "im_e", "nd|> b"), ("<|im_", 0, "end|>")):
        images = [noise(28, 28)] if 0 in parts else []
        example = made.example(row(user(*parts), assistant("ok"), images=images))
        template_own = {None: {"<|im_start|>": 3, EOT: 3}, "llava": {EOT: 1}}[name]
        seen = controls(made, example)
        assert {n: seen[n] for n in template_own} == template_own
        assert seen.get("<|image_pad|>", 0) == len(images)
        text = "".join(part for part in parts if isinstance(part, str))
        assert text in marked(made, example).replace(IMAGE, "").replace("\n", "")


def test_the_private_mark_never_reaches_the_ids():
    made = renderer("qwen2_5_vl")
    example = example_of(user(MARK, 0, MARK), assistant(f"{MARK}\n"), images=[noise(28, 28)])
    assert made.mark_id not in example.fields["input_ids"].tolist()
    assert runs(made, example) == [f"{MARK}\n{EOT}"]


PIECES = [
    *TYPED,
    "<image>",
    "<|im_",
    "end|>",
    "\n",
    " ",
    "a",
    "the cat",
    "é",
    "👩‍👩‍👧",
    "7",
    "assistant\n",
]
texts = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)


@st.composite
def conversations(draw):
    """User and assistant turns in any order after a first question, images anywhere."""
    turns, count = [], 0
    for i in range(draw(st.integers(2, 5))):
        role: Any = "user" if i == 0 else draw(st.sampled_from(["user", "assistant"]))
        parts: list = []
        for _ in range(draw(st.integers(1, 3))):
            if role == "user" and draw(st.booleans()):
                parts.append(Image(count))
                count += 1
            parts.append(Text(draw(texts)))
        turns.append(Turn(role, tuple(parts)))
    images = [noise(28 * (1 + i % 3), 28, seed=i) for i in range(count)]
    return row(*turns, assistant("fin"), images=images)


@pytest.mark.parametrize("family", VISION)
@settings(max_examples=25, deadline=None)
@given(conversations())
def test_any_conversation_is_rendered_exactly(family, made_row):
    """Supervised text, control ids and images are the conversation's own, whatever was typed."""
    made = renderer(family)
    example = made.example(made_row)
    answers = [one.text + EOT for one in made_row.turns if one.role == "assistant"]
    assert runs(made, example) == answers
    images = len(made_row.images)
    counts = {"<|im_start|>": 1 + len(made_row.turns), EOT: 1 + len(made_row.turns)}
    if images:
        tokens = sum(1 + i % 3 for i in range(images))
        counts |= {"<|vision_start|>": images, "<|vision_end|>": images, "<|image_pad|>": tokens}
        assert example.fields["image_grid_thw"].tolist() == [
            [1, 2, 2 * (1 + i % 3)] for i in range(images)
        ]
    assert controls(made, example) == counts
    assert int(example.fields["mm_token_type_ids"].sum()) == counts.get("<|image_pad|>", 0)
    prompt, answer = made.prompt(made_row)
    ids = prompt.fields["input_ids"]
    assert torch.equal(ids, example.fields["input_ids"][: len(ids)])
    assert answer == "fin"


# -- the same as plain transformers --------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_of_ordinary_rows_are_those_of_apply_chat_template(family):
    vision = family in VISION
    loader = transformers.AutoProcessor if vision else transformers.AutoTokenizer
    plain = loader.from_pretrained(tiny(family))
    picture = noise(90, 60)
    says = [("user", "What is it?"), ("assistant", "A cat."), ("user", "Sure?")]
    says.append(("assistant", "Yes, 42 of them.\n"))
    messages: list[Any] = [{"role": role, "content": text} for role, text in says]
    if vision:
        for message in messages:
            message["content"] = [{"type": "text", "text": message["content"]}]
        messages[0]["content"].insert(0, {"type": "image", "image": picture.value})
    wanted: Any = plain.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt"
    )
    slot = [0] if vision else []
    turns = user(*slot, "What is it?"), *(turn(role, text) for role, text in says[1:])
    example = example_of(*turns, images=[picture] * vision, family=family)
    for name, value in wanted.items():
        if name != "attention_mask":
            shaped = value if name in ("pixel_values", "image_grid_thw") else value[0]
            assert torch.equal(example.fields[name], shaped), name


@pytest.mark.parametrize("family", VISION)
def test_image_tokens_are_as_many_as_the_processors_grid_says(family):
    made = renderer(family)
    images = [noise(w, h) for w, h in [(56, 56), (100, 60), (60, 140), (1, 1), (400, 30)]]
    example = example_of(user(*range(5)), assistant("ok"), images=images, family=family)
    cells = example.fields["image_grid_thw"].prod(-1) // 4
    assert example.images == len(cells) == 5
    assert controls(made, example)["<|image_pad|>"] == cells.sum()
    assert example.fields["pixel_values"].shape == (4 * cells.sum(), 1176)
    assert cells[0] == 4
    assert (cells >= 1).all()


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (1, 150), (27, 27)])
def test_an_image_smaller_than_a_patch_gives_at_least_one_token(size):
    example = example_of(user(0), assistant("ok"), images=[noise(*size)])
    assert controls(renderer("qwen2_5_vl"), example)["<|image_pad|>"] >= 1


def test_pictures_come_in_the_order_of_their_slots():
    one, two = noise(56, 28, 1), noise(56, 28, 2)  # alike in size, so only the pixels tell
    split = example_of(user(0), assistant("a"), user(1), assistant("b"), images=[one, two])
    first, second = split.fields["pixel_values"].chunk(2)
    for ref, part in ((one, first), (two, second)):
        alone = example_of(user(0), assistant("a"), images=[ref]).fields["pixel_values"]
        assert torch.equal(part, alone)
    assert not torch.equal(first, second)


# -- positions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", VISION)
def test_positions_of_an_image_row_by_hand(family):
    made = renderer(family)
    example = example_of(user(0, "?"), assistant("ok"), images=[noise(56, 84)], family=family)
    ids, positions = example.fields["input_ids"], example.fields["positions"]
    start = ids.tolist().index(made.tokenizer.convert_tokens_to_ids("<|image_pad|>"))
    count = len(ids)
    assert positions.shape == (4, count)
    assert positions[0].tolist() == list(range(count))
    before = list(range(start))
    after = [start + 3 + i for i in range(count - start - 6)]  # 3 = the longer side of 3 x 2
    in_time = [start] * 6
    down = [start + i for i in (0, 0, 1, 1, 2, 2)]
    across = [start + i for i in (0, 1, 0, 1, 0, 1)]
    assert positions[1].tolist() == before + in_time + after
    assert positions[2].tolist() == before + down + after
    assert positions[3].tolist() == before + across + after


@pytest.mark.parametrize("family", VISION)
def test_positions_are_those_of_the_model_itself(family):
    images = [noise(56, 84), noise(140, 28), noise(28, 28)]
    turns = user("See ", 0, " and ", 1), assistant("ok"), user(2), assistant("Yes")
    fields = example_of(*turns, images=images, family=family).fields
    wanted, _ = policy(family).hf.model.get_rope_index(
        fields["input_ids"][None],
        mm_token_type_ids=fields["mm_token_type_ids"][None],
        image_grid_thw=fields["image_grid_thw"],
        attention_mask=torch.ones(1, len(fields["input_ids"])),
    )
    assert torch.equal(fields["positions"][1:], wanted[:, 0])


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_of_a_text_row_count_up_in_every_part(family):
    positions = example_of(user("q"), assistant("a"), family=family).fields["positions"]
    assert positions.shape[0] == (4 if family in VISION else 1)
    assert all(part.tolist() == list(range(positions.shape[1])) for part in positions)


# -- prompts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("answer", ["A cat.", "\n\n- a cat", " \n a", "", "<|im_end|>"])
def test_a_prompt_is_where_the_example_starts_to_answer(family, answer):
    """Whatever an answer, or an earlier one, starts with: generation sees what training saw."""
    made = renderer(family)
    images = [noise(56, 28)] if family in VISION else []
    turns = user(*range(len(images)), "q"), assistant(answer), user("q"), assistant(answer)
    made_row = row(*turns, images=images)
    example, (prompt, text) = made.example(made_row), made.prompt(made_row)
    ids = prompt.fields["input_ids"]
    assert torch.equal(example.fields["input_ids"][: len(ids)], ids)
    assert torch.equal(example.fields["positions"][:, : len(ids)], prompt.fields["positions"])
    assert (example.fields["labels"][len(ids) :][:1] != -100).all()
    assert prompt.supervised == 0
    assert (text, prompt.images) == (answer, len(images))


def test_a_prompt_that_ends_with_a_space_is_parted_from_the_answer():
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    made = Renderer(with_template("qwen3", template, "space"))
    assert len(made.tokenizer.encode(" the")) == 1  # what plain tokenising would make of it
    made_row = row(user("q"), assistant("the cat"))
    example, (prompt, _) = made.example(made_row), made.prompt(made_row)
    assert torch.equal(example.fields["input_ids"][: len(prompt)], prompt.fields["input_ids"])
    assert runs(made, example) == ["the cat" + EOT]


def test_a_prompt_leaves_out_what_comes_after_it():
    made = renderer("qwen2_5_vl")
    images = [noise(28, 28, 1), noise(56, 56, 2)]
    made_row = row(user(0, "q"), assistant("a"), user(1, "<|im_end|>"), images=images)
    prompt, text = made.prompt(made_row)
    assert marked(made, prompt) == (
        f"{SYSTEM}<|im_start|>user\n{IMAGE}q<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (text, prompt.images) == ("a", 1)
    assert prompt.fields["image_grid_thw"].tolist() == [[1, 2, 2]]


@pytest.mark.parametrize(
    ("turns", "reason"), [((user("q"),), "no_assistant"), ((assistant("a"),), "turn_order")]
)
def test_a_row_without_a_prompt_is_refused(turns, reason):
    with pytest.raises(RowError, match="row 1") as caught:
        renderer("qwen3").prompt(row(*turns, where="row 1"))
    assert caught.value.reason == reason


# -- pictures ------------------------------------------------------------------------------------


def picture(strategy: str, size: int | None, of: tuple[int, int]) -> PIL.Image.Image:
    made = renderer("qwen2_5_vl", image_strategy=strategy, image_size=size)
    return made.pictures(row(user(0), images=[ImageRef(PIL.Image.new("RGB", of, "red"))]))[0]


def test_the_longest_side_is_fitted():
    assert picture("longest", 56, (224, 112)).size == (56, 28)
    assert picture("longest", 56, (10, 20)).size == (28, 56)
    assert picture("longest", None, (224, 112)).size == (224, 112)


def test_a_square_is_padded_with_the_processors_mean_colour():
    fitted = picture("pad_square", None, (90, 30))
    assert fitted.size == (90, 90)
    assert fitted.getpixel((45, 45)) == (255, 0, 0)
    mean = renderer("qwen2_5_vl").processor.image_processor.image_mean
    edge: Any = fitted.getpixel((45, 5))
    assert np.allclose(edge, [255 * c for c in mean], atol=0.5)
    assert picture("pad_square", 56, (90, 30)).size == (56, 56)


def test_the_image_size_sets_the_number_of_tokens():
    made = renderer("qwen2_5_vl", image_strategy="longest", image_size=56)
    example = made.example(row(user(0), assistant("ok"), images=[noise(224, 112)]))
    assert example.fields["image_grid_thw"].tolist() == [[1, 2, 4]]


def test_the_dummy_image_is_the_smallest():
    dummy = renderer("qwen2_5_vl").dummy()
    assert dummy["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert dummy["pixel_values"].shape == (4, 1176)
    assert set(dummy) == {"image_grid_thw", "pixel_values"}


# -- refusals ------------------------------------------------------------------------------------


def refusal(made: Renderer, *turns, images=()) -> RowError:
    with pytest.raises(RowError) as caught:
        made.example(row(*turns, images=images, where="data.json row 7 (id 'x')"))
    assert str(caught.value).startswith("data.json row 7 (id 'x'): ")
    assert type(caught.value) is RowError  # nothing that a reader of docs/data.md would not know
    return caught.value


def test_an_image_too_long_and_thin_is_refused():
    error = refusal(renderer("qwen2_5_vl"), user(0), assistant("a"), images=[noise(300, 1)])
    assert error.reason == "bad_image"
    assert "300 x 1 pixels" in error.message
    assert "pad_square" in error.message


def test_a_missing_image_is_refused_by_name(tmp_path):
    images = [ImageRef("no/where.png", str(tmp_path))]
    error = refusal(renderer("qwen2_5_vl"), user(0), assistant("a"), images=images)
    assert error.reason == "missing_image"
    assert "no/where.png" in error.message


def test_a_file_that_is_no_image_is_refused_by_name(tmp_path):
    (tmp_path / "page.png").write_text("<html>not found</html>")
    images = [ImageRef("page.png", str(tmp_path))]
    error = refusal(renderer("qwen2_5_vl"), user(0), assistant("a"), images=images)
    assert error.reason == "bad_image"
    assert "page.png" in error.message


def test_a_row_over_the_length_limit_is_refused_with_both_numbers():
    turns = user(0, "What is it?"), assistant("A cat.")
    images = [noise(280, 280)]  # 100 image tokens, so that only the expanded row is too long
    length = len(example_of(*turns, images=images))
    assert len(Renderer(tiny("qwen2_5_vl"), max_length=length).example(row(*turns, images=images)))
    made = Renderer(tiny("qwen2_5_vl"), max_length=length - 1)
    error = refusal(made, *turns, images=images)
    assert error.reason == "too_long"
    assert f"{length} tokens" in error.message
    assert f"limit is {length - 1}" in error.message
    assert "--max_length" in error.message


def test_a_row_over_the_models_own_limit_is_refused():
    error = refusal(renderer("qwen3"), user("a b " * 4096), assistant("a"))
    assert error.reason == "too_long"
    assert "limit is 4096" in error.message


def test_a_hopeless_row_is_refused_before_its_images_are_opened(tmp_path):
    images = [ImageRef("none.png", str(tmp_path))]
    error = refusal(renderer("qwen2_vl"), user(0, "a b " * 9000), assistant("a"), images=images)
    assert error.reason == "too_long"
    assert "before its images" in error.message


def test_a_length_limit_above_the_models_is_an_input_error():
    with pytest.raises(InputError, match=r"5000 .* 4096"):
        Renderer(tiny("qwen3"), max_length=5000)


def test_a_text_model_refuses_images():
    error = refusal(renderer("qwen3"), user(0, "q"), assistant("a"), images=[noise(28, 28)])
    assert error.reason == "too_many_images"
    assert "text-only" in error.message


def test_several_images_are_refused_where_they_are_switched_off():
    made = renderer("qwen2_5_vl", many_images=False)
    images = [noise(28, 28), noise(28, 28)]
    error = refusal(made, user(0, 1), assistant("a"), images=images)
    assert error.reason == "too_many_images"
    assert "2 images" in error.message
    assert "--pack_multi_image" in error.message
    assert made.example(row(user(0), assistant("a"), images=images[:1])).images == 1


def test_a_template_that_drops_what_was_typed_is_refused():
    template = "{% for m in messages %}{{ m.content.split('#')[0] + '<|im_end|>' }}{% endfor %}"
    made = Renderer(with_template("qwen3", template, "drops"))
    error = refusal(made, user("q # <|im_end|>"), assistant("a"))
    assert error.reason == "template"
    assert "leaves out or changes what turn 1 (user) says" in error.message


def test_a_template_that_makes_no_image_slots_is_refused():
    template = (
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}"
        "{{ '<|im_end|>' }}{% endfor %}"
    )
    made = Renderer(with_template("qwen2_5_vl", template, "blind"))
    error = refusal(made, user(0, "q"), assistant("a"), images=[noise(28, 28)])
    assert error.reason == "template"
    assert "0 image slots of 1" in error.message


@pytest.mark.parametrize("content", [None, "{}", '{"model_type": "clip"}'])
def test_a_folder_that_is_no_known_model_is_an_input_error(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=re.escape(str(tmp_path))):
        Renderer(str(tmp_path))


# -- in workers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3"])
def test_a_renderer_crosses_a_pickle(family):
    made = renderer(family)
    copy = pickle.loads(pickle.dumps(made))
    images = [noise(56, 28)] if made.family.has_vision else []
    turns = user(*range(len(images)), "q <|im_end|>"), assistant("\na")
    wanted = Batch.of([made.example(row(*turns, images=images))]).pack()
    got = Batch.of([copy.example(row(*turns, images=images))]).pack()
    assert set(got) == set(wanted)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
