"""AdamW and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn


def adamw(
    model: nn.Module, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW over what trains; no decay on norms and biases (every parameter of one dimension)."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    on_gpu = any(p.device.type == "cuda" for p in trained)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=lr, betas=betas, eps=eps, fused=on_gpu
    )


def schedule(kind: str, peak: float, steps: int, warmup_ratio: float) -> Callable[[int], float]:
    """Learning rate of optimizer step 0, 1, ..., `steps` - 1.

    Linear warm-up over `warmup_ratio` of the steps, then a half cosine or a line to zero, or flat.
    """
    warmup = math.ceil(steps * warmup_ratio)

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        if kind == "constant":
            return peak
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return peak * (0.5 * (1 + math.cos(math.pi * done)) if kind == "cosine" else 1 - done)

    return rate
