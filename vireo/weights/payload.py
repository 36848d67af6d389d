"""Tensors for another process of the same machine: in shared memory, told by a small pickle.

The pickle is what SGLang reads for one rank: base64 of [(name, tensor)], of nothing but the helpers
that torch has for this. Reading one here runs no code but theirs.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import pickle
import shutil
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import rebuild_storage_filename

from vireo.errors import InputError, VireoError, first_line
from vireo.weights.flat import Named, copied, laid_out
from vireo.weights.gpu_payload import rebuilt_on_gpu

SHARED = "/dev/shm"
# torch counts a reading down when it ends, and whoever comes to 0 deletes the memory: never, if a
# reader does not come, and a process that finds it gone by then aborts. So memory is deleted here
# alone, and counted up before for more readings than there are.
READS = 1000

CUDA = ("torch.multiprocessing.reductions", "rebuild_cuda_tensor")
ALLOWED = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch", "Tensor"),
    CUDA,
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
    ("torch.storage", "TypedStorage"),
    ("torch.storage", "UntypedStorage"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}


@contextlib.contextmanager
def packed(named: Sequence[Named]) -> Iterator[list[str]]:
    """Payloads by rank of the engine (one rank) of copies in shared memory. The memory is given
    back at the end, whether or not anyone has read it. VireoError: there is not enough of it."""
    starts, size = laid_out(named)
    if size > (free := shutil.disk_usage(SHARED).free):
        raise VireoError(
            f"{SHARED} has {free} bytes left and weights need {size} at a time: make it larger "
            "(docker run --shm-size), or send weights through a folder"
        )
    storage = UntypedStorage._new_using_filename_cpu(size)
    place = SHARED + storage._share_filename_cpu_()[1].decode()
    for _ in range(READS):
        storage._shared_incref()
    try:
        yield [_pickled(storage, named, starts)]
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(place)


def _pickled(storage: UntypedStorage, named: Sequence[Named], starts: list[int]) -> str:
    out = io.BytesIO()
    _Pickler(out).dump(copied(named, storage, starts))
    return base64.b64encode(out.getvalue()).decode()


class _Pickler(ForkingPickler):
    """Shares by file name, which any process can open; torch's switch is for all it ever sends."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, UntypedStorage):
            return NotImplemented
        _, name, size = value._share_filename_cpu_()
        # Not this process's manager, which gives the memory back when its clients have ended: the
        # reader, a server that lives on, would be one of them. It has a manager of its own.
        return rebuild_storage_filename, (UntypedStorage, b"", name, size)


def unpack(payload: str) -> list[Named]:
    """(name, tensor) pairs of a payload, in the sender's memory.

    InputError: it is none, its memory is gone, or it names anything but what torch needs for
    tensors; what it names is not run.
    """
    try:
        found = _Unpickler(io.BytesIO(base64.b64decode(payload, validate=True))).load()
    except InputError:
        raise
    except Exception as error:  # bytes of others: any error may come of them
        raise InputError(f"a payload of weights cannot be read: {first_line(error)}") from error
    pairs = found if isinstance(found, list) else [found]
    for pair in pairs:
        if not (isinstance(pair, tuple) and [type(part) for part in pair] == [str, Tensor]):
            raise InputError(f"a payload of weights has {type(pair).__name__}, not (name, tensor)")
    return pairs


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise InputError(f"a payload of weights names {module}.{name}, which is not allowed")
        if (module, name) == CUDA:
            return rebuilt_on_gpu
        return super().find_class(module, name)
