"""Widths that a GPU's matrix kernels like.

The towers of Qwen2.5-VL have an inner width of 3,420, no multiple of 8, which leaves cuBLAS an old,
unaligned kernel. With columns of zeros beside it the products are the same numbers.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

_MULTIPLE = 8  # of 16-bit numbers: 16 bytes


def align_gated(model: nn.Module) -> int:
    """Let gated MLPs (gate_proj, up_proj, down_proj) of an awkward width compute in the next good
    one where that is faster, on a GPU in 16 bits; how many there are. Their weights stay."""
    found = 0
    module: Any
    for module in model.modules():
        if _plain(module) and module.down_proj.in_features % _MULTIPLE:
            module.forward = MethodType(_gated, module)
            found += 1
    return found


def _plain(module: Any) -> bool:
    """Whether it is such an MLP, of linear layers without adapters."""
    parts = [getattr(module, f"{name}_proj", None) for name in ("gate", "up", "down")]
    return all(type(part) is nn.Linear for part in parts) and hasattr(module, "act_fn")


def _gated(self: Any, x: Tensor) -> Tensor:
    short = x.dtype.itemsize == 2 or torch.is_autocast_enabled("cuda")
    if x.is_cuda and short and _plain(self):
        return gated(self, x)
    return type(self).forward(self, x)


def gated(mlp: Any, x: Tensor) -> Tensor:
    """down(act(gate(x)) * up(x)), computed in the next width that is a multiple of 8."""
    more = -mlp.down_proj.in_features % _MULTIPLE
    inner = mlp.act_fn(_wider(mlp.gate_proj, x, more)) * _wider(mlp.up_proj, x, more)
    return linear(inner, pad(mlp.down_proj.weight, (0, more)), mlp.down_proj.bias)


def _wider(layer: nn.Linear, x: Tensor, more: int) -> Tensor:
    bias = None if layer.bias is None else pad(layer.bias, (0, more))
    return linear(x, pad(layer.weight, (0, 0, 0, more)), bias)
