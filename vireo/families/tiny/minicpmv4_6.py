"""A tiny MiniCPM-V 4.6."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vireo.families.tiny import templates
from vireo.families.tiny.sizes import MAX_POSITIONS, override
from vireo.families.tiny.tokenizer import CHATML, EMBEDDING_SIZE, make_tokenizer

IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
NAMED = {
    "image_token": IMAGE,
    "video_token": VIDEO,
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
PATCH, SIDE = 14, 112  # pixels; a larger picture gets slices


def make(text: dict, text_changes: dict, vision: dict, vision_changes: dict) -> tuple[Any, Any]:
    """The config and the processor. A picture is scaled to about 112x112: 4 tokens.

    The last layer of the language model has full attention, those before it have linear attention.
    """
    from transformers import (
        MiniCPMV4_6Config,
        MiniCPMV4_6ImageProcessor,
        MiniCPMV4_6Processor,
        MiniCPMV4_6VideoProcessor,
    )
    from transformers.models.minicpmv4_6.configuration_minicpmv4_6 import MiniCPMV4_6VisionConfig
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    tokens = replace(
        CHATML, special=(*CHATML.special, *[t for t in NAMED.values() if "|" not in t]), named=NAMED
    )
    template = templates.chatml(vision=True, image=IMAGE, video=VIDEO)
    processor = MiniCPMV4_6Processor(
        image_processor=MiniCPMV4_6ImageProcessor(scale_resolution=SIDE),
        video_processor=MiniCPMV4_6VideoProcessor(scale_resolution=SIDE),
        tokenizer=make_tokenizer(template, MAX_POSITIONS, tokens),
        chat_template=template,
    )
    tokenizer = processor.tokenizer

    text = override(text, text_changes, Qwen3_5TextConfig)
    head = text["hidden_size"] // text["num_attention_heads"]
    text = {
        "model_type": "qwen3_5_text",
        "vocab_size": EMBEDDING_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "eos_token_id": tokenizer.eos_token_id,
        "head_dim": head,
        "layer_types": ["linear_attention"] * (text["num_hidden_layers"] - 1) + ["full_attention"],
        "linear_num_key_heads": text["num_key_value_heads"],
        "linear_num_value_heads": text["num_attention_heads"],
        "linear_key_head_dim": head,
        "linear_value_head_dim": head,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.5,
            "mrope_section": [head // 4 - 2 * (head // 12), head // 12, head // 12],
            "mrope_interleaved": True,
        },
        **text,
    }
    tower = {
        "image_size": SIDE,
        "patch_size": PATCH,
        "hidden_size": vision["hidden_size"],
        "intermediate_size": vision["intermediate_size"],
        "num_hidden_layers": vision["depth"],
        "num_attention_heads": vision["num_heads"],
        "initializer_range": vision["initializer_range"],
    }
    config = MiniCPMV4_6Config(
        text_config=text,
        vision_config=override(tower, vision_changes, MiniCPMV4_6VisionConfig),
        image_size=SIDE,
        insert_layer_id=0,  # the patches are merged after the first layer
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        video_token_id=tokenizer.convert_tokens_to_ids(VIDEO),
    )
    return config, processor
