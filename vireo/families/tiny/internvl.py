"""A tiny InternVL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vireo.families.tiny.llava import text_config
from vireo.families.tiny.sizes import MAX_POSITIONS, override
from vireo.families.tiny.tokenizer import CHATML, make_tokenizer

NAMED = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
SIDE, PATCH = 56, 14  # pixels of a tile, which is 16 patches merged 4 to 1
TILES = 4  # most tiles of a picture; two and more have a small copy of it beside them

# As published: a line end behind an image.
TEMPLATE = r"""
{%- for message in messages %}
  {{- '<|im_start|>' + message.role + '\n' }}
  {%- if message.content is string %}
    {{- message.content }}
  {%- else %}
    {%- for part in message.content %}
      {%- if part.type == 'image' %}
        {{- '<IMG_CONTEXT>\n' }}
      {%- elif part.type == 'video' %}
        {{- '<video>\n' }}
      {%- elif part.type == 'text' %}
        {{- part.text }}
      {%- endif %}
    {%- endfor %}
  {%- endif %}
  {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\n' }}
{%- endif %}
""".strip()


def make(text: dict, text_changes: dict, vision: dict, vision_changes: dict) -> tuple[Any, Any]:
    """The config and the processor. A picture of 56x56 is one tile: 4 tokens between two more.

    `model_type` among the changes of the text gives it another language model.
    """
    from transformers import (
        GotOcr2ImageProcessor,
        InternVLConfig,
        InternVLProcessor,
        InternVLVideoProcessor,
        InternVLVisionConfig,
    )

    size = {"height": SIDE, "width": SIDE}
    tokens = replace(CHATML, special=(*CHATML.special, *NAMED.values()), named=NAMED)
    processor = InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(size=size, max_patches=TILES),
        video_processor=InternVLVideoProcessor(size=size),
        tokenizer=make_tokenizer(TEMPLATE, MAX_POSITIONS, tokens),
        chat_template=TEMPLATE,
        image_seq_length=4,
    )
    tower = {
        "image_size": [SIDE, SIDE],
        "patch_size": [PATCH, PATCH],
        "hidden_size": vision["hidden_size"],
        "intermediate_size": vision["intermediate_size"],
        "num_hidden_layers": vision["depth"],
        "num_attention_heads": vision["num_heads"],
        "initializer_range": vision["initializer_range"],
    }
    config = InternVLConfig(
        text_config=text_config("qwen2", text, text_changes, processor.tokenizer),
        vision_config=InternVLVisionConfig(**override(tower, vision_changes, InternVLVisionConfig)),
        image_token_id=processor.image_token_id,
        image_seq_length=4,
    )
    return config, processor
