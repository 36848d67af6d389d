"""A tiny Llama 3."""

from __future__ import annotations

from typing import Any

from vireo.families.tiny import templates
from vireo.families.tiny.sizes import MAX_POSITIONS, override
from vireo.families.tiny.tokenizer import EMBEDDING_SIZE, LLAMA, make_tokenizer


def make(text: dict, text_changes: dict, vision: dict, vision_changes: dict) -> tuple[Any, Any]:
    """The config and the tokenizer; a text model takes no vision fields (TypeError)."""
    from transformers import LlamaConfig

    if vision_changes:
        raise TypeError("llama is a text model: it has no vision fields")
    tokenizer = make_tokenizer(templates.llama(), MAX_POSITIONS, LLAMA)
    config = LlamaConfig(
        **{
            "vocab_size": EMBEDDING_SIZE,
            "max_position_embeddings": MAX_POSITIONS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            **override(text, text_changes, LlamaConfig),
        }
    )
    return config, tokenizer
