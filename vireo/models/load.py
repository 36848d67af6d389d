"""Fill a (sharded) model from safetensors files: rank 0 reads, every rank keeps its part.

A tensor crosses in slices of rows, so a rank never needs more memory than its own shards and one
slice; rank 0, of a tensor that is made of several, twice its size (see models.layout).
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from vireo.errors import InputError
from vireo.models.layout import Layout, Stored, misshapen, some
from vireo.models.names import is_adapter, plain_name
from vireo.parallel import Parallel

SLICE_BYTES = 64 << 20


def fill_from_checkpoint(hf: Any, path: str, parallel: Parallel) -> None:
    """Copy every parameter and persistent buffer of `hf` from the files in `path`.

    Raises InputError on every rank if a tensor is missing, left over, or has another shape.
    """
    targets, tied = targets_of(hf)
    layout = Layout(hf, _base_state(hf))
    plan: list = [None]
    files: dict[str, Any] = {}
    if parallel.rank == 0:
        try:
            files = {p.name: safe_open(p, framework="pt") for p in weight_files(path)}
            plan[0] = _plan(layout, path, files, targets, tied)
        except InputError as error:
            plan[0] = error
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            plan[0] = InputError(f"{path}: its weights cannot be read: {error}")
    if parallel.world > 1:
        dist.broadcast_object_list(plan, src=0, device=torch.device("cpu"))
    if isinstance(plan[0], InputError):
        raise plan[0]
    for step in plan[0]:
        _fill(targets, step, layout, files, parallel)


@dataclass(frozen=True)
class Step:
    """What is read at once: `fills` are names in memory (`name` is the first) and types on disk."""

    name: str
    pieces: list[Stored]
    fills: dict[str, torch.dtype]

    def open(self, layout: Layout, files: dict[str, Any]) -> dict[str, Any]:
        """Name in memory -> what rows can be read from: a part of a file, or a tensor made."""
        first = self.pieces[0]
        if first.pattern is None:
            return {self.name: files[first.file].get_slice(first.key)}
        return layout.convert(self.name, self.pieces, lambda p: files[p.file].get_tensor(p.key))


def _fill(
    targets: dict[str, Tensor],
    step: Step,
    layout: Layout,
    files: dict[str, Any],
    parallel: Parallel,
) -> None:
    source = step.open(layout, files) if parallel.rank == 0 else {}
    for name, dtype in step.fills.items():
        _receive(targets[name], source.get(name), dtype, parallel)


def targets_of(hf: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Name -> tensor of everything a checkpoint holds, tied ones once; tied name -> its target."""
    targets: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, value in _base_state(hf).items():
        if id(value) in names:
            tied[name] = names[id(value)]
        else:
            names[id(value)] = name
            targets[name] = value
    return targets, tied


def fingerprint(path: str) -> int:
    """A checksum of the weight files: their headers, and 4 KiB from the middle of each tensor."""
    value = 0
    for file in weight_files(path):
        with file.open("rb") as handle:
            size = int.from_bytes(handle.read(8), "little")
            header = handle.read(size)
            value = zlib.crc32(header, value)
            tensors = {n: t for n, t in json.loads(header).items() if n != "__metadata__"}
            for start, stop in sorted(tensor["data_offsets"] for tensor in tensors.values()):
                handle.seek(8 + size + start + max(0, (stop - start) // 2 - 2048))
                value = zlib.crc32(handle.read(min(4096, stop - start)), value)
    return value


def _base_state(hf: Any) -> dict[str, Tensor]:
    """What a checkpoint of the model without adapters holds, by its names."""
    state = hf.state_dict(keep_vars=True).items()
    return {plain_name(name): value for name, value in state if not is_adapter(name)}


def _plan(
    layout: Layout,
    path: str,
    files: dict[str, Any],
    targets: dict[str, Tensor],
    tied: dict[str, str],
) -> list[Step]:
    """How to fill every target, from the headers of the files alone."""
    plain: dict[str, Stored] = {}
    converted: dict[str, list[Stored]] = {}
    extra = []
    for file, handle in files.items():
        for key in handle.keys():  # noqa: SIM118 - a safetensors handle is no dict
            name, pattern = layout.place(key)
            name = tied.get(name, name)
            if name not in targets:
                extra.append(key)
                continue
            view = handle.get_slice(key)
            shape, dtype = tuple(view.get_shape()), _dtype(path, key, view)
            piece = Stored(key, file, shape, dtype, pattern)
            if pattern is not None:
                converted.setdefault(name, []).append(piece)
                continue
            if shape != (wanted := tuple(targets[name].shape)):
                raise InputError(misshapen(path, key, shape, wanted))
            if first := plain.get(name):
                _check_equal(path, first.key, files[first.file].get_slice(first.key), key, view)
            else:
                plain[name] = piece
    steps = [Step(name, [piece], {name: piece.dtype}) for name, piece in plain.items()]
    for name, pieces in converted.items():
        made = layout.check(path, name, pieces)
        steps.append(Step(name, pieces, {n: value.dtype for n, value in made.items()}))
        extra += [plain[n].key for n in made if n in plain]  # stored whole and in pieces
    lacking = sorted(set(targets) - {name for step in steps for name in step.fills})
    for what, names in (("lacks", lacking), ("has unknown", extra)):
        if names:
            raise InputError(f"{path}: the checkpoint {what} tensors: {some(names)}")
    return steps


def _dtype(path: str, key: str, view: Any) -> torch.dtype:
    """The type of a tensor in a file."""
    name = str(view.get_dtype())
    if name not in _DTYPES:
        raise InputError(
            f"{path}: {key} is of type {name}, which cannot be trained; convert it to bf16 first"
        )
    return _DTYPES[name]


def _check_equal(path: str, first: str, a: Any, second: str, b: Any) -> None:
    """Two tensors of a file that the config says are one must be equal."""
    rows = a.get_shape()[0]
    step = max(1, SLICE_BYTES // max(1, math.prod(a.get_shape()[1:]) * 4))
    for start in range(0, rows, step):
        if not torch.equal(a[start : start + step], b[start : start + step]):
            raise InputError(
                f"{path}: {first} and {second} differ, and the config ties them "
                "(tie_word_embeddings): set it to false to keep both"
            )


def weight_files(path: str) -> list[Path]:
    folder = Path(path)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise InputError(f"{path}: {missing[0]}, named in {index.name}, is missing")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if not single.exists():
        raise InputError(f"{path}: no model.safetensors (nor an index of several) in this folder")
    return [single]


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}


@torch.no_grad()
def _receive(target: Tensor, read: Any, kind: torch.dtype, parallel: Parallel) -> None:
    """Fill `target` (a DTensor sharded on dim 0, or a plain tensor) slice by slice."""
    if target.dim() == 0:
        value = (
            read[...].clone()
            if read is not None
            else torch.empty((), dtype=kind, device=parallel.device)
        )
        value = _share(value, parallel)
        (target.to_local() if isinstance(target, DTensor) else target).copy_(value)
        return
    local, first = target, 0
    if isinstance(target, DTensor):
        local = target.to_local()
        _, offsets = compute_local_shape_and_global_offset(
            target.shape, target.device_mesh, target.placements
        )
        first = offsets[0]
    rows = target.shape[0]
    row_bytes = max(1, math.prod(target.shape[1:]) * kind.itemsize)
    step = max(1, SLICE_BYTES // row_bytes)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        if read is not None:
            piece = read[start:stop]
        else:
            shape = (stop - start, *target.shape[1:])
            piece = torch.empty(shape, dtype=kind, device=parallel.device)
        piece = _share(piece, parallel)
        a, b = max(start, first), min(stop, first + local.shape[0])
        if a < b and local.numel():
            local[a - first : b - first].copy_(piece[a - start : b - start])


def _share(piece: Tensor, parallel: Parallel) -> Tensor:
    if parallel.world == 1:
        return piece
    piece = piece.to(parallel.device).contiguous()
    dist.broadcast(piece, src=0)
    return piece
