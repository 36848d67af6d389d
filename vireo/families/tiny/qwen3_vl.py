"""A tiny Qwen3-VL."""

from __future__ import annotations

from typing import Any

from vireo.families.tiny.qwen2_vl import text_fields, token_ids
from vireo.families.tiny.sizes import MAX_POSITIONS, override
from vireo.families.tiny.templates import chatml
from vireo.families.tiny.tokenizer import make_tokenizer

PATCH = 16


def make_processor() -> Any:
    """A processor whose smallest image is one merge cell (32x32), so that 56x56 is 4 tokens."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    template = chatml(vision=True)
    cell = (2 * PATCH) ** 2
    size = {"shortest_edge": cell, "longest_edge": cell * 256}
    half = [0.5, 0.5, 0.5]
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            size=size, patch_size=PATCH, image_mean=half, image_std=half
        ),
        video_processor=Qwen3VLVideoProcessor(size=size),
        tokenizer=make_tokenizer(template, MAX_POSITIONS),
        chat_template=template,
    )


def configure(
    config_class: type, text: dict, text_changes: dict, vision: dict, vision_changes: dict
) -> tuple[Any, Any]:
    """A config of this class and the processor.

    The language model is shown what the first layer of the tower makes of an image, too.
    """
    parts: Any = config_class
    text_class, vision_class = (parts.sub_configs[f"{n}_config"] for n in ("text", "vision"))
    processor = make_processor()
    text = override(text, text_changes, text_class)
    text = text_fields(processor.tokenizer, text)
    text["rope_parameters"] |= {"rope_theta": 5e6, "mrope_interleaved": True}
    text.setdefault("head_dim", text["hidden_size"] // text["num_attention_heads"])
    tower = {
        **vision,
        "out_hidden_size": text["hidden_size"],
        "patch_size": PATCH,
        "num_position_embeddings": 8 * 8,  # of a square, resampled to each image's grid
        "deepstack_visual_indexes": [0],
    }
    config = config_class(
        text_config=text,
        vision_config=override(tower, vision_changes, vision_class),
        **token_ids(processor.tokenizer),
    )
    return config, processor


def make(text: dict, text_changes: dict, vision: dict, vision_changes: dict) -> tuple[Any, Any]:
    """The config and the processor."""
    from transformers import Qwen3VLConfig

    return configure(Qwen3VLConfig, text, text_changes, vision, vision_changes)
