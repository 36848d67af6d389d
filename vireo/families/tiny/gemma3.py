"""A tiny Gemma 3."""

from __future__ import annotations

from typing import Any

from vireo.families.tiny.sizes import MAX_POSITIONS, override
from vireo.families.tiny.tokenizer import EMBEDDING_SIZE, Tokens, make_tokenizer

NAMED = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
TOKENS = Tokens(
    special=("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", *NAMED.values()),
    end_of_turn="<end_of_turn>",
    end_of_text="<eos>",
    start_of_text="<bos>",
    named=NAMED,
)
SIDE, PATCH, TOKENS_PER_IMAGE = 56, 14, 4  # pixels, pixels; every picture is scaled to one size
WINDOW = 16  # tokens that a sliding layer looks back on

# A system turn is the beginning of the first user turn; texts are trimmed.
_TURNS = r"""
{{- '<bos>' }}
{%- if tools or messages | selectattr('tool_calls', 'defined') | list %}
  {{- raise_exception('this chat template has no tools') }}
{%- endif %}
{%- set turns = messages %}
{%- set system = namespace(text='') %}
{%- if messages[0].role == 'system' %}
  {%- set turns = messages[1:] %}
  {%- if messages[0].content is string %}
    {%- set system.text = messages[0].content %}
  {%- else %}
    {%- set system.text = messages[0].content | map(attribute='text') | join %}
  {%- endif %}
  {%- set system.text = system.text + '\n\n' %}
{%- endif %}
{%- for message in turns %}
  {%- if message.role != ['user', 'assistant'][loop.index0 % 2] %}
    {{- raise_exception('user and assistant must take turns, the user first') }}
  {%- endif %}
  {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\n' }}
  {{- system.text if loop.first }}
  {%- if message.content is string %}
    {{- message.content | trim }}
  {%- elif message.content %}
    {%- for part in message.content %}
      {%- if part.type == 'text' %}
        {{- part.text | trim }}
      {%- elif part.type in ['image', 'image_url'] %}
        {{- '<start_of_image>' }}
      {%- else %}
        {{- raise_exception('this chat template has no content part of type ' ~ part.type) }}
      {%- endif %}
    {%- endfor %}
  {%- endif %}
  {{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<start_of_turn>model\n' }}
{%- endif %}
"""


def make(text: dict, text_changes: dict, vision: dict, vision_changes: dict) -> tuple[Any, Any]:
    """The config and the processor. The last layer has full attention, those before it slide."""
    from transformers import (
        Gemma3Config,
        Gemma3ImageProcessor,
        Gemma3Processor,
        Gemma3TextConfig,
        SiglipVisionConfig,
    )

    template = _TURNS.strip()
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessor(size={"height": SIDE, "width": SIDE}),
        tokenizer=make_tokenizer(template, MAX_POSITIONS, TOKENS),
        image_seq_length=TOKENS_PER_IMAGE,
        chat_template=template,
    )
    tokenizer = processor.tokenizer

    text = override(text, text_changes, Gemma3TextConfig)
    head = text["hidden_size"] // text["num_attention_heads"]
    text = {
        "vocab_size": EMBEDDING_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "head_dim": head,
        "query_pre_attn_scalar": head,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention"] * (text["num_hidden_layers"] - 1) + ["full_attention"],
        **text,
    }
    tower = {
        "image_size": SIDE,
        "patch_size": PATCH,
        "hidden_size": vision["hidden_size"],
        "intermediate_size": vision["intermediate_size"],
        "num_hidden_layers": vision["depth"],
        "num_attention_heads": vision["num_heads"],
        "vision_use_head": False,
    }
    config = Gemma3Config(
        text_config=text,
        vision_config=override(tower, vision_changes, SiglipVisionConfig),
        mm_tokens_per_image=TOKENS_PER_IMAGE,
        boi_token_index=tokenizer.convert_tokens_to_ids(NAMED["boi_token"]),
        eoi_token_index=tokenizer.convert_tokens_to_ids(NAMED["eoi_token"]),
        image_token_index=tokenizer.convert_tokens_to_ids(NAMED["image_token"]),
        initializer_range=text["initializer_range"],
    )
    return config, processor


def finish(model: Any) -> None:
    """Fill the projection of images: at 0, as in a model from its config, no pixel would count."""
    import torch

    projection = model.model.multi_modal_projector.mm_input_projection_weight
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        projection.normal_(0, model.config.initializer_range, generator=chance)
