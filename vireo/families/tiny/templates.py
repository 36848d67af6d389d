"""Chat templates of the tiny checkpoints: ChatML as the Qwen models speak it.

The loop over `message.content` stands in the open, not in a macro: serving engines read the
template's syntax tree to learn whether it takes a list of content parts.
"""

from __future__ import annotations

import json

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"

_VISION_PARTS = f"""
      {{%- elif part.type in ['image', 'image_url'] %}}
        {{{{- '{IMAGE}' }}}}
      {{%- elif part.type in ['video', 'video_url'] %}}
        {{{{- '{VIDEO}' }}}}"""

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


def chatml(*, default_system: str = "", vision: bool = False) -> str:
    """The Jinja source: a default system turn unless empty, image and video parts if `vision`.

    Tool lists, calls and results are written as the Hermes format has them (`<tools>`,
    `<tool_call>`, `<tool_response>`). A part that the model cannot take is refused.
    """
    source = _CHATML.replace("DEFAULT_SYSTEM", json.dumps(default_system))
    return source.replace("VISION_PARTS", _VISION_PARTS if vision else "").strip()
