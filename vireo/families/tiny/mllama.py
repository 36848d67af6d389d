"""A tiny Llama-3.2-Vision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vireo.families.tiny import templates
from vireo.families.tiny.sizes import MAX_POSITIONS, override
from vireo.families.tiny.tokenizer import LLAMA, VOCAB_SIZE, make_tokenizer

IMAGE = "<|image|>"
TILE = 56
# Eight rows more go into the embedding than come out of the head, so the two cannot be tied.
CAN_TIE = False


def make(text: dict, text_changes: dict, vision: dict, vision_changes: dict) -> tuple[Any, Any]:
    """The config and the processor. A picture of up to 56x56 is one tile of 16 patches.

    One layer more than other families have, since one of them (the second) attends to images.
    """
    from transformers import (
        MllamaConfig,
        MllamaImageProcessor,
        MllamaProcessor,
        MllamaTextConfig,
        MllamaVisionConfig,
    )

    tokens = replace(LLAMA, special=(*LLAMA.special, IMAGE))
    template = templates.llama(image=IMAGE)
    processor = MllamaProcessor(
        image_processor=MllamaImageProcessor(size={"height": TILE, "width": TILE}),
        tokenizer=make_tokenizer(template, MAX_POSITIONS, tokens),
        chat_template=template,
    )
    tokenizer = processor.tokenizer

    text = {
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "cross_attention_layers": [1],
        **text,
        "num_hidden_layers": text["num_hidden_layers"] + 1,
        # The image token is the first that has an embedding and no place in the head.
        "vocab_size": VOCAB_SIZE - 1,
    }
    tower = {
        "image_size": TILE,
        "patch_size": 14,
        "hidden_size": vision["hidden_size"],
        "intermediate_size": vision["intermediate_size"],
        "num_hidden_layers": vision["depth"],
        "attention_heads": vision["num_heads"],
        "initializer_range": vision["initializer_range"],
        "num_global_layers": 1,
        "intermediate_layers_indices": [0],
    }
    tower = override(tower, vision_changes, MllamaVisionConfig)
    # The last layer of the tower beside those whose output is kept on the way.
    kept = 1 + len(tower["intermediate_layers_indices"])
    config = MllamaConfig(
        text_config=override(text, text_changes, MllamaTextConfig),
        vision_config={**tower, "vision_output_dim": kept * tower["hidden_size"]},
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
    )
    return config, processor


def finish(model: Any) -> None:
    """Open the gates: at 0, where training of the real model began, no pixel changes anything."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate", "gate_attn", "gate_ffn")):
                parameter.fill_(0.5)
