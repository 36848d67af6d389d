"""AdamW and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from vireo.errors import InputError
from vireo.models.names import named_parameters, part_of
from vireo.models.policy import Policy


def adamw(
    policy: Policy,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    part_lr: Mapping[str, float] | None = None,
) -> torch.optim.AdamW:
    """AdamW over what trains; no decay on norms and biases (every parameter of one dimension).

    `part_lr`: the highest rate of parts (vision, projector, ...) that have their own. A group's
    `peak` is its highest rate, its `lr` that of the step (see `set_rate`).
    """
    rates = part_lr or {}
    # By part, not by rate: a resumed run with other rates finds the same groups.
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for name, parameter in named_parameters(policy.hf):
        if parameter.requires_grad:
            part = part_of(name, policy.family) or ""
            groups.setdefault((part, parameter.dim() > 1), []).append(parameter)
    if not groups:
        raise InputError("every part of the model is frozen: nothing would be trained")
    on_gpu = any(p.device.type == "cuda" for ps in groups.values() for p in ps)
    return torch.optim.AdamW(
        [
            {
                "params": parameters,
                "lr": rates.get(part, lr),
                "peak": rates.get(part, lr),
                "weight_decay": weight_decay if decays else 0.0,
            }
            for (part, decays), parameters in groups.items()
        ],
        betas=betas,
        eps=eps,
        fused=on_gpu,
    )


def fill_state(optimizer: torch.optim.Optimizer) -> None:
    """AdamW's first state for parameters that have had no gradient yet (of layers that only images
    reach, after text alone), so that every checkpoint holds the same tensors."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                device = parameter.device if group["fused"] else torch.device("cpu")
                optimizer.state[parameter] = {
                    "step": torch.zeros((), device=device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def set_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Every group's learning rate becomes `factor` (0 to 1) of its highest."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor


def schedule(kind: str, steps: int, warmup_ratio: float) -> Callable[[int], float]:
    """Share of the highest learning rate, 0 to 1, of optimizer step 0, 1, ..., `steps` - 1.

    Linear warm-up over `warmup_ratio` of the steps, then a half cosine or a line to zero, or flat.
    """
    warmup = math.ceil(steps * warmup_ratio)

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if kind == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 0.5 * (1 + math.cos(math.pi * done)) if kind == "cosine" else 1 - done

    return rate
