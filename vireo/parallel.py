"""The process group and the mesh of a run: one process or many, CPU or GPU, the same code."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from vireo.errors import InputError


@dataclass
class Parallel:
    """Who this process is. `mesh` is None where nothing is sharded."""

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh | None
    owner: bool = False  # whether this object made the process group, and so ends it

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over ranks of a few numbers, exact for counts up to 2^53."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: list[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: list[float], op: Any) -> list[float]:
        if self.world == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers, op=op)
        return numbers.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (any picklable object), by rank, on every rank."""
        if self.world == 1:
            return [value]
        out: list[Any] = [None] * self.world
        dist.all_gather_object(out, value)
        return out

    def exchange(self, outgoing: Sequence[Sequence[Any]]) -> list[Any]:
        """What every rank has for this one (picklable objects), by sender; collective.

        `outgoing[r]` goes to rank r alone, over the CPU (no CUDA tensors). Ranks that have nothing
        for each other exchange no more than its size, 0.
        """
        if self.world == 1:
            return list(outgoing[0])
        files = [io.BytesIO() for _ in outgoing]
        for rank, (file, items) in enumerate(zip(files, outgoing)):
            if items and rank != self.rank:
                pickle.dump(list(items), file)
        sizes = torch.tensor([len(file.getbuffer()) for file in files])
        coming = torch.empty_like(sizes)
        dist.all_to_all_single(coming, sizes)
        received = [torch.empty(size, dtype=torch.uint8) for size in coming.tolist()]
        work = [dist.irecv(data, rank) for rank, data in enumerate(received) if len(data)]
        for rank, file in enumerate(files):
            if sizes[rank]:
                sent = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
                work.append(dist.isend(sent, rank))
        for one in work:
            assert one is not None
            one.wait()
        parts = [pickle.loads(data.numpy().data) if len(data) else [] for data in received]
        parts[self.rank] = outgoing[self.rank]
        return [item for part in parts for item in part]

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def close(self) -> None:
        if self.owner and dist.is_initialized():
            dist.destroy_process_group()


def whole(value: Tensor) -> Tensor:
    """All of a tensor that may be sharded; collective if it is."""
    if not isinstance(value, DTensor):
        return value
    return value.full_tensor() if value.device_mesh.size() > 1 else value.to_local()


def alone() -> Parallel:
    """One process on the CPU that needs no process group: for tools that read and write models."""
    return Parallel(0, 1, torch.device("cpu"), None)


def start(
    shard: bool = True,
    sharding: str = "full",
    shard_size: int | None = None,
    timeout_s: float | None = None,
) -> Parallel:
    """Join the process group that torchrun describes, or make one of a single process.

    `hybrid` shards over `shard_size` ranks (default: the GPUs of a node) and replicates over the
    rest; it needs a world larger than that.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_RANK", 0))
    if not shard and world > 1:
        raise InputError(f"--fsdp_enable false runs one rank, and torchrun started {world}")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if not shard:
        return Parallel(0, 1, device, None)
    if sharding == "full" and shard_size is not None:
        raise InputError("--fsdp_shard_size is for --fsdp_sharding hybrid; leave it out")
    shape, names = mesh_shape(sharding, shard_size, world)
    owner = not dist.is_initialized()
    if owner:
        timeout = timedelta(seconds=timeout_s or float(os.environ.get("VIREO_TIMEOUT_S", 1800)))
        # Small counts travel over gloo on the CPU, gradients over NCCL.
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        if world == 1:
            store = dist.HashStore()
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    return Parallel(rank, world, device, mesh, owner)


def mesh_shape(
    sharding: str, shard_size: int | None, world: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Shape and dimension names of the device mesh."""
    if sharding == "full":
        return (world,), ("shard",)
    size = shard_size or int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if size >= world or world % size:
        raise InputError(
            f"--fsdp_sharding hybrid shards over {size} ranks and needs a larger world that is a "
            f"multiple of it, found {world}; set --fsdp_shard_size, or use full"
        )
    return (world // size, size), ("replicate", "shard")
