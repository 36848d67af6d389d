"""A Llama as SmolVLM: a SigLIP tower, whose patches are shuffled to fewer tokens, before it."""

from __future__ import annotations

from typing import Any

from vireo.families.tiny.sizes import VISION

TEXT = ("llama",)


def make(text: Any, tokenizer: Any, size: str) -> tuple[Any, Any]:
    """Published: that of the 256M and 500M models, tiles of 512x512 pixels and 64 tokens, up to 16
    and the whole of a picture. Demo: of 56x56 pixels and 4 tokens; a picture that small is one."""
    from transformers import (
        SmolVLMConfig,
        SmolVLMImageProcessor,
        SmolVLMProcessor,
        SmolVLMVideoProcessor,
    )

    if size == "demo":
        sizes = VISION["demo"]
        tile, patch, shuffle = 56, 14, 2
        images = {"size": {"longest_edge": tile}, "do_resize": False}
        tower = {
            "hidden_size": sizes["hidden_size"],
            "intermediate_size": sizes["intermediate_size"],
            "num_hidden_layers": sizes["depth"],
            "num_attention_heads": sizes["num_heads"],
            "initializer_range": sizes["initializer_range"],
        }
    else:
        tile, patch, shuffle = 512, 16, 4
        images = {"size": {"longest_edge": 2048}}
        tower = {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
        }
    edge = {"longest_edge": tile}
    processor = SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(max_image_size=edge, **images),
        video_processor=SmolVLMVideoProcessor(
            size=edge,
            max_image_size=edge,
            video_sampling={"fps": 1, "max_frames": 64, "video_size": edge},
        ),
        tokenizer=tokenizer,
        image_seq_len=(tile // patch // shuffle) ** 2,
    )
    config = SmolVLMConfig(
        text_config=text,
        vision_config={**tower, "image_size": tile, "patch_size": patch},
        scale_factor=shuffle,
        image_token_id=processor.image_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=text.tie_word_embeddings,
    )
    return config, processor
