"""The memory of a trainer, given back while somebody else needs the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from vireo.training.engine import TrainEngine


class Offload:
    """Moves what an engine keeps between two steps to host memory and back, in place.

    Storages are emptied and filled again, so every tensor that looks at one, FSDP's own views too,
    stays the object that it was. Nothing may be computed with them in between. `what`: all, only
    what the optimizer keeps (optimizer), or none. Calls may be repeated; only the first counts.
    """

    def __init__(self, engine: TrainEngine, what: str = "all"):
        self.engine, self.what = engine, what
        self._kept: list[tuple[UntypedStorage, Tensor]] = []

    def away(self) -> None:
        if self._kept:
            return
        self.engine.reshard()
        cuda = self.engine.parallel.device.type == "cuda"
        for storage in self._storages():
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            kept = torch.empty(len(flat), dtype=torch.uint8, pin_memory=cuda)
            self._kept.append((storage, kept.copy_(flat, non_blocking=cuda)))
        if cuda:
            torch.cuda.synchronize()
        for storage, _ in self._kept:
            storage.resize_(0)
        if cuda:
            torch.cuda.empty_cache()

    def back(self) -> None:
        for storage, kept in self._kept:
            storage.resize_(len(kept))
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            flat.copy_(kept, non_blocking=True)
        if self._kept and self.engine.parallel.device.type == "cuda":
            torch.cuda.synchronize()  # before the host's copies go
        self._kept = []

    def _storages(self) -> Iterator[UntypedStorage]:
        """Each once: tensors may share one."""
        seen = set[int]()
        for tensor in self._tensors():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage

    def _tensors(self) -> Iterator[Tensor]:
        if self.what == "none":
            return
        for state in self.engine.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        if self.what == "all":
            yield from (parameter.detach() for parameter in self.engine.policy.parameters())
            yield from self.engine.policy.buffers()
