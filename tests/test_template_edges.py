"""Chat templates that end, open, merge or index turns in ways of their own, and broken ones."""

from __future__ import annotations

import pytest

from tests.test_templates import OPEN, chat_template, spans
from tests.tiny_models import assistant, marked, renderer, row, tiny, turn, user, with_template
from vireo.data.render import Renderer
from vireo.errors import InputError, RowError


def made(source: str, name: str, family: str = "qwen3") -> Renderer:
    return Renderer(with_template(family, source, f"edge-{name}"))


def text_of(renderer_: Renderer, *turns, **options) -> str:
    return marked(renderer_, renderer_.example(row(*turns, **options)))


def loop(body: str, prompt: str = "assistant: ") -> str:
    """A template that writes `body` for each message `m`."""
    end = "{% endfor %}{% if add_generation_prompt %}{{ '" + prompt + "' }}{% endif %}"
    return "{% for m in messages %}" + body + end


SAYS = "{{ m.role + ': ' + m.content }}"
FOUR = user("q"), assistant("one"), user("r"), assistant("two")


# -- where a turn ends ---------------------------------------------------------------------------


def test_a_token_between_turns_ends_every_answer():
    """The last one gets it from training: the model would not learn to stop otherwise."""
    source = loop("{{ '<|endoftext|>' if not loop.first }}" + SAYS, "<|endoftext|>assistant: ")
    assert text_of(made(source, "between"), *FOUR) == (
        "user: q<|endoftext|>assistant: «one<|endoftext|>»"
        "user: r<|endoftext|>assistant: «two<|endoftext|>»"
    )
    source = loop(SAYS + "{{ '<|endoftext|>' if m.role == 'assistant' and not loop.last }}")
    one = made(source, "after")
    assert one.template.end_of_turn == "<|endoftext|>"
    assert text_of(one, *FOUR) == (
        "user: qassistant: «one<|endoftext|>»user: rassistant: «two<|endoftext|>»"
    )
    assert text_of(one, *FOUR[:3]) == "user: qassistant: «one<|endoftext|>»user: r"


def test_a_token_that_opens_every_turn_ends_none():
    one = made(loop("{{ '<|im_start|>' }}" + SAYS, "<|im_start|>assistant: "), "opens")
    assert one.template.end_of_turn is None
    start = "<|im_start|>"
    assert text_of(one, *FOUR) == (
        f"{start}user: q{start}assistant: «one»{start}user: r{start}assistant: «two<|im_end|>»"
    )


def test_words_between_an_answer_and_its_token_belong_to_the_answer():
    one = made(loop(SAYS + "{{ ' (over)<|im_end|>' }}"), "over")
    assert text_of(one, *FOUR[:3]) == (
        "user: q (over)<|im_end|>assistant: «one (over)<|im_end|>»user: r (over)<|im_end|>"
    )


def test_another_token_at_the_rows_end_than_between_turns_is_refused_where_turns_follow():
    """Its search would run into the next answer, and teach the question."""
    source = loop(
        SAYS + "{{ '<|endoftext|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}"
    )
    one = made(source, "last")
    assert text_of(one, *FOUR[:2]) == "user: q<|im_end|>assistant: «one<|endoftext|>»"
    for turns in (FOUR, FOUR[:3]):
        with pytest.raises(RowError, match=r"ends turn 2 in another way.*one answer a row"):
            one.example(row(*turns))


def test_a_turn_that_ends_with_a_token_of_its_own_reaches_no_further():
    """As some templates end a tool call."""
    source = loop(SAYS + "{{ '<|endoftext|>' if 'call' in m.content else '<|im_end|>' }}")
    one = made(source, "own-end")
    turns = user("q"), assistant("call"), turn("tool", "3"), assistant("two")
    assert text_of(one, *turns) == (
        "user: q<|im_end|>assistant: «call<|endoftext|>»tool: 3<|im_end|>assistant: «two<|im_end|>»"
    )


# -- how turns are merged, opened and indexed ----------------------------------------------------

MERGED = """
{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' -%}
{%- for m in messages if m.role != 'system' -%}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{ raise_exception('roles must alternate') }}
  {%- endif -%}
  {{ '<|im_start|>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
  {{- (system if loop.first) ~ (m.content | trim) + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>model\\n' }}{%- endif -%}
"""


def test_a_system_turn_may_be_merged_into_the_first_question():
    one = made(MERGED, "merged")
    assert text_of(one, turn("system", "Be brief."), user(" q "), assistant(" yes\n")) == (
        "<|im_start|>user\nBe brief.\n\nq<|im_end|>\n<|im_start|>model\n«yes<|im_end|>»\n"
    )
    with pytest.raises(RowError, match="cannot render it: roles must alternate") as caught:
        one.example(row(user("q"), user("r"), assistant("yes")))
    assert caught.value.reason == "template"


def test_marks_for_generation_change_nothing():
    said = "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    body = "{{ m.role + ': ' }}{% if m.role == 'assistant' %}" + said + "{% else %}"
    one = made(loop(body + "{{ m.content + '<|im_end|>' }}{% endif %}"), "generation")
    assert text_of(one, *FOUR[:2]) == "user: q<|im_end|>assistant: «one<|im_end|>»"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages | selectattr('role', 'in', ['user', 'assistant']) %}"
        "{{ m['role'] + ': ' + m['content'] + '<|im_end|>' }}{% endfor %}" + OPEN,
        "{% set first, rest = messages[0], messages[1:] %}{{ first.role + ': ' + first.content }}"
        "{% for m in rest %}{{ '<|im_end|>' ~ m.role ~ ': ' ~ m.content }}"
        "{% endfor %}{{ '<|im_end|>' }}" + OPEN,
        "{% for m in messages %}{{ m.role ~ ': ' ~ m.content }}"
        "{{ '<|im_end|>' if loop.nextitem is defined or loop.last }}"
        "{% if loop.last and m.role == 'user' and not add_generation_prompt %}{% endif %}"
        "{% endfor %}" + OPEN,
    ],
    ids=["filter", "slice", "next item"],
)
def test_templates_that_index_messages(source):
    assert spans(chat_template(source), *FOUR) == ["one<|im_end|>", "two<|im_end|>"]


def test_a_template_that_counts_turns_is_refused_with_both_sides():
    source = loop(SAYS + "{{ '<|im_end|>' }}").replace(SAYS, "{{ loop.revindex }}" + SAYS)
    with pytest.raises(RowError, match=r"before turn 2 \(its prompt goes on with '1user: q") as e:
        made(source, "counts").example(row(*FOUR[:2]))
    assert "the row with '2user: q" in str(e.value)


# -- templates that fail -------------------------------------------------------------------------

BROKEN = {
    "syntax": ("{% for m in messages %}", "Unexpected end of template"),
    "raise": ("{{ raise_exception('not\nthis') }}", "does not work: .*not this"),
    "zero": ("{{ 1 // 0 }}", "ZeroDivisionError"),
    "undefined": ("{{ messages[0].nothing.here }}", "no attribute 'nothing'"),
    "endless": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "huge": ("{% for i in range(10000000) %}{% endfor %}", "Range too big"),
    "unsafe": ("{{ messages.clear() }}", "unsafe"),
    "file": ("{% include 'x' %}", "no loader"),
    "filter": ("{{ messages | nothing }}", "No filter named"),
    "types": ("{{ messages + 'x' }}", "TypeError"),
    "deaf": ("{% for m in messages %}{{ m.role }}{% endfor %}", "leaves out what the assistant"),
    "loud": ("{% for m in messages %}{{ m.content | lower }}{% endfor %}", "leaves out what"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_template_is_one_input_error(name):
    source, words = BROKEN[name]
    with pytest.raises(InputError, match=words) as caught:
        chat_template(source)
    assert not isinstance(caught.value, RowError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["zero", "undefined", "endless", "types"])
def test_a_template_that_breaks_in_a_row_names_the_row(name):
    source, words = BROKEN[name]
    body = "{% if m.role == 'tool' %}" + source + "{% endif %}" + SAYS + "{{ '<|im_end|>' }}"
    one = made(loop(body), f"broken-{name}")
    turns = user("q"), assistant("a"), turn("tool", "t"), assistant("b")
    with pytest.raises(RowError, match=f"^data row 3: .*{words}") as caught:
        one.example(row(*turns, where="data row 3"))
    assert caught.value.reason == "template"


def test_a_template_of_text_alone_is_refused_for_a_model_that_sees():
    for content in ("m.content | string", "m.content | tojson"):
        source = loop("{{ m.role + ': ' + (" + content + ") + '<|im_end|>' }}")
        with pytest.raises(InputError, match=r"takes no images.*--chat_template"):
            made(source, f"blind-{content[-4:]}", "qwen2_5_vl")


def test_a_start_that_only_the_processor_writes_is_refused_at_once():
    body = "{{ m.role + ': ' }}{% for p in m.content %}{{ p.text or '<|image|>' }}{% endfor %}"
    body += "{{ '<|eot_id|>' }}"
    with pytest.raises(InputError, match=r"'user: .*as '(<\|begin_of_text\|>){2}user: .*write"):
        made(loop(body), "no-start", "mllama")
    one = made("{{ bos_token }}" + loop(body), "start", "mllama")
    assert text_of(one, *FOUR[:2]) == (
        "<|begin_of_text|>user: q<|eot_id|>assistant: «one<|eot_id|>»"
    )


def test_answers_that_nothing_could_end_are_refused(tmp_path):
    tokenizer = renderer("qwen3").tokenizer.__class__.from_pretrained(tiny("qwen3"))
    tokenizer.eos_token = None
    tokenizer.chat_template = loop(SAYS)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="ends an answer"):
        Renderer(tiny("qwen3"), str(tmp_path))


@pytest.mark.parametrize(("in_rows", "in_prompts"), [("", " "), ("", "\\n"), (" ", "\\n")])
def test_rows_open_answers_as_prompts_do_whatever_the_white_space(in_rows, in_prompts):
    """Also where one opening is a part of the other."""
    body = "{{ '<|im_start|>' + m.role + '" + in_rows + "' + m.content + '<|im_end|>' }}"
    opening = "<|im_start|>assistant" + in_prompts
    one = made(loop(body, opening), f"space-{len(in_rows)}-{len(in_prompts)}")
    prompt, _ = one.prompt(row(*FOUR))
    text = one.tokenizer.decode(prompt.fields["input_ids"])
    assert text.endswith(opening.replace("\\n", "\n"))
    assert text_of(one, *FOUR).endswith(f"{opening}«two<|im_end|>»".replace("\\n", "\n"))
    assert text_of(one, *FOUR).replace("«", "").replace("»", "").startswith(text)
