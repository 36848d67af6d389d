"""A Qwen2 as Qwen2.5-VL: a tower for pictures of any size, and positions in three dimensions."""

from __future__ import annotations

from typing import Any

from vireo.families.tiny.qwen2_vl import token_ids
from vireo.families.tiny.sizes import VISION

TEXT = ("qwen2",)
CELL = 28 * 28  # pixels of one token: 2x2 patches of 14x14


def make(text: Any, tokenizer: Any, size: str) -> tuple[Any, Any]:
    """Published: pictures of 4 to 16,384 tokens. Demo: of 1 to 256; a picture of 56x56 has 4."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    if size == "demo":
        least, most = 1, 256
        depth = VISION["demo"]["depth"]
        tower = {**VISION["demo"], "fullatt_block_indexes": list(range(depth))}
    else:
        least, most = 4, 16384
        tower = {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
        }
    pixels = {"shortest_edge": least * CELL, "longest_edge": most * CELL}
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=pixels),
        video_processor=Qwen2VLVideoProcessor(size=pixels),
        tokenizer=tokenizer,
    )
    config = Qwen2_5_VLConfig(
        text_config=_in_three_dimensions(text),
        vision_config={**tower, "out_hidden_size": text.hidden_size},
        tie_word_embeddings=text.tie_word_embeddings,
        **token_ids(tokenizer),
    )
    return config, processor


def _in_three_dimensions(text: Any) -> dict[str, Any]:
    """The fields of the text config. Of half a head, time has 2 parts of 8, height and width 3 each
    (16, 24 and 24 of 64, as published); in text all three are one position, as in a Qwen2."""
    fields = text.to_dict()
    for name in ("model_type", "architectures", "transformers_version", "_name_or_path"):
        fields.pop(name, None)
    half_head = text.hidden_size // text.num_attention_heads // 2
    side = 3 * half_head // 8
    sections = [half_head - 2 * side, side, side]
    fields["rope_parameters"] = {**text.rope_parameters, "mrope_section": sections}
    return fields
