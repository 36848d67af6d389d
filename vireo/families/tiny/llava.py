"""A tiny LLaVA 1.5, and what the later LLaVAs share with it."""

from __future__ import annotations

from typing import Any, Literal

from vireo.families.tiny.sizes import MAX_POSITIONS, override
from vireo.families.tiny.tokenizer import EMBEDDING_SIZE, Tokens, make_tokenizer

IMAGE = "<image>"
# A Llama 2 tokenizer with two tokens more. One token ends a turn and the text; another one pads.
TOKENS = Tokens(
    special=("<s>", "</s>", IMAGE, "<pad>"),
    end_of_turn="</s>",
    end_of_text="<pad>",
    start_of_text="<s>",
    named={"image_token": IMAGE},
)
SIDE, PATCH = 56, 28  # pixels

# As published: images first, a space behind every text, nothing that ends an answer, and no start
# of the text either, which the tokenizer writes.
TEMPLATE = r"""
{%- for message in messages %}
  {%- if message.role != 'system' %}
    {{- message.role | upper + ': ' }}
  {%- endif %}
  {%- if message.content is string %}
    {{- message.content + ' ' }}
  {%- else %}
    {%- for part in message.content if part.type == 'image' %}
      {{- '<image>\n' }}
    {%- endfor %}
    {%- for part in message.content if part.type == 'text' %}
      {{- part.text + ' ' }}
    {%- endfor %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- 'ASSISTANT:' }}
{%- endif %}
""".strip()


def text_config(kind: str, sizes: dict, changes: dict, tokenizer: Any) -> Any:
    """The config of a language model of the type `kind`, unless `changes` names another one."""
    from transformers import CONFIG_MAPPING

    kind = changes.get("model_type", kind)
    config_class = CONFIG_MAPPING[kind]
    changes = {name: value for name, value in changes.items() if name != "model_type"}
    fields = {
        "vocab_size": EMBEDDING_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **({"sliding_window": None} if hasattr(config_class, "sliding_window") else {}),
        **override(sizes, changes, config_class),
    }
    if hasattr(config_class, "head_dim"):
        fields.setdefault("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    return config_class(**fields)


def tower_config(kind: str, sizes: dict, changes: dict) -> Any:
    """The config of a tower of the type `kind`, unless `changes` names another one.

    Its config has the names that language models have for their sizes.
    """
    from transformers import CONFIG_MAPPING

    kind = changes.get("model_type", kind)
    config_class = CONFIG_MAPPING[kind]
    changes = {name: value for name, value in changes.items() if name != "model_type"}
    fields = {
        "image_size": SIDE,
        "patch_size": PATCH,
        "hidden_size": sizes["hidden_size"],
        "intermediate_size": sizes["intermediate_size"],
        "num_hidden_layers": sizes["depth"],
        "num_attention_heads": sizes["num_heads"],
        "initializer_range": sizes["initializer_range"],
    }
    if not hasattr(config_class, "initializer_range"):
        del fields["initializer_range"]
    return config_class(**override(fields, changes, config_class))


def make(text: dict, text_changes: dict, vision: dict, vision_changes: dict) -> tuple[Any, Any]:
    """The config and the processor. A picture is scaled to 56x56: 4 tokens.

    The tower has one layer more than other families' have, since nobody looks at its last one.
    `model_type` among the changes gives it another language model, or the tower of
    LLaVA-Interleave (`siglip_vision_model`), of which every layer and every token is looked at.
    """
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaProcessor

    vision = {**vision, "depth": vision["depth"] + 1}
    tower = tower_config("clip_vision_model", vision, vision_changes)
    whole = tower.model_type != "clip_vision_model"
    strategy: Literal["full", "default"] = "full" if whole else "default"
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
        ),
        tokenizer=make_tokenizer(TEMPLATE, MAX_POSITIONS, TOKENS),
        chat_template=TEMPLATE,
        patch_size=PATCH,
        num_additional_image_tokens=0 if whole else 1,
        vision_feature_select_strategy=strategy,
    )
    config = LlavaConfig(
        text_config=text_config("llama", text, text_changes, processor.tokenizer),
        vision_config=tower,
        image_token_index=processor.image_token_id,
        image_seq_length=4,
        vision_feature_layer=-1 if whole else -2,
        vision_feature_select_strategy=strategy,
    )
    return config, processor
