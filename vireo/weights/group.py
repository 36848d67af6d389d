"""A process group of two that is not the default one: a trainer (rank 0) and an engine.

Keys in the store are those of stock SGLang, so that either side may be one. Neither side needs a
default group, and one that is there is left alone.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

from vireo.errors import InputError, VireoError, first_line

DEVICES = {"gloo": "cpu"}
TIMEOUT_S = 300.0


class Group:
    """One end of the group; see `join`."""

    def __init__(self, name: str, rank: int, ends: Any):
        self.name, self.rank, self._ends = name, rank, ends

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Send `tensor` (rank 0), or fill it, contiguous and on the CPU, with what rank 0 sends.

        Bytes are sent: both sides know shape and type. VireoError: the other side is gone, or took
        longer than the time limit.
        """
        if self._ends is None:
            raise VireoError(f"group {self.name} is closed")
        if self.rank == 0:
            tensor = tensor.detach().cpu().contiguous()
        try:
            self._ends.broadcast(tensor.reshape(-1).view(torch.uint8), 0).wait()
        except RuntimeError as error:
            raise VireoError(f"group {self.name} broke: {first_line(error)}") from error
        return tensor

    def close(self) -> None:
        """Leave it; the other side's next call fails. May be called again."""
        self._ends = None


def known(backend: str) -> str:
    """What a backend's keys begin with. InputError: Vireo does not have this backend."""
    if backend not in DEVICES:
        raise InputError(f"group backend {backend!r}: expected {' or '.join(DEVICES)}")
    return DEVICES[backend]


def listen(address: str) -> socket.socket:
    """A free port for rank 0 to wait at. InputError: `address` is not this machine's."""
    try:
        return socket.create_server((address, 0))
    except OSError as error:
        raise InputError(f"no port can be opened at {address}, this machine's?: {error}") from error


def join(
    address: str,
    port: int,
    rank: int,
    world: int,
    name: str,
    backend: str = "gloo",
    timeout: float = TIMEOUT_S,
    listener: socket.socket | None = None,
) -> Group:
    """This side of the group `name`, once all have joined at rank 0's `address` and `port`.

    timeout: seconds to wait for the others, here and in every call.
    listener: rank 0's, if it has one that listens already; it is used up.
    InputError: no such backend. VireoError: not all came.
    """
    keys = (name, f"{name}/", f"{known(backend)}/")
    limit = timedelta(seconds=timeout)
    fd = None if listener is None else listener.detach()
    try:
        store: Store = TCPStore(address, port, world, rank == 0, limit, master_listen_fd=fd)
        for prefix in keys:
            store = PrefixStore(prefix, store)
        return Group(name, rank, ProcessGroupGloo(store, rank, world, limit))
    except RuntimeError as error:
        what = first_line(error)
        raise VireoError(f"group {name} at {address}:{port}: not all joined: {what}") from error
