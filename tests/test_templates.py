"""Chat templates: what they write, and which of it is the assistant's, against strings by hand.

In the strings, «» stands round what carries loss.
"""

from __future__ import annotations

import pytest

from tests.tiny_models import (
    CAT,
    assistant,
    marked,
    noise,
    renderer,
    row,
    runs,
    tiny,
    turn,
    user,
    with_template,
)
from vireo.data.render import Renderer
from vireo.data.template import ChatTemplate
from vireo.errors import InputError, RowError

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"

QWEN = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    f"<|im_start|>user\n{IMAGE}What is it?<|im_end|>\n"
    "<|im_start|>assistant\n«A cat.<|im_end|>»\n"
    "<|im_start|>user\nSure?<|im_end|>\n"
    "<|im_start|>assistant\n«Yes.<|im_end|>»\n"
)
MINICPM = (
    f"<|im_start|>user\n{IMAGE}\nWhat is it?<|im_end|>\n"
    "<|im_start|>assistant\n«A cat.<|im_end|>»\n"
    "<|im_start|>user\nSure?<|im_end|>\n"
    "<|im_start|>assistant\n«Yes.<|im_end|>»\n"
)
LLAMA = (
    f"<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{IMAGE}What is it?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«A cat.<|eot_id|>»"
    "<|start_header_id|>user<|end_header_id|>\n\nSure?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«Yes.<|eot_id|>»"
)
# The prompt ends with the colon, so the space before an answer is the model's to write: most
# tokenizers make one token of it and the answer's first word. The end-of-text token (here
# <|im_end|>) is training's own.
LLAVA = f"USER: {IMAGE}\nWhat is it? ASSISTANT:« A cat. »USER: Sure? ASSISTANT:« Yes. <|im_end|>»"
TEXT_ONLY = (
    "<|im_start|>user\nWhat is it?<|im_end|>\n"
    "<|im_start|>assistant\n«A cat.<|im_end|>»\n"
    "<|im_start|>user\nSure?<|im_end|>\n"
    "<|im_start|>assistant\n«Yes.<|im_end|>»\n"
)
LLAMA_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def cat(made: Renderer) -> str:
    images = [noise(84, 56)] if made.family.has_vision else []
    turns = CAT if images else (user("What is it?"), *CAT[1:])
    return marked(made, made.example(row(*turns, images=images)))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("name", [None, "qwen"])
def test_qwen_golden(family, name):
    assert cat(renderer(family, chat_template=name)) == QWEN


def test_minicpm_golden():
    assert cat(renderer("qwen2_5_vl", chat_template="minicpm")) == MINICPM


def test_llava_golden():
    assert cat(renderer("qwen2_5_vl", chat_template="llava")) == LLAVA


def test_llama_golden():
    folder = with_template("qwen2_5_vl", "unused", "llama", LLAMA_TOKENS)
    assert cat(Renderer(folder, chat_template="llama32v")) == LLAMA


def test_llama_vision_golden():
    wanted = LLAMA.replace(IMAGE, "<|image|>")
    assert cat(renderer("mllama")) == wanted
    assert cat(renderer("mllama", chat_template="llama32v")) == wanted


def test_llama_text_golden():
    wanted = LLAMA.replace(IMAGE, "")
    assert cat(renderer("llama")) == wanted
    assert cat(renderer("llama", chat_template="llama32v")) == wanted


def test_native_minicpm_golden():
    """The published checkpoints' own processor writes the image's place; a line end is in the named
    template only, as clients of the older ones write it."""
    wanted = MINICPM.replace(IMAGE, "<|image_pad|>")
    assert cat(renderer("minicpmv4_6", chat_template="minicpm")) == wanted
    assert cat(renderer("minicpmv4_6")) == wanted.replace("<|image_pad|>\n", "<|image_pad|>")


def test_text_model_golden():
    assert cat(renderer("qwen3")) == TEXT_ONLY
    assert cat(renderer("qwen3", chat_template="minicpm")) == TEXT_ONLY


def test_a_named_template_renders_a_system_turn():
    made = renderer("qwen3", chat_template="qwen")
    turns = turn("system", "Be brief."), user("Hi?"), assistant("Yes.")
    assert marked(made, made.example(row(*turns))) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi?<|im_end|>\n"
        "<|im_start|>assistant\n«Yes.<|im_end|>»\n"
    )
    made = renderer("qwen3", chat_template="llava")
    assert (
        marked(made, made.example(row(*turns)))
        == "Be brief. USER: Hi? ASSISTANT:« Yes. <|im_end|>»"
    )


@pytest.mark.parametrize("family", ["llama", "mllama"])
def test_llava_golden_with_a_tokenizer_that_starts_every_text(family):
    """As LLaVA's own does; one processor adds that token itself where it is missing."""
    made = renderer(family, chat_template="llava")
    image = "<|image|>\n" if made.family.has_vision else ""
    assert cat(made) == (
        f"<|begin_of_text|>USER: {image}What is it? ASSISTANT:« A cat. »"
        "USER: Sure? ASSISTANT:« Yes. <|eot_id|>»"
    )
    turns = turn("system", "Be brief."), user("Hi?"), assistant("<|begin_of_text|>")
    assert marked(made, made.example(row(*turns))) == (
        "<|begin_of_text|>Be brief. USER: Hi? ASSISTANT:« <|begin_of_text|> <|eot_id|>»"
    )


def test_llava_puts_a_turns_images_first():
    made = renderer("qwen2_vl", chat_template="llava")
    example = made.example(row(user("Is ", 0, " it?"), assistant("No."), images=[noise(28, 28)]))
    assert marked(made, example) == f"USER: {IMAGE}\nIs  it? ASSISTANT:« No. <|im_end|>»"


def test_an_answer_without_end_of_turn_token_gets_one_before_what_follows():
    made = renderer("qwen2_vl", chat_template="llava")
    turns = user("Hi?"), assistant("No."), user("<|im_end|> ", 0)
    example = made.example(row(*turns, images=[noise(28, 28)]))
    assert marked(made, example) == (
        f"USER: Hi? ASSISTANT:« No. <|im_end|>»USER: {IMAGE}\n<|im_end|>  "
    )


def test_an_image_in_an_answer_without_end_of_turn_token():
    """The letter `a` stands in the image's placeholder too: text search would end there."""
    made = renderer("qwen2_vl", chat_template="llava")
    turns = user("Hi?"), assistant("a", 0, "a")
    example = made.example(row(*turns, images=[noise(28, 28)]))
    assert marked(made, example) == f"USER: Hi? ASSISTANT:« »{IMAGE}«\naa <|im_end|>»"


@pytest.mark.parametrize("lacking", LLAMA_TOKENS)
def test_a_template_whose_control_tokens_the_tokenizer_lacks_is_refused(lacking):
    tokens = tuple(token for token in LLAMA_TOKENS if token != lacking)
    folder = with_template("qwen3", "unused", f"no{LLAMA_TOKENS.index(lacking)}", tokens)
    with pytest.raises(InputError, match="llama32v writes") as caught:
        Renderer(folder, chat_template="llama32v")
    assert f"writes {lacking}, which" in str(caught.value)


@pytest.mark.parametrize("name", ["qwen", "minicpm", "llava"])
def test_named_templates_refuse_tools(name):
    made = renderer("qwen3", chat_template=name)
    tools = ({"type": "function", "function": {"name": "look"}},)
    with pytest.raises(RowError, match="has no tools") as caught:
        made.example(row(user("Hi?"), assistant("Yes."), tools=tools))
    assert caught.value.reason == "template"
    call = turn("assistant", tool_calls=({"function": {"name": "look", "arguments": {}}},))
    with pytest.raises(RowError, match="has no tools"):
        made.example(row(user("Hi?"), call))


# -- any template --------------------------------------------------------------------------------


def chat_template(source: str, parts: bool = False) -> ChatTemplate:
    return ChatTemplate(source, renderer("qwen3").tokenizer, parts)


def spans(template: ChatTemplate, *turns) -> list[str]:
    text = template.render(turns)
    return [text[span] for span in template.answers(turns, (), text)]


PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + END }}{% endfor %}{{ OPEN }}"
OPEN = "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"


def plain(end: str, content: str = "m.content") -> ChatTemplate:
    source = PLAIN.replace("END", repr(end)).replace("{{ OPEN }}", OPEN)
    return chat_template(source.replace("m.content", content))


@pytest.mark.parametrize(
    ("end", "found"),
    [
        ("<|im_end|>", "<|im_end|>"),
        ("<|im_end|>\n", "<|im_end|>"),
        ("\n<|endoftext|>", "<|endoftext|>"),
        ("<|endoftext|><|im_end|>", "<|endoftext|>"),
        ("\n", None),
        (" END ", None),
    ],
)
def test_the_end_of_turn_token_is_the_first_one_after_an_answer(end, found):
    assert plain(end).end_of_turn == found


@pytest.mark.parametrize("end", ["<|im_end|>", " <|endoftext|>\n", "\n", "\n---\n"])
def test_an_answer_runs_from_the_prompts_end_to_the_end_of_its_turn(end):
    wanted = [text + end.rstrip("\n" if "|" in end else "") for text in ("yes", "no: yes")]
    turns = user("yes"), assistant("yes"), user("assistant: "), assistant("no: yes")
    assert spans(plain(end), *turns) == wanted


def test_two_answers_in_a_row_are_two_spans():
    assert spans(plain("<|im_end|>"), user("q"), assistant("one"), assistant("two")) == [
        "one<|im_end|>",
        "two<|im_end|>",
    ]


def test_a_template_may_trim_an_answer():
    template = plain("<|im_end|>", "(m.content | trim)")
    assert spans(template, user("q"), assistant("\n yes \n")) == ["yes<|im_end|>"]


def test_a_template_that_changes_an_answer_is_refused():
    template = plain("<|im_end|>", "(m.content | upper)")
    with pytest.raises(RowError, match="changes the answer in turn 4") as caught:
        spans(template, user("q"), assistant("YES"), user("q"), assistant("no"))
    assert caught.value.reason == "template"


def test_a_template_that_rewrites_what_stands_before_an_answer_is_refused():
    template = chat_template(
        "{{ messages | length }} turns\n"
        + PLAIN.replace("END", "'<|im_end|>'").replace("{{ OPEN }}", OPEN)
    )
    turns = user("q"), assistant("yes"), user("q"), assistant("no")
    with pytest.raises(RowError, match=r"rewrites what stands before turn 2.*one answer a row"):
        spans(template, *turns)


def test_a_template_that_joins_turns_without_a_token_between_is_refused():
    source = "{% for m in messages %}{{ m.content }}{{ '.' if loop.last }}{% endfor %}"
    template = chat_template(source + "{% if add_generation_prompt %}{% endif %}")
    with pytest.raises(RowError) as caught:
        spans(template, user("q"), assistant("yes"), user("q"), assistant("no"))
    assert caught.value.reason == "template"


def test_an_answer_with_nothing_before_it_is_refused():
    with pytest.raises(RowError, match="begins with an assistant turn") as caught:
        renderer("qwen3").example(row(assistant("yes"), user("q"), assistant("no")))
    assert caught.value.reason == "turn_order"


def test_a_template_that_fails_is_a_row_error_with_its_own_words():
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
    )
    source += "{% endif %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    with pytest.raises(RowError, match="cannot render it: no tools here"):
        spans(chat_template(source), user("q"), assistant("a"), turn("tool", "t"), assistant("b"))


def test_a_template_that_never_works_is_an_input_error():
    with pytest.raises(InputError, match="does not work"):
        chat_template("{{ raise_exception('nothing') }}")
    with pytest.raises(InputError, match="does not work"):
        chat_template("{% for m in messages %}")


def test_a_model_without_a_chat_template_is_an_input_error(tmp_path):
    made = renderer("qwen3")
    made.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="no chat template"):
        Renderer(tiny("qwen3"), str(tmp_path))


# -- tools, as the tiny checkpoints' own template writes them ------------------------------------

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOLS = ({"type": "function", "function": {"name": "weather", "description": "It knows."}},)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3"])
def test_a_tool_call_is_supervised_and_its_result_is_not(family):
    made = renderer(family)
    turns = (
        user("Is it cold?"),
        turn("assistant", "I look.", tool_calls=(CALL,)),
        turn("tool", '{"temp": 3}'),
        assistant("Yes."),
    )
    example = made.example(row(*turns, tools=TOOLS))
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert runs(made, example) == [f"I look.\n{call}<|im_end|>", "Yes.<|im_end|>"]
    assert "It knows." in marked(made, example)
    assert marked(made, example).endswith(
        "<|im_start|>user\nIs it cold?<|im_end|>\n"
        f"<|im_start|>assistant\n«I look.\n{call}<|im_end|>»\n"
        '<|im_start|>user\n<tool_response>\n{"temp": 3}\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n«Yes.<|im_end|>»\n"
    )


def test_a_tool_call_without_words_is_supervised():
    made = renderer("qwen2_5_vl")
    example = made.example(row(user("Cold?"), turn("assistant", tool_calls=(CALL,))))
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert runs(made, example) == [f"{call}<|im_end|>"]
