"""A tiny Qwen2.5-VL."""

from __future__ import annotations

from typing import Any

from vireo.families.tiny.qwen2_vl import make_processor, text_fields, token_ids
from vireo.families.tiny.sizes import override


def make(text: dict, text_changes: dict, vision: dict, vision_changes: dict) -> tuple[Any, Any]:
    """The config and the processor. Every vision layer has full attention unless told otherwise."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLProcessor
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import (
        Qwen2_5_VLTextConfig,
        Qwen2_5_VLVisionConfig,
    )

    processor = make_processor(Qwen2_5_VLProcessor)
    text = override(text, text_changes, Qwen2_5_VLTextConfig)
    tower = {**vision, "out_hidden_size": text["hidden_size"]}
    tower = override(tower, vision_changes, Qwen2_5_VLVisionConfig)
    tower.setdefault("fullatt_block_indexes", list(range(tower["depth"])))
    config = Qwen2_5_VLConfig(
        text_config=text_fields(processor.tokenizer, text),
        vision_config=tower,
        **token_ids(processor.tokenizer),
    )
    return config, processor
