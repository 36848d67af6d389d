"""A tiny Qwen3."""

from __future__ import annotations

from typing import Any

from vireo.families.tiny.sizes import MAX_POSITIONS, override
from vireo.families.tiny.templates import chatml
from vireo.families.tiny.tokenizer import EMBEDDING_SIZE, make_tokenizer


def make(text: dict, text_changes: dict, vision: dict, vision_changes: dict) -> tuple[Any, Any]:
    """The config and the tokenizer; a text model takes no vision fields (TypeError)."""
    from transformers import Qwen3Config

    if vision_changes:
        raise TypeError("qwen3 is a text model: it has no vision fields")
    tokenizer = make_tokenizer(chatml(), MAX_POSITIONS)
    text = override(text, text_changes, Qwen3Config)
    text.setdefault("head_dim", text["hidden_size"] // text["num_attention_heads"])
    config = Qwen3Config(
        **{
            "vocab_size": EMBEDDING_SIZE,
            "max_position_embeddings": MAX_POSITIONS,
            "eos_token_id": tokenizer.eos_token_id,
            **text,
        }
    )
    return config, tokenizer
