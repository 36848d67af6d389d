"""A tiny Qwen3-VL with experts."""

from __future__ import annotations

from typing import Any

from vireo.families.tiny.qwen3_moe import expert_fields
from vireo.families.tiny.qwen3_vl import configure


def make(text: dict, text_changes: dict, vision: dict, vision_changes: dict) -> tuple[Any, Any]:
    """The config and the processor."""
    from transformers import Qwen3VLMoeConfig

    text = {**text, **expert_fields(text)}
    return configure(Qwen3VLMoeConfig, text, text_changes, vision, vision_changes)


def finish(model: Any) -> None:
    """Have the experts saved transposed, as they are published: transformers, which asks for the
    shape on loading, asks on saving too, and would leave them as they are."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    table: Any = get_model_conversion_mapping(model, add_legacy=False)
    for converter in table:
        for operation in converter.operations:
            operation.check_dims = False
    model._weight_conversions = table
