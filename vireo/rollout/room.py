"""How many requests are generated together: as many as the device's memory has room for."""

from __future__ import annotations

from typing import Any

import torch

CPU_ROWS = 64  # more are no faster there
MOST = 512  # a GPU's step takes longer then, nearly as much as there is more to do


def rows_at_once(
    config: Any, itemsize: int, tokens: int, device: torch.device, free: int | None = None
) -> int:
    """Rows of `tokens` tokens, prompt and response, that fit into half of the `free` bytes.

    Counted are the cache, the activations of a layer over the prompt, and the probabilities of the
    next token in float64, twice. `config`: the transformers model's; `itemsize`: bytes of a number.
    """
    if device.type != "cuda":
        return CPU_ROWS
    if free is None:
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + unused
    text = config.get_text_config()
    heads = text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // heads
    cache = (
        2 * text.num_hidden_layers * (getattr(text, "num_key_value_heads", None) or heads) * head
    )
    layer = 4 * text.hidden_size + 3 * text.intermediate_size
    row = tokens * (cache + layer) * itemsize + 2 * 8 * text.vocab_size
    return max(1, min(MOST, free // 2 // row))
