"""Models of published sizes with random weights, written in seconds on a GPU."""

from __future__ import annotations

from pathlib import Path


def write_3b(folder: Path, layers: int = 36) -> None:
    """A Qwen2.5-VL-3B-shaped model (3.75 billion parameters)."""
    import torch

    from vireo.families.tiny import build

    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        build(
            "qwen2_5_vl",
            folder,
            dtype="bfloat16",  # as published
            initializer_range=0.02,  # that of tiny models makes a wide one chaotic
            hidden_size=2048,
            intermediate_size=11008,
            num_hidden_layers=layers,
            num_attention_heads=16,
            num_key_value_heads=2,
            vocab_size=151_936,
            rope_parameters=rope,
            vision={
                "initializer_range": 0.02,
                "hidden_size": 1280,
                "depth": 32,
                "num_heads": 16,
                "intermediate_size": 3420,
                "out_hidden_size": 2048,
                "window_size": 112,
                "fullatt_block_indexes": [7, 15, 23, 31],
            },
        )
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    fill_vocabulary(folder, 151_665)


def fill_vocabulary(folder: Path, words: int) -> None:
    """Gives every row of the head but the last few a token, as published: no text has them."""
    import json

    file = folder / "tokenizer.json"
    data = json.loads(file.read_text())
    vocabulary = data["model"]["vocab"]
    first = max([*vocabulary.values(), *(token["id"] for token in data["added_tokens"])]) + 1
    # Control tokens too: some versions of tokenizers renumber what leaves a hole.
    vocabulary |= {token["content"]: token["id"] for token in data["added_tokens"]}
    vocabulary |= {f"\u0120filler{i}": i for i in range(first, words)}
    file.write_text(json.dumps(data))
