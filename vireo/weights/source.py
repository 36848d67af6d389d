"""Weights for an engine: where they are. Names are those of the published checkpoint on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from vireo.errors import InputError

Named = Callable[[], Iterator[tuple[str, Tensor]]]
Sizes = dict[str, tuple[tuple[int, ...], int]]  # name -> shape, bytes


@dataclass(frozen=True)
class Folder:
    """A model folder that the engine can read, as exported: the way that works everywhere."""

    path: str


@dataclass(frozen=True)
class Tensors:
    """Tensors of this process, one at a time, under checkpoint names; sent over shared memory on
    the same machine. `named` is called twice, first to check names and shapes, unless `sizes` has
    them. `on_gpu`: tensors of a GPU stay there, where the engine, which must see that GPU, reads
    them."""

    named: Named
    sizes: Sizes | None = None
    on_gpu: bool = False


@dataclass(frozen=True)
class Broadcast:
    """As `Tensors`, sent over a process group of this process (rank 0) and the engine."""

    named: Named
    sizes: Sizes | None = None
    address: str = "127.0.0.1"
    backend: str = "gloo"


@dataclass(frozen=True)
class Shared:
    """Nothing is sent: the engine computes with the very parameters that were trained."""


Weights = Folder | Tensors | Broadcast | Shared


def sizes_of(named: Named) -> Sizes:
    """InputError: a name comes twice."""
    sizes: Sizes = {}
    for name, tensor in named():
        if name in sizes:
            raise InputError(f"{name} would be sent twice")
        sizes[name] = (tuple(tensor.shape), tensor.nbytes)
    return sizes
