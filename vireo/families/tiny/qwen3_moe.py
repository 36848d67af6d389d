"""A tiny Qwen3-MoE."""

from __future__ import annotations

from typing import Any

from vireo.families.tiny.sizes import MAX_POSITIONS, override
from vireo.families.tiny.templates import chatml
from vireo.families.tiny.tokenizer import EMBEDDING_SIZE, make_tokenizer


def expert_fields(text: dict[str, Any]) -> dict[str, Any]:
    """Four experts, two of them a token. No matrix of theirs is square: some checkpoints hold them
    transposed, which is told by the shape."""
    return {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 3 * text["intermediate_size"] // 8,
    }


def make(text: dict, text_changes: dict, vision: dict, vision_changes: dict) -> tuple[Any, Any]:
    """The config and the tokenizer; a text model takes no vision fields (TypeError)."""
    from transformers import Qwen3MoeConfig

    if vision_changes:
        raise TypeError("qwen3_moe is a text model: it has no vision fields")
    tokenizer = make_tokenizer(chatml(), MAX_POSITIONS)
    text = override({**text, **expert_fields(text)}, text_changes, Qwen3MoeConfig)
    text.setdefault("head_dim", text["hidden_size"] // text["num_attention_heads"])
    config = Qwen3MoeConfig(
        **{
            "vocab_size": EMBEDDING_SIZE,
            "max_position_embeddings": MAX_POSITIONS,
            "eos_token_id": tokenizer.eos_token_id,
            "norm_topk_prob": True,
            **text,
        }
    )
    return config, tokenizer
