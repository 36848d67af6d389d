"""Chat templates of the tiny checkpoints: ChatML as the Qwen models speak it, and Llama 3's.

The loop over `message.content` stands in the open, not in a macro: serving engines read the
template's syntax tree to learn whether it takes a list of content parts.
"""

from __future__ import annotations

import json

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"

_PART = """
      {{%- elif part.type in ['{kind}', '{kind}_url'] %}}
        {{{{- '{text}' }}}}"""

_CONTENT = r"""
  {%- if message.content is string %}
    {{- message.content }}
  {%- elif message.content %}
    {%- for part in message.content %}
      {%- if part.type == 'text' %}
        {{- part.text }}VISION_PARTS
      {%- else %}
        {{- raise_exception('this chat template has no content part of type ' ~ part.type) }}
      {%- endif %}
    {%- endfor %}
  {%- endif %}
"""

_CHATML = r"""
{%- macro tool_list() %}
  {{- '# Tools\n\nThese functions are at your service, one signature a line:\n<tools>' }}
  {%- for tool in tools %}
    {{- '\n' + (tool | tojson) }}
  {%- endfor %}
  {{- '\n</tools>\n\nCall a function by writing its name and its arguments as JSON:\n' }}
  {{- '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>' }}
{%- endmacro %}

{%- set default_system = DEFAULT_SYSTEM %}
{%- if messages[0].role != 'system' and (default_system or tools) %}
  {{- '<|im_start|>system\n' + default_system }}
  {%- if tools %}
    {{- ('\n\n' if default_system else '') + tool_list() }}
  {%- endif %}
  {{- '<|im_end|>\n' }}
{%- endif %}

{%- for message in messages %}
  {%- if message.role != 'tool' %}
    {{- '<|im_start|>' + message.role + '\n' }}
  {%- else %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
      {{- '<|im_start|>user' }}
    {%- endif %}
    {{- '\n<tool_response>\n' }}
  {%- endif %}
CONTENT
  {%- for call in message.tool_calls or [] %}
    {%- set function = call.function or call %}
    {{- '\n' if message.content or not loop.first }}
    {{- '<tool_call>\n{"name": ' + (function.name | tojson) + ', "arguments": ' }}
    {%- if function.arguments is string %}
      {{- function.arguments }}
    {%- else %}
      {{- function.arguments | tojson }}
    {%- endif %}
    {{- '}\n</tool_call>' }}
  {%- endfor %}

  {%- if message.role != 'tool' %}
    {{- '\n\n' + tool_list() if message.role == 'system' and loop.first and tools }}
    {{- '<|im_end|>\n' }}
  {%- else %}
    {{- '\n</tool_response>' }}
    {{- '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
  {%- endif %}
{%- endfor %}

{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""


# One call a turn, as a bare JSON object; results come back in a turn of the role `ipython`.
_LLAMA = r"""
{%- macro tool_list() %}
  {{- 'Environment: ipython\n\nThese functions are at your service, one signature a line:\n' }}
  {%- for tool in tools %}
    {{- (tool | tojson) + '\n' }}
  {%- endfor %}
  {{- '\nCall a function by answering with nothing but its name and its arguments as JSON:\n' }}
  {{- '{"name": "...", "parameters": {...}}' }}
{%- endmacro %}

{{- '<|begin_of_text|>' }}
{%- if messages[0].role != 'system' and tools %}
  {{- '<|start_header_id|>system<|end_header_id|>\n\n' + tool_list() + '<|eot_id|>' }}
{%- endif %}

{%- for message in messages %}
  {%- set role = 'ipython' if message.role == 'tool' else message.role %}
  {{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
CONTENT
  {%- if message.tool_calls | default([], true) | length > 1 %}
    {{- raise_exception('this chat template has one tool call a turn') }}
  {%- endif %}
  {%- for call in message.tool_calls or [] %}
    {%- set function = call.function or call %}
    {{- '{"name": ' + (function.name | tojson) + ', "parameters": ' }}
    {%- if function.arguments is string %}
      {{- function.arguments }}
    {%- else %}
      {{- function.arguments | tojson }}
    {%- endif %}
    {{- '}' }}
  {%- endfor %}
  {{- '\n\n' + tool_list() if message.role == 'system' and loop.first and tools }}
  {{- '<|eot_id|>' }}
{%- endfor %}

{%- if add_generation_prompt %}
  {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""


def chatml(
    *, default_system: str = "", vision: bool = False, image: str = IMAGE, video: str = VIDEO
) -> str:
    """The Jinja source: a default system turn unless empty, image and video parts if `vision`.

    Tool lists, calls and results are written as the Hermes format has them (`<tools>`,
    `<tool_call>`, `<tool_response>`). A part that the model cannot take is refused.
    """
    parts = {"image": image, "video": video} if vision else {}
    return _fill(_CHATML.replace("DEFAULT_SYSTEM", json.dumps(default_system)), parts)


def llama(*, image: str | None = None) -> str:
    """The Jinja source, with image parts if `image` is given: what stands in their place."""
    return _fill(_LLAMA, {"image": image} if image is not None else {})


def _fill(source: str, parts: dict[str, str]) -> str:
    """`source` with the loop over content, which takes the `parts` of these types and text."""
    known = "".join(_PART.format(kind=kind, text=text) for kind, text in parts.items())
    return source.replace("CONTENT", _CONTENT.replace("VISION_PARTS", known)).strip()
