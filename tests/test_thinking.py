"""Thoughts, names and tool calls of turns: what reaches the template, and what of it carries loss.

In the strings, «» stands round what carries loss.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.tiny_models import (
    assistant,
    controls,
    marked,
    renderer,
    row,
    runs,
    turn,
    user,
    with_template,
)
from vireo.data.conversation import Turn
from vireo.data.render import Renderer
from vireo.errors import RowError

# As templates of thinking models do: an answer has thoughts, given apart or in its text, only
# behind the last question; the last turn always has them, if empty ones.
THINKING = """
{%- for m in messages %}
  {{- '<|im_start|>' + m.role + '\\n' }}
  {%- if m.role == 'assistant' %}
    {%- set thoughts, said = m.reasoning_content or '', m.content %}
    {%- if not thoughts and '</think>' in said %}
      {%- set thoughts = said.split('</think>')[0].split('<think>')[-1] %}
      {%- set said = said.split('</think>')[-1] %}
    {%- endif %}
    {%- if not messages[loop.index0:] | selectattr('role', 'eq', 'user') | list
           and (loop.last or thoughts) %}
      {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- said.lstrip('\\n') }}
    {%- for call in m.tool_calls or [] %}
      {{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
    {%- endfor %}
  {%- else %}
    {{- m.content }}
  {%- endif %}
  {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\nOPENED' }}{% endif %}
"""


@cache
def thinking(opened: str) -> Renderer:
    """With a template as above, whose prompt goes on with `opened`."""
    source = THINKING.replace("OPENED", opened.replace("\n", "\\n"))
    return Renderer(with_template("qwen3", source, f"thinking{len(opened)}"))


def thought(thoughts: str, said: str = "", **options) -> Turn:
    return turn("assistant", *([said] if said else []), reasoning_content=thoughts, **options)


def said(made: Renderer, *turns: Turn, **options) -> str:
    return marked(made, made.example(row(*turns, **options)))


def refusal(made: Renderer, *turns: Turn) -> RowError:
    with pytest.raises(RowError) as caught:
        made.example(row(*turns))
    return caught.value


Q, A = "<|im_start|>user\nq<|im_end|>\n", "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "answer",
    [
        thought("hm", "yes"),
        thought("\nhm\n", "yes"),
        assistant("<think>\nhm\n</think>\n\nyes"),
        assistant("<think>hm</think>yes"),
        assistant("<think>hm</think>\n", "yes"),
    ],
    ids=["apart", "trimmed", "in the text", "in the text, tight", "in two parts"],
)
def test_thoughts_of_the_last_answer_carry_loss(answer):
    wanted = f"{Q}{A}«<think>\nhm\n</think>\n\nyes<|im_end|>»\n"
    assert said(thinking(""), user("q"), answer) == wanted


def test_thoughts_that_the_prompt_opens_carry_loss_behind_it():
    made = thinking("<think>\n")
    text = said(made, user("q"), assistant("no"), user("q"), thought("hm", "yes"))
    # The earlier answer stands without its thought, so it begins where that would open.
    last = f"{A}<think>\n«hm\n</think>\n\nyes<|im_end|>»\n"
    assert text == f"{Q}{A}«no<|im_end|>»\n{Q}{last}"
    prompt, _ = made.prompt(row(user("q"), assistant("no"), user("q"), assistant("yes")))
    assert marked(made, prompt) == f"{Q}{A}no<|im_end|>\n{Q}{A}<think>\n"


def test_an_answer_without_thoughts_is_as_the_template_writes_it():
    text = said(thinking(""), user("q"), assistant("no"), user("q"), assistant("yes"))
    last = f"{A}«<think>\n\n</think>\n\nyes<|im_end|>»\n"
    assert text == f"{Q}{A}«no<|im_end|>»\n{Q}{last}"
    assert said(thinking(""), user("q"), assistant("no"), user("q")) == f"{Q}{A}«no<|im_end|>»\n{Q}"


CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "Oslo"}}}
WRITTEN = '<tool_call>{"name": "look", "arguments": {"at": "Oslo"}}</tool_call>'


def test_thoughts_before_a_tool_call_stay_as_long_as_no_question_follows():
    turns = user("q"), thought("look?", tool_calls=(CALL,)), turn("tool", "3"), thought("hm", "yes")
    assert said(thinking(""), *turns) == (
        f"{Q}{A}«<think>\nlook?\n</think>\n\n{WRITTEN}<|im_end|>»\n"
        f"<|im_start|>tool\n3<|im_end|>\n{A}«<think>\nhm\n</think>\n\nyes<|im_end|>»\n"
    )
    plain = user("q"), turn("assistant", tool_calls=(CALL,)), turn("tool", "3"), assistant("yes")
    assert said(thinking(""), *plain).startswith(f"{Q}{A}«{WRITTEN}<|im_end|>»\n")


def test_an_answer_of_thoughts_alone_is_supervised():
    assert said(thinking(""), user("q"), thought("hm")) == (
        f"{Q}{A}«<think>\nhm\n</think>\n\n<|im_end|>»\n"
    )


@pytest.mark.parametrize(
    "answer", [thought("hm", "yes"), assistant("<think>hm</think>yes"), thought("yes", "yes")]
)
@pytest.mark.parametrize("opened", ["", "<think>\n"])
def test_thoughts_that_the_template_leaves_out_are_refused_by_turn(answer, opened):
    """What was thought before an answer belongs to it: without it, another answer is taught."""
    error = refusal(thinking(opened), user("q"), answer, user("q"), thought("hm", "no"))
    assert error.reason == "template"
    assert "leaves out thoughts of turn 2" in error.message
    assert "end with that turn, or take the thoughts out" in error.message


def test_a_template_without_thoughts_refuses_them():
    error = refusal(renderer("qwen3"), user("q"), thought("hm", "yes"))
    assert error.reason == "template"
    assert "turn 2" in error.message
    assert "take them out" in error.message


def test_a_last_answer_without_the_thought_that_the_prompt_opens_is_refused():
    """Else the model would be trained on what no generation begins with."""
    source = THINKING.replace("(loop.last or thoughts)", "thoughts").replace("OPENED", "<think>\\n")
    made = Renderer(with_template("qwen3", source, "opens-always"))
    error = refusal(made, user("q"), assistant("yes"))
    assert "turn 2 (its prompt goes on with '<think>\\n', the row with 'yes<|im_end|>" in str(error)


def test_another_answer_right_behind_an_empty_thought_is_refused():
    """The first one would have an empty thought at a row's end, and has none before another."""
    error = refusal(thinking(""), user("q"), assistant("one"), assistant("two"))
    assert "rewrites what stands before turn 3" in error.message


# -- what a person typed in them stays text ------------------------------------------------------

TYPED = "<|im_end|>a <|im_start|>"
BAD_CALL = {"function": {"name": "look", "arguments": {TYPED: [TYPED, {"a": TYPED}]}}}


def test_control_tokens_in_thoughts_calls_and_tools_stay_text():
    made = renderer("qwen3")
    tools = ({"type": "function", "function": {"name": "look", "description": TYPED}},)
    turns = user(TYPED), turn("assistant", TYPED, tool_calls=(BAD_CALL,))
    example = made.example(row(*turns, tools=tools))
    call = f'{{"name": "look", "arguments": {{"{TYPED}": ["{TYPED}", {{"a": "{TYPED}"}}]}}}}'
    assert runs(made, example) == [f"{TYPED}\n<tool_call>\n{call}\n</tool_call><|im_end|>"]
    assert controls(made, example) == {"<|im_start|>": 3, "<|im_end|>": 3}
    made = thinking("")
    example = made.example(row(user("q"), thought(TYPED, "yes")))
    assert runs(made, example) == [f"<think>\n{TYPED}\n</think>\n\nyes<|im_end|>"]
    assert controls(made, example) == {"<|im_start|>": 2, "<|im_end|>": 2}


def test_control_tokens_in_names_and_ids_stay_text():
    source = (
        "{% for m in messages %}{{ m.role + ' ' + (m.name or '') + (m.tool_call_id or '-') + ': '"
        " + m.content + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ 'assistant -: ' }}{% endif %}"
    )
    made = Renderer(with_template("qwen3", source, "names"))
    turns = turn("user", "q", name=TYPED), assistant("a"), turn("tool", "t", tool_call_id=TYPED)
    example = made.example(row(*turns, assistant("b")))
    text = f"user {TYPED}-: q<|im_end|>assistant -: «a<|im_end|>»tool {TYPED}: t<|im_end|>"
    assert marked(made, example) == text + "assistant -: «b<|im_end|>»"
    assert controls(made, example) == {"<|im_end|>": 4}


def test_the_order_of_a_template_does_not_matter_to_what_was_typed():
    """Each typed token goes back to where its own text went."""
    source = (
        "{% for m in messages %}{{ m.role + ': ' + (m.tool_calls[0].name if m.tool_calls else '')"
        " + m.content + (m.name or '') + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    made = Renderer(with_template("qwen3", source, "calls-first"))
    call = {"name": "<|endoftext|>", "arguments": {}}
    turns = turn("user", "<|im_start|>", name="<|im_end|>"), assistant("x")
    last = turn("assistant", "<|im_end|>", tool_calls=(call,))
    example = made.example(row(*turns, user("q"), last))
    assert marked(made, example) == (
        "user: <|im_start|><|im_end|><|im_end|>assistant: «x<|im_end|>»user: q<|im_end|>"
        "assistant: «<|endoftext|><|im_end|><|im_end|>»"
    )
    assert controls(made, example) == {"<|im_end|>": 4}


@pytest.mark.parametrize(
    "written", ["{{ m.tool_calls | string }}", "{{ m.tool_calls | length * 'look' }}"]
)
def test_a_typed_token_that_a_template_does_not_keep_is_refused(written):
    """As Python's way to print a list, which escapes rare characters."""
    source = (
        "{% for m in messages %}{{ m.role + m.content }}{% if m.tool_calls %}"
        + written
        + "{% endif %}"
        "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}"
    )
    made = Renderer(with_template("qwen3", source, f"escapes{len(written)}"))
    error = refusal(made, user("q"), turn("assistant", "a", tool_calls=(BAD_CALL,)))
    assert error.reason == "reserved_token"
    assert "<|im_" in error.message
    call = {"function": {"name": "look", "arguments": {}}}
    assert runs(made, made.example(row(user("q"), turn("assistant", "a", tool_calls=(call,)))))


# -- what a template leaves out ------------------------------------------------------------------


def test_a_template_that_leaves_out_calls_tools_or_turns_is_refused():
    source = (
        "{% for m in messages if m.role != 'system' %}{{ m.role + m.content + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}"
    )
    made = Renderer(with_template("qwen3", source, "deaf"))
    call = {"function": {"name": "look", "arguments": {}}}
    error = refusal(made, user("q"), turn("assistant", "a", tool_calls=(call,)))
    assert error.reason == "tool_calls"
    assert "leaves out the tool call 'look' of turn 2" in error.message
    with pytest.raises(RowError, match="leaves out the tool 'look'") as caught:
        made.example(row(user("q"), assistant("a"), tools=(call,)))
    assert caught.value.reason == "tool_calls"
    error = refusal(made, turn("system", "Be brief."), user("q"), assistant("a"))
    assert error.reason == "template"
    assert "what turn 1 (system) says" in error.message
    assert torch.is_tensor(made.example(row(user("q"), assistant("a"))).fields["labels"])
