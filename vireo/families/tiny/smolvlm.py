"""A tiny SmolVLM."""

from __future__ import annotations

from typing import Any

from vireo.families.smolvlm import FAMILY
from vireo.families.tiny.sizes import MAX_POSITIONS, override
from vireo.families.tiny.tokenizer import EMBEDDING_SIZE, Tokens, make_tokenizer

END = "<end_of_utterance>"
TOKENS = Tokens(
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *FAMILY.image_tokens, END),
    end_of_turn=END,
    end_of_text="<|im_end|>",
    named={
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": END,
    },
)
TILE, PATCH, SHUFFLE = 56, 14, 2  # pixels, pixels, patches: 2x2 patches are one token
TOKENS_PER_TILE = (TILE // PATCH // SHUFFLE) ** 2

# The name of who speaks, a colon, and a space unless an image follows.
_SPOKEN = r"""
{{- START }}
{%- if tools or messages | selectattr('tool_calls', 'defined') | list %}
  {{- raise_exception('this chat template has no tools') }}
{%- endif %}
{%- for message in messages %}
  {{- message.role | capitalize + ':' }}
  {%- if message.content is string %}
    {{- ' ' + message.content }}
  {%- elif message.content %}
    {{- ' ' if message.content[0].type == 'text' }}
    {%- for part in message.content %}
      {%- if part.type == 'text' %}
        {{- part.text }}
      {%- elif part.type in ['image', 'image_url'] %}
        {{- '<image>' }}
      {%- else %}
        {{- raise_exception('this chat template has no content part of type ' ~ part.type) }}
      {%- endif %}
    {%- endfor %}
  {%- endif %}
  {{- '<end_of_utterance>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- 'Assistant:' }}
{%- endif %}
"""


def spoken(start: str) -> str:
    """The Jinja source; `start` stands before the first turn."""
    return _SPOKEN.replace("START", repr(start)).strip()


def image_options() -> dict[str, Any]:
    """Of the image processor. 56x56 is one tile; a larger picture has its tiles, and is one more.

    Published models first enlarge every picture; then the smallest would have many tiles.
    """
    side = {"longest_edge": TILE}
    return {"size": side, "max_image_size": side, "do_resize": False}


def config_fields(
    tokenizer: Any,
    text: dict[str, Any],
    text_changes: dict[str, Any],
    vision: dict[str, Any],
    vision_changes: dict[str, Any],
    vision_class: type,
) -> dict[str, Any]:
    """The fields of the whole config, with a Llama as the language model."""
    from transformers import LlamaConfig

    pad = tokenizer.pad_token_id
    tower = {
        "image_size": TILE,
        "patch_size": PATCH,
        "hidden_size": vision["hidden_size"],
        "intermediate_size": vision["intermediate_size"],
        "num_hidden_layers": vision["depth"],
        "num_attention_heads": vision["num_heads"],
        "initializer_range": vision["initializer_range"],
    }
    return {
        "text_config": {
            "model_type": "llama",
            "vocab_size": EMBEDDING_SIZE,
            "max_position_embeddings": MAX_POSITIONS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": pad,
            **override(text, text_changes, LlamaConfig),
        },
        "vision_config": override(tower, vision_changes, vision_class),
        "scale_factor": SHUFFLE,
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "pad_token_id": pad,
    }


def make(text: dict, text_changes: dict, vision: dict, vision_changes: dict) -> tuple[Any, Any]:
    """The config and the processor, which needs its video section to be loaded."""
    from transformers import (
        SmolVLMConfig,
        SmolVLMImageProcessor,
        SmolVLMProcessor,
        SmolVLMVideoProcessor,
    )
    from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig

    template = spoken("<|im_start|>")
    sampling = {"fps": 1, "max_frames": 8, "video_size": {"longest_edge": TILE}}
    processor = SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(**image_options()),
        video_processor=SmolVLMVideoProcessor(
            size={"longest_edge": TILE},
            max_image_size={"longest_edge": TILE},
            video_sampling=sampling,
        ),
        tokenizer=make_tokenizer(template, MAX_POSITIONS, TOKENS),
        image_seq_len=TOKENS_PER_TILE,
        chat_template=template,
    )
    fields = config_fields(
        processor.tokenizer, text, text_changes, vision, vision_changes, SmolVLMVisionConfig
    )
    return SmolVLMConfig(**fields), processor
