"""A text model as LLaVA 1.5: a CLIP tower and a projector of two layers before it."""

from __future__ import annotations

from typing import Any

from vireo.families.tiny.llava import tower_config
from vireo.families.tiny.sizes import VISION

TEXT = ("llama", "mistral", "qwen2", "qwen3")


def make(text: Any, tokenizer: Any, size: str) -> tuple[Any, Any]:
    """Published: ViT-L/14 at 336x336, 576 tokens an image. Demo: 56x56 pixels, 4 tokens."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, LlavaConfig, LlavaProcessor

    if size == "demo":
        # One layer more than elsewhere, since nobody looks at the last one.
        depth = VISION["demo"]["depth"] + 1
        tower = tower_config("clip_vision_model", {**VISION["demo"], "depth": depth}, {})
    else:
        tower = CLIPVisionConfig(
            image_size=336,
            patch_size=14,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=24,
            num_attention_heads=16,
            projection_dim=768,
        )
    side = tower.image_size
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": side}, crop_size={"height": side, "width": side}
        ),
        tokenizer=tokenizer,
        patch_size=tower.patch_size,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    )
    config = LlavaConfig(
        text_config=text,
        vision_config=tower,
        image_token_index=processor.image_token_id,
        image_seq_length=(side // tower.patch_size) ** 2,
        tie_word_embeddings=text.tie_word_embeddings,
    )
    return config, processor
