"""Every family's own template on a conversation with everything in it, against strings by hand.

In the strings, «» stands round what carries loss.
"""

from __future__ import annotations

import pytest

from tests.tiny_models import (
    STYLES,
    assistant,
    controls,
    marked,
    noise,
    renderer,
    row,
    runs,
    turn,
    user,
)
from vireo.families import FAMILIES

TOOLS = ({"type": "function", "function": {"name": "weather", "description": "It knows."}},)
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
SIGNATURE = '{"type": "function", "function": {"name": "weather", "description": "It knows."}}'

CHATML_TOOLS = f"""# Tools

These functions are at your service, one signature a line:
<tools>
{SIGNATURE}
</tools>

Call a function by writing its name and its arguments as JSON:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""
CHATML = f"""<|im_start|>system
Be brief.

{CHATML_TOOLS}<|im_end|>
<|im_start|>user
Look IMAGE: is it cold?<|im_end|>
<|im_start|>assistant
«I look.
<tool_call>
{{"name": "weather", "arguments": {{"city": "Oslo"}}}}
</tool_call><|im_end|>»
<|im_start|>user
<tool_response>
3
</tool_response><|im_end|>
<|im_start|>assistant
«Yes.<|im_end|>»
<|im_start|>user
Sure?<|im_end|>
<|im_start|>assistant
«Sure.<|im_end|>»
"""

LLAMA_TOOLS = f"""Environment: ipython

These functions are at your service, one signature a line:
{SIGNATURE}

Call a function by answering with nothing but its name and its arguments as JSON:
{{"name": "...", "parameters": {{...}}}}"""
LLAMA = f"""<|begin_of_text|><|start_header_id|>system<|end_header_id|>

Be brief.

{LLAMA_TOOLS}<|eot_id|><|start_header_id|>user<|end_header_id|>

Look IMAGE: is it cold?<|eot_id|><|start_header_id|>assistant<|end_header_id|>

«I look.{{"name": "weather", "parameters": {{"city": "Oslo"}}}}<|eot_id|>»\
<|start_header_id|>ipython<|end_header_id|>

3<|eot_id|><|start_header_id|>assistant<|end_header_id|>

«Yes.<|eot_id|>»<|start_header_id|>user<|end_header_id|>

Sure?<|eot_id|><|start_header_id|>assistant<|end_header_id|>

«Sure.<|eot_id|>»"""

VISION = "<|vision_start|><|image_pad|><|vision_end|>"
OWN = {
    "qwen2_vl": (CHATML, VISION, "You are a helpful assistant.\n\n"),
    "qwen2_5_vl": (CHATML, VISION, "You are a helpful assistant.\n\n"),
    "qwen3": (CHATML, "", ""),
    "minicpmv4_6": (CHATML, "<|image_pad|>", ""),
    "llama": (LLAMA, "", ""),
    "mllama": (LLAMA, "<|image|>", ""),
}
# The others, whose published templates have no tools, are in `test_llava_families` and
# `test_tile_families`.
STYLED = [name for name in FAMILIES if name in STYLES]
TURNS = (
    turn("assistant", "I look.", tool_calls=(CALL,)),
    turn("tool", "3"),
    assistant("Yes."),
    user("Sure?"),
    assistant("Sure."),
)


@pytest.mark.parametrize("family", STYLED)
def test_system_turn_image_tools_call_and_result(family):
    made = renderer(family)
    wanted, image, default = OWN[family]
    pictures = [noise(56, 28)] if image else []
    asked = user("Look ", *range(len(pictures)), ": is it cold?")
    example = made.example(
        row(turn("system", "Be brief."), asked, *TURNS, images=pictures, tools=TOOLS)
    )
    assert marked(made, example) == wanted.replace("IMAGE", image)
    bare = made.example(row(asked, *TURNS, images=pictures, tools=TOOLS))
    assert marked(made, bare) == wanted.replace("IMAGE", image).replace("Be brief.\n\n", default)


PLACEHOLDERS = ["<image>", "<|image_pad|>", "<|image|>", VISION, "(<image>./</image>)", "<slice>"]


@pytest.mark.parametrize("typed", PLACEHOLDERS)
@pytest.mark.parametrize("family", STYLED)
def test_a_typed_placeholder_stays_text_in_every_role(family, typed):
    """And makes no slot beside a real image, in texts, names of arguments, and tools."""
    made, style = renderer(family), STYLES[family]
    text = f"a {typed} b"
    call = {"function": {"name": "look", "arguments": {text: text}}}
    tools = ({"type": "function", "function": {"name": "look", "description": text}},)
    pictures = [noise(28, 28)] if made.family.has_vision else []
    turns = (
        turn("system", text),
        user(text, *range(len(pictures)), text),
        turn("assistant", tool_calls=(call,)),
        turn("tool", text),
        assistant(text),
    )
    example = made.example(row(*turns, images=pictures, tools=tools))
    called, answered = runs(made, example)
    assert called.count(f'"{text}": "{text}"') == 1
    assert answered == text + style.end
    plain = marked(made, example).replace("«", "").replace("»", "")
    assert plain.count(text) == 8  # twice in the question and in the call
    seen = controls(made, example)
    assert all(seen.get(token, 0) == len(pictures) for token in style.slot)
    assert {seen[token] for token in style.turn} == {len(turns)}
    if "<|image_pad|>" in seen:
        grid = example.fields.get("image_grid_thw", example.fields.get("target_sizes"))
        merged = 4 if "image_grid_thw" in example.fields else 16
        assert seen["<|image_pad|>"] == int(grid.prod(-1).sum()) // merged


OWN |= {
    "qwen3_moe": (CHATML, "", ""),
    "qwen3_vl": (CHATML, VISION, ""),
    "qwen3_vl_moe": (CHATML, VISION, ""),
}


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
def test_the_golden_string_of_qwen3_vl_has_no_system_turn(family):
    turns = user(0, "What is it?"), assistant("A cat."), user("Sure?"), assistant("Yes.")
    example = renderer(family).example(row(*turns, images=[noise(56, 28)]))
    assert marked(renderer(family), example) == (
        f"<|im_start|>user\n{VISION}What is it?<|im_end|>\n"
        "<|im_start|>assistant\n«A cat.<|im_end|>»\n"
        "<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\n«Yes.<|im_end|>»\n"
    )
