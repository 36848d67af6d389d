"""Tensors beside each other in one storage."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, UntypedStorage

Named = tuple[str, Tensor]
ALIGN = 64  # bytes: a tensor of any type may start there


def laid_out(named: Sequence[Named]) -> tuple[list[int], int]:
    """Where each tensor starts, and the size of all: bytes."""
    starts, size = [], 0
    for _, tensor in named:
        starts.append(size)
        size += math.ceil(max(tensor.nbytes, 1) / ALIGN) * ALIGN
    return starts, max(size, ALIGN)


def copied(named: Sequence[Named], storage: UntypedStorage, starts: Sequence[int]) -> list[Named]:
    """Copies of the tensors, which are views of `storage`."""
    copies = []
    for (name, tensor), start in zip(named, starts):
        copy = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        copy.set_(storage, start // tensor.itemsize, tensor.shape)  # type: ignore[call-overload]
        copies.append((name, copy.copy_(tensor.detach())))
    return copies
