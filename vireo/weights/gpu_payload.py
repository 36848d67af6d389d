"""Tensors of a GPU for another process, which reads them there: CUDA IPC.

The pickle is what `vireo.weights.payload` describes, with torch's reductions for CUDA tensors.
torch numbers GPUs as this process sees them; as in SGLang, a GPU is told by its UUID instead.
"""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from vireo.errors import InputError
from vireo.weights.flat import Named, copied, laid_out

_DEVICE = 6  # which argument of rebuild_cuda_tensor


@contextlib.contextmanager
def packed_on_gpu(named: Sequence[Named]) -> Iterator[list[str]]:
    """As `payload.packed`, for tensors of one GPU: copies in one allocation of it.

    torch keeps the allocation until the reader has let go of all of it, so it is never written
    again while it is read."""
    device = named[0][1].device
    starts, size = laid_out(named)
    storage = UntypedStorage(size, device=device)
    copies = copied(named, storage, starts)
    torch.cuda.synchronize(device)  # the reader does not wait for this process's stream
    out = io.BytesIO()
    _Pickler(out).dump(copies)
    yield [base64.b64encode(out.getvalue()).decode()]
    del copies, storage
    torch.cuda.ipc_collect()


class _Pickler(ForkingPickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        rebuild, given = reduce_tensor(value)
        return rebuild, (*given[:_DEVICE], uuid(given[_DEVICE]), *given[_DEVICE + 1 :])


def rebuilt_on_gpu(*given: Any) -> Tensor:
    """`rebuild_cuda_tensor`, told the GPU by UUID. InputError: this process does not see it."""
    rest = (_index(given[_DEVICE]), *given[_DEVICE + 1 :])
    return rebuild_cuda_tensor(*given[:_DEVICE], *rest)


def uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _index(gpu: Any) -> int:
    for device in range(torch.cuda.device_count()):
        if gpu in (device, uuid(device)):
            return device
    raise InputError(f"weights are on the GPU {gpu}, which this process does not see")
