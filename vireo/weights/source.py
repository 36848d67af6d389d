"""Weights for an engine: where they are. Names are those of the published checkpoint on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Folder:
    """A model folder that the engine can read, as exported: the way that works everywhere."""

    path: str


@dataclass(frozen=True)
class Tensors:
    """Tensors of this process, one at a time, under checkpoint names; sent over shared memory on
    the same machine. `named` may be called several times: first to check names and shapes."""

    named: Callable[[], Iterator[tuple[str, Tensor]]]


@dataclass(frozen=True)
class Broadcast:
    """As `Tensors`, sent over a process group of this process (rank 0) and the engine."""

    named: Callable[[], Iterator[tuple[str, Tensor]]]
    address: str = "127.0.0.1"
    backend: str = "gloo"


@dataclass(frozen=True)
class Shared:
    """Nothing is sent: the engine computes with the very parameters that were trained."""


Weights = Folder | Tensors | Broadcast | Shared
