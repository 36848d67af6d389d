"""A tiny LLaVA-OneVision."""

from __future__ import annotations

from typing import Any

from vireo.families.tiny.llava import IMAGE, SIDE, text_config, tower_config
from vireo.families.tiny.sizes import MAX_POSITIONS
from vireo.families.tiny.tokenizer import Tokens, make_tokenizer

VIDEO = "<video>"
TOKENS = Tokens(
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", IMAGE, VIDEO),
    end_of_turn="<|im_end|>",
    end_of_text="<|endoftext|>",
    named={"image_token": IMAGE, "video_token": VIDEO},
)
# Heights and widths that the crops of a picture may have together, as published for 384 and 6.
GRIDS = [[SIDE * rows, SIDE * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]
MOST = "anyres_max_4"  # crops whose patches are all kept; those of more are scaled down

# As published: images first, a line end before every text, and a space behind the role that the
# prompt for an answer leaves out.
TEMPLATE = r"""
{%- for message in messages %}
  {{- '<|im_start|>' + message.role + ' ' }}
  {%- if message.content is string %}
    {{- '\n' + message.content }}
  {%- else %}
    {%- for part in message.content if part.type == 'image' %}
      {{- '<image>' }}
    {%- endfor %}
    {%- for part in message.content if part.type == 'video' %}
      {{- '<video>' }}
    {%- endfor %}
    {%- for part in message.content if part.type == 'text' %}
      {{- '\n' + part.text }}
    {%- endfor %}
  {%- endif %}
  {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\n' }}
{%- endif %}
""".strip()


def make(text: dict, text_changes: dict, vision: dict, vision_changes: dict) -> tuple[Any, Any]:
    """The config and the processor. A picture of 56x56 has 2 crops and 10 tokens, the largest ones
    10 crops and 24 tokens; each of several in a row has 5 tokens.

    `model_type` among the changes gives it another tower or language model.
    """
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionImageProcessor,
        LlavaOnevisionProcessor,
        LlavaOnevisionVideoProcessor,
    )

    size = {"height": SIDE, "width": SIDE}
    processor = LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=GRIDS),
        video_processor=LlavaOnevisionVideoProcessor(size=size),
        tokenizer=make_tokenizer(TEMPLATE, MAX_POSITIONS, TOKENS),
        chat_template=TEMPLATE,
        num_image_tokens=4,
        vision_feature_select_strategy="full",
        vision_aspect_ratio=MOST,
    )
    tower = tower_config("siglip_vision_model", vision, vision_changes)
    tower.vision_use_head = False
    config = LlavaOnevisionConfig(
        text_config=text_config("qwen2", text, text_changes, processor.tokenizer),
        vision_config=tower,
        image_token_index=processor.image_token_id,
        video_token_index=processor.video_token_id,
        image_grid_pinpoints=GRIDS,
        vision_aspect_ratio=MOST,
    )
    return config, processor
