"""The memory of a trainer, given back while somebody else needs the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from vireo.training.engine import TrainEngine
from vireo.training.pinned import Pinned


class Offload:
    """Moves what an engine keeps between two steps to host memory and back, in place.

    Storages are emptied and filled again, so every tensor that looks at one, FSDP's own views too,
    stays the object that it was. Nothing may be computed with them in between. `what`: all, only
    what the optimizer keeps (optimizer), or none. Calls may be repeated; only the first counts.
    """

    def __init__(self, engine: TrainEngine, what: str = "all"):
        self.engine, self.what = engine, what
        self._kept: list[tuple[UntypedStorage, Tensor]] = []
        self._host: Pinned | None = None  # for the whole run: locking its pages takes seconds

    def away(self) -> None:
        if self._kept:
            return
        self.engine.reshard()
        cuda = self.engine.parallel.device.type == "cuda"
        storages = list(self._storages())
        host, start = self._room(sum(storage.nbytes() for storage in storages), cuda), 0
        for storage in storages:
            kept = host[start : start + storage.nbytes()]
            self._kept.append((storage, kept.copy_(_bytes(storage), non_blocking=cuda)))
            start += storage.nbytes()
        if cuda:
            torch.cuda.synchronize()
        for storage, _ in self._kept:
            storage.resize_(0)
        if cuda:
            torch.cuda.empty_cache()

    def back(self) -> None:
        for storage, kept in self._kept:
            storage.resize_(len(kept))
            _bytes(storage).copy_(kept, non_blocking=True)
        if self._kept and self.engine.parallel.device.type == "cuda":
            torch.cuda.synchronize()  # before anybody computes with them
        self._kept = []

    def _room(self, size: int, cuda: bool) -> Tensor:
        """Host memory for `size` bytes, which grows once the optimizer has its states."""
        if self._host is None or len(self._host.data) < size:
            if self._host is not None:
                self._host.close()
            self._host = None  # gone before the next is there
            self._host = Pinned(size, cuda)
        return self._host.data

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


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
