"""Tiny checkpoints of every family, built from scratch and offline: for tests and demos.

Each is a folder that plain transformers loads: weights, configs, tokenizer, processor and chat
template. The weights are random; "demo" learns a small task in a minute, "test" is for speed.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from vireo.families import get_family
from vireo.families.tiny.sizes import TEXT, VISION


def build(
    family: str,
    out: Path | str,
    *,
    size: str = "demo",
    seed: int = 0,
    tie_word_embeddings: bool | None = None,
    dtype: str = "float32",
    vision: dict[str, Any] | None = None,
    **text: Any,
) -> Path:
    """Write a tiny checkpoint of `family` to the folder `out` and return the folder.

    size: "demo" (0.8 to 1.4 M parameters with a tower) or "test" (0.2 to 0.5 M).
    tie_word_embeddings: None ties them where the family can.
    dtype: number format of the weights in the file.
    vision, text: fields of the vision and text configs that differ from the size's, as in
        `build("qwen2_vl", out, size="test", vision={"depth": 1}, num_hidden_layers=4)`.
    The same arguments give the same bytes. LookupError: no such family, or none of it; ValueError:
    no such size, or a family that cannot tie its embeddings; TypeError: no such field.
    """
    import torch
    import transformers

    entry = get_family(family)
    if entry.remote:
        raise LookupError(f"{family} has no tiny checkpoint: its code is a part of the real one")
    Path(out).mkdir(parents=True, exist_ok=True)  # transformers says nothing where it is a file
    if size not in TEXT:
        raise ValueError(f"tiny size {size!r} is not known; known sizes: {', '.join(TEXT)}")
    module = import_module(f"vireo.families.tiny.{family}")
    can_tie = getattr(module, "CAN_TIE", True)
    if tie_word_embeddings is None:
        tie_word_embeddings = can_tie
    elif tie_word_embeddings and not can_tie:
        raise ValueError(f"{family} cannot tie its embeddings to its head: their sizes differ")
    config, processor = module.make(TEXT[size], text, VISION[size], vision or {})
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        part.tie_word_embeddings = tie_word_embeddings  # engines read it from either

    with torch.random.fork_rng(devices=[]):  # the caller's random state is not ours to move
        torch.random.default_generator.manual_seed(seed)
        auto_class = getattr(transformers, entry.auto_class)
        model = auto_class.from_config(config, dtype=torch.float32)
    if finish := getattr(module, "finish", None):
        finish(model)

    tokenizer = getattr(processor, "tokenizer", processor)
    pad = tokenizer.pad_token_id
    # Two stop ids, as published: the end of the turn, and of the text.
    stop = [tokenizer.eos_token_id, pad]
    model.generation_config = transformers.GenerationConfig(eos_token_id=stop, pad_token_id=pad)
    model.to(getattr(torch, dtype)).save_pretrained(out)
    processor.save_pretrained(out)
    return Path(out)
