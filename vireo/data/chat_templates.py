"""The chat templates that can be named, written for any family's images.

Four are values of `chat_template`; `none` is for prompts that are rendered already
(`apply_chat_template: false`). Each takes content as a string or as a list of parts.
`source(name, image)` fills in what the family's processor looks for where an image goes.
"""

from __future__ import annotations

from typing import Any

from vireo.errors import InputError

_PARTS = """
{%- macro say(content, image) -%}
  {%- if content is string -%}{{ content }}
  {%- else -%}
    {%- for part in content -%}
      {%- if part.type == 'text' -%}{{ part.text }}{%- else -%}{{ image }}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
"""

_TOOLS = """
{%- if tools or messages | selectattr('tool_calls', 'defined') | list -%}
  {{ raise_exception('this chat template has no tools') }}
{%- endif -%}
"""

_CHATML = """
{%- if messages[0].role != 'system' and SYSTEM -%}
  {{ '<|im_start|>system\\n' + SYSTEM + '<|im_end|>\\n' }}
{%- endif -%}
{%- for m in messages -%}
  {{ '<|im_start|>' + m.role + '\\n' + say(m.content, IMAGE) + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

_LLAMA = """
{{- '<|begin_of_text|>' -}}
{%- for m in messages -%}
  {{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
  {{- say(m.content, IMAGE) + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif -%}
"""

# LLaVA 1.5 puts a turn's images first, whatever their place in the text. The start of the text is
# its tokenizer's to write, not its template's.
_LLAVA = """
{{- START -}}
{%- for m in messages -%}
  {%- if m.role != 'system' -%}{{ m.role.upper() + ': ' }}{%- endif -%}
  {%- if m.content is not string -%}
    {%- for part in m.content if part.type != 'text' -%}{{ IMAGE + '\\n' }}{%- endfor -%}
  {%- endif -%}
  {{ say(m.content, '') + ' ' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}
"""

# What the turns say, one behind the other, and nothing else: no generation prompt. The tokenizer's
# own start of a text stands before it, once, as everywhere.
_NONE = """
{%- set said -%}
{%- for m in messages -%}{{ say(m.content, IMAGE) }}{%- endfor -%}
{%- endset -%}
{%- if not said.startswith(START) -%}{{ START }}{%- endif -%}
{{- said -}}
"""

_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_LLAMA_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
# name: (template, default system turn, text after an image, control tokens it writes)
_NAMED = {
    "qwen": (_CHATML, "You are a helpful assistant.", "", _CHATML_TOKENS),
    "minicpm": (_CHATML, "", "\n", _CHATML_TOKENS),
    "llama32v": (_LLAMA, "", "", _LLAMA_TOKENS),
    "llava": (_LLAVA, "", "", ()),
    "none": (_NONE, "", "", ()),
}


def source(name: str, image: str, tokenizer: Any) -> str:
    """The Jinja text of the named template; InputError if the tokenizer lacks its tokens."""
    template, system, after, tokens = _NAMED[name]
    known = tokenizer.get_vocab()
    if missing := [token for token in tokens if token not in known]:
        raise InputError(
            f"--chat_template {name} writes {', '.join(missing)}, which this model's tokenizer "
            f"lacks; leave the setting out to use the model's own template"
        )
    filled = template.replace("SYSTEM", repr(system)).replace("IMAGE", repr(image + after))
    filled = filled.replace("START", repr(_start(tokenizer)))
    return (_TOOLS + _PARTS + filled).replace("\n{", "{").strip()


def _start(tokenizer: Any) -> str:
    """The control token that the tokenizer puts before any text; empty if it puts none."""
    first = tokenizer.bos_token_id
    return tokenizer.bos_token if first in tokenizer("")["input_ids"][:1] else ""
