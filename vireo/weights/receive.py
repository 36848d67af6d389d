"""Weights that arrive at a model of this process: from a folder, shared memory or a group."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from vireo.errors import InputError
from vireo.families import Family
from vireo.models.load import fill_from_checkpoint, targets_of
from vireo.parallel import alone
from vireo.weights.group import TIMEOUT_S, Group, join
from vireo.weights.named import Names, Shapes, compare
from vireo.weights.payload import unpack

Pairs = Iterable[tuple[str, Tensor]]


class Receiver:
    """Fills the parameters and persistent buffers of `hf`, a whole model, by checkpoint names.

    What comes with one call is checked before any of it is written: InputError names the tensor,
    what was found and what was expected. Values are cast to the types that the model has; what it
    held before may be garbage. Calls block, and must not overlap.
    """

    def __init__(self, hf: Any, family: Family):
        self.hf, self.family = hf, family
        self.names = Names(hf, family)
        self._groups: dict[str, Group] = {}

    def check(self, shapes: Shapes, *, whole: bool = False) -> None:
        """InputError: a name or shape is not the model's, or (`whole`) a tensor is lacking."""
        exported = {name: key for name in shapes if (key := self.names.exported(name))}
        known = {name: self.names.shapes[key] for name, key in exported.items()}
        if len(known) < len(shapes):  # the others are unknown: for the nearest name
            known |= self.names.shapes
        compare(shapes, known, whole=False)
        if whole:
            compare({key: self.names.shapes[key] for key in exported.values()}, self.names.shapes)

    def named(self, tensors: Pairs) -> None:
        """From tensors that come one at a time, each checked by itself: `check` all before."""
        self._write(self._each_checked(tensors))

    def from_disk(self, path: str) -> None:
        """From the weight files of a model folder: all tensors, none more."""
        fill_from_checkpoint(self.hf, path, alone())

    def from_tensors(self, payloads: Sequence[str]) -> None:
        """From payloads by rank of the engine (see `payload.packed`); this is rank 0."""
        if not payloads:
            raise InputError("serialized_named_tensors is empty: expected one payload")
        pairs = unpack(payloads[0])
        self.check({name: tuple(tensor.shape) for name, tensor in pairs})
        self._write(pairs)

    def init_group(
        self,
        address: str,
        port: int,
        rank: int,
        world: int,
        name: str,
        backend: str = "gloo",
        timeout: float = TIMEOUT_S,
    ) -> None:
        """Join the group of a trainer. InputError: there is one of this name. See `group.join`."""
        if name in self._groups:
            raise InputError(f"group {name} is there already: destroy it first")
        self._groups[name] = join(address, port, rank, world, name, backend, timeout)

    def from_group(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], name: str
    ) -> None:
        """From the broadcasts of a group, in this order. VireoError: it broke; what had come by
        then is written."""
        group = self._group(name)
        if not len(names) == len(dtypes) == len(shapes):
            raise InputError(f"{len(names)} names, {len(dtypes)} dtypes, {len(shapes)} shapes")
        self.check(dict(zip(names, map(tuple, shapes))))
        kinds = [getattr(torch, dtype, None) for dtype in dtypes]
        for tensor, dtype, kind in zip(names, dtypes, kinds):
            if not isinstance(kind, torch.dtype):
                raise InputError(f"{tensor}: dtype {dtype!r}, expected one such as bfloat16")
        blanks = (torch.empty(shape, dtype=kind) for shape, kind in zip(shapes, kinds))
        self._write((tensor, group.broadcast(blank)) for tensor, blank in zip(names, blanks))

    def destroy_group(self, name: str) -> None:
        """Leave a group. InputError: there is none of this name."""
        self._group(name).close()
        del self._groups[name]

    def checksums(self) -> dict[str, str]:
        """Checkpoint name -> 16 hex digits, a hash of the bytes that the model has: the same for
        equal values of equal type in any process."""
        found = self.names.published(targets_of(self.hf)[0].items())
        return {name: _hash(tensor) for name, tensor in found}

    def _group(self, name: str) -> Group:
        if name not in self._groups:
            raise InputError(f"group {name} does not exist; there are: {', '.join(self._groups)}")
        return self._groups[name]

    def _each_checked(self, tensors: Pairs) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self.check({name: tuple(tensor.shape)})
            yield name, tensor

    @torch.no_grad()
    def _write(self, tensors: Pairs) -> None:
        targets = targets_of(self.hf)[0]
        begun: dict[tuple[str, ...], dict[str, Tensor]] = {}
        for name, tensor in tensors:
            key = self.names.exported(name) or name
            group = self.names.by_key[key]
            if group.pieces[0].pattern is None:
                targets[group.names[0]].copy_(tensor)
                continue
            parts = begun.setdefault(group.names, {})
            parts[key] = tensor
            if len(parts) == len(group.pieces):
                self._convert(begun.pop(group.names), targets)
        for names, parts in begun.items():  # the rest is in another message, or stays as it is
            now = revert_weight_conversion(self.hf, {name: targets[name] for name in names})
            self._convert({**now, **parts}, targets)

    def _convert(self, parts: dict[str, Tensor], targets: dict[str, Tensor]) -> None:
        group = self.names.by_key[next(iter(parts))]
        read = self.names.layout.convert(group.names[0], group.pieces, lambda p: parts[p.key])
        for name, value in read.items():
            targets[name].copy_(value)


def _hash(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=8).hexdigest()
