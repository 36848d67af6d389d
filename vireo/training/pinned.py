"""Host memory that a GPU copies to and from at full speed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from vireo.errors import VireoError

_PAGE = 4096
_THREADS = 8  # pages are taken one after the other otherwise: 4 times as long


class Pinned:
    """`data`: uint8 [size] of the host, page-locked for CUDA if `cuda`, until `close`.

    torch's own `pin_memory` rounds each request up to a power of two, and takes pages with one
    thread. VireoError: the host has not so much memory, or the limit of locked memory is lower.
    """

    def __init__(self, size: int, cuda: bool):
        try:
            whole = torch.empty(size + _PAGE, dtype=torch.uint8)
        except RuntimeError as error:
            raise VireoError(f"the host has no {size / 1e9:.1f} GB of memory left") from error
        first = -whole.data_ptr() % _PAGE
        self.data = whole[first : first + size]
        self._locked: list[Tensor] = []
        if not cuda:
            return
        share = -(-size // (_THREADS * _PAGE)) * _PAGE
        parts = [part for part in self.data.split(max(share, _PAGE)) if len(part)]
        with ThreadPoolExecutor(_THREADS) as threads:
            answers = list(threads.map(_lock, parts))
        self._locked = [part for part, answer in zip(parts, answers) if answer == 0]
        if wrong := next((answer for answer in answers if answer), 0):
            self.close()
            raise VireoError(
                f"{size / 1e9:.1f} GB of host memory cannot be page-locked (CUDA error {wrong}): "
                "raise the limit (ulimit -l unlimited), or move less (--trainer_offload optimizer "
                "or none)"
            )

    def close(self) -> None:
        for part in self._locked:
            torch.cuda.cudart().cudaHostUnregister(part.data_ptr())
        self._locked = []


def _lock(part: Tensor) -> int:
    part.zero_()  # so that the pages are there
    return int(torch.cuda.cudart().cudaHostRegister(part.data_ptr(), len(part), 0))
