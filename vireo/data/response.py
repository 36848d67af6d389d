"""A prompt with a response behind it: the example that the trainer scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vireo.data.ragged import IGNORE, Example


def with_response(
    prompt: Example,
    response: Sequence[int],
    positions: Callable[[dict[str, Tensor]], Tensor],
    mask: Sequence[float] | None = None,
) -> Example:
    """The example of prompt and response: every response token is a label, with the loss weight of
    `mask` (1 each by default).

    `positions` is the renderer's. The processor's tensors are the prompt's own; token keys go on as
    their kind says (`Key.grow`), which is what generation gives new tokens.
    """
    new = torch.tensor(response, dtype=torch.int64)
    weights = torch.ones(len(new)) if mask is None else torch.tensor(mask, dtype=torch.float32)
    if len(weights) != len(new):
        raise ValueError(f"a mask of {len(weights)} values for {len(new)} response tokens")
    fields = {}
    for name, value in prompt.fields.items():
        key = prompt.keys[name]
        if name == "positions":
            continue
        if name == "input_ids":
            value = torch.cat([value, new])
        elif name == "labels":
            value = torch.cat([torch.full_like(value, IGNORE), new])
        elif name == "loss_weight":
            value = torch.cat([torch.zeros_like(value), weights])
        elif key.kind == "token":
            last = value.narrow(key.axis, value.shape[key.axis] - 1, 1)
            shape = list(value.shape)
            shape[key.axis] = len(new)
            more = last.expand(shape) if key.grow == "last" else value.new_full(shape, key.fill)
            value = torch.cat([value, more], dim=key.axis)
        fields[name] = value
    fields["positions"] = positions(fields)
    return Example(fields, prompt.keys, prompt.images, prompt.where)
