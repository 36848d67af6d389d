"""A tiny Qwen2-VL."""

from __future__ import annotations

from typing import Any

from vireo.families.tiny.sizes import MAX_POSITIONS, override
from vireo.families.tiny.templates import chatml
from vireo.families.tiny.tokenizer import EMBEDDING_SIZE, make_tokenizer


def make_processor(processor_class: type) -> Any:
    """A processor whose smallest image is one merge cell (28x28), so that 56x56 is 4 tokens.

    It has the video section too: engines and loaders refuse a checkpoint without one.
    """
    from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    template = chatml(default_system="You are a helpful assistant.", vision=True)
    size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 256}
    return processor_class(
        image_processor=Qwen2VLImageProcessor(size=size),
        video_processor=Qwen2VLVideoProcessor(size=size),
        tokenizer=make_tokenizer(template, MAX_POSITIONS),
        chat_template=template,
    )


def text_fields(tokenizer: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """The fields of the text config. M-RoPE cuts half a head into time, height and width."""
    half_head = sizes["hidden_size"] // sizes["num_attention_heads"] // 2
    side = 5 * half_head // 16
    return {
        "vocab_size": EMBEDDING_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [half_head - 2 * side, side, side],
        },
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        **sizes,
    }


def token_ids(tokenizer: Any) -> dict[str, Any]:
    """The fields of the whole config that name control tokens."""
    return {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in [
            ("image", "image_pad"),
            ("video", "video_pad"),
            ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
        ]
    }


def make(text: dict, text_changes: dict, vision: dict, vision_changes: dict) -> tuple[Any, Any]:
    """The config and the processor."""
    from transformers import Qwen2VLConfig, Qwen2VLProcessor
    from transformers.models.qwen2_vl.configuration_qwen2_vl import (
        Qwen2VLTextConfig,
        Qwen2VLVisionConfig,
    )

    processor = make_processor(Qwen2VLProcessor)
    text = override(text, text_changes, Qwen2VLTextConfig)
    # In this config `hidden_size` is the width after the merger, the tower's is `embed_dim`.
    tower = {
        "embed_dim": vision["hidden_size"],
        "hidden_size": text["hidden_size"],
        "mlp_ratio": vision["intermediate_size"] // vision["hidden_size"],
        "initializer_range": vision["initializer_range"],
        "depth": vision["depth"],
        "num_heads": vision["num_heads"],
    }
    config = Qwen2VLConfig(
        text_config=text_fields(processor.tokenizer, text),
        vision_config=override(tower, vision_changes, Qwen2VLVisionConfig),
        **token_ids(processor.tokenizer),
    )
    return config, processor
