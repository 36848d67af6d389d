"""A tiny LLaVA-NeXT with the language model and the template of llava-v1.6-mistral."""

from __future__ import annotations

from typing import Any

from vireo.families.tiny.llava import PATCH, SIDE, TOKENS, text_config, tower_config
from vireo.families.tiny.sizes import MAX_POSITIONS
from vireo.families.tiny.tokenizer import make_tokenizer

# Heights and widths that the crops of a picture may have together, as published for 336.
GRIDS = [
    [SIDE * rows, SIDE * columns] for rows, columns in [(1, 2), (2, 1), (2, 2), (3, 1), (1, 3)]
]

# As published: images first, no prompt of its own for an answer, and no start of the text, which
# the tokenizer writes.
TEMPLATE = r"""
{%- for message in messages %}
  {%- if message.role == 'system' %}
    {{- '<<SYS>>\n' }}
  {%- elif message.role == 'user' %}
    {{- '[INST] ' }}
  {%- elif message.role == 'assistant' %}
    {{- ' ' }}
  {%- else %}
    {{- raise_exception('this chat template has no turns of the role ' ~ message.role) }}
  {%- endif %}
  {%- if message.content is string %}
    {{- message.content }}
  {%- else %}
    {%- for part in message.content if part.type == 'image' %}
      {{- '<image>\n' }}
    {%- endfor %}
    {%- for part in message.content if part.type == 'text' %}
      {{- part.text }}
    {%- endfor %}
  {%- endif %}
  {%- if message.role == 'system' %}
    {{- '\n<</SYS>>\n\n' }}
  {%- elif message.role == 'user' %}
    {{- ' [/INST]' }}
  {%- else %}
    {{- '</s> ' }}
  {%- endif %}
{%- endfor %}
""".strip()


def make(text: dict, text_changes: dict, vision: dict, vision_changes: dict) -> tuple[Any, Any]:
    """The config and the processor. A picture of 56x56 has 3 crops and 10 tokens, the largest ones
    5 crops and 24 tokens.

    The tower has one layer more than other families' have, since nobody looks at its last one.
    `model_type` among the changes gives it another tower or language model.
    """
    from transformers import LlavaNextConfig, LlavaNextImageProcessor, LlavaNextProcessor

    processor = LlavaNextProcessor(
        image_processor=LlavaNextImageProcessor(
            size={"shortest_edge": SIDE},
            crop_size={"height": SIDE, "width": SIDE},
            image_grid_pinpoints=GRIDS,
        ),
        tokenizer=make_tokenizer(TEMPLATE, MAX_POSITIONS, TOKENS),
        chat_template=TEMPLATE,
        patch_size=PATCH,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    )
    vision = {**vision, "depth": vision["depth"] + 1}
    config = LlavaNextConfig(
        text_config=text_config("mistral", text, text_changes, processor.tokenizer),
        vision_config=tower_config("clip_vision_model", vision, vision_changes),
        image_token_index=processor.image_token_id,
        image_seq_length=4,
        image_grid_pinpoints=GRIDS,
    )
    return config, processor
