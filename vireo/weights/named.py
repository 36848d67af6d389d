"""The names and shapes of a checkpoint: of a model's tensors, and of a model folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from vireo.errors import InputError
from vireo.families import Family
from vireo.models.layout import Layout, Stored, save_as_published
from vireo.models.load import targets_of, weight_files
from vireo.nearest import nearest

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Group:
    """Tensors in memory, by name, that are `pieces` in a checkpoint: most one and one."""

    names: tuple[str, ...]
    pieces: list[Stored]


class Names:
    """What exports call the tensors of a model, tied ones once. `shapes`: of checkpoint names."""

    def __init__(self, hf: Any, family: Family):
        self.hf, self.family = hf, family
        targets, self.tied = targets_of(hf)
        self.layout = Layout(hf, targets | {n: targets[other] for n, other in self.tied.items()})
        save_as_published(hf)
        blank = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in targets.items()}
        placed: dict[str, list[Stored]] = {}
        for key, value in revert_weight_conversion(hf, blank).items():
            name, pattern = self.layout.place(key)
            piece = Stored(key, "", tuple(value.shape), value.dtype, pattern)
            placed.setdefault(self.tied.get(name, name), []).append(piece)
        self.by_name: dict[str, Group] = {}
        for name, pieces in placed.items():
            made = self.layout.convert(name, pieces, Stored.blank) if pieces[0].pattern else [name]
            group = Group(tuple(dict.fromkeys((name, *made))), pieces)
            self.by_name |= dict.fromkeys(group.names, group)
        if lost := set(targets) ^ set(self.by_name):
            raise InputError(f"{family.name}: no checkpoint name leads back to {min(lost)}")
        self.by_key = {p.key: group for group in self.by_name.values() for p in group.pieces}
        self.shapes = {p.key: p.shape for group in self.by_name.values() for p in group.pieces}
        self._inner = {self.layout.inner(key): key for key in self.shapes}

    def exported(self, key: str) -> str | None:
        """`key` as exports call it: other checkpoints may have a prefix more, or tied tensors
        twice. None: no checkpoint's name; a name of memory, which engines may skip, is none."""
        if key in self.shapes:
            return key
        if (name := self.layout.place(key)[0]) in self.tied:
            return self.by_name[self.tied[name]].pieces[0].key
        return None if key in self.layout.known else self._inner.get(self.layout.inner(key))

    def published(
        self, tensors: Iterable[tuple[str, Tensor]], like: Iterable[str] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, tensor) of full tensors that come under their names in memory.

        Only those that are converted together wait for each other. `like`: the names of the
        checkpoint that an engine has, where they are not an export's. InputError: a tensor that a
        checkpoint does not have (an adapter), or one that is lacking for a conversion.
        """
        called: dict[str | None, list[str]] = {}
        for key in like:
            called.setdefault(self.exported(key), []).append(key)
        waiting: dict[tuple[str, ...], dict[str, Tensor]] = {}
        for name, tensor in tensors:
            if name in self.tied:
                continue
            if (group := self.by_name.get(name)) is None:
                raise InputError(
                    f"{name} is in no {self.family.name} checkpoint; merge adapters first"
                )
            parts = waiting.setdefault(group.names, {})
            parts[name] = tensor.detach()
            if len(parts) == len(group.names):
                del waiting[group.names]
                made = {group.pieces[0].key: parts[name]}
                if group.pieces[0].pattern is not None:
                    made = revert_weight_conversion(self.hf, parts)
                yield from ((each, t) for key, t in made.items() for each in called.get(key, [key]))
        if waiting:
            lone = min(next(iter(waiting.values())))
            raise InputError(f"lacking beside {lone}: what it goes with")


def published(
    hf: Any, family: Family, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """`Names.published`, for once."""
    return Names(hf, family).published(tensors)


def shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Checkpoint name -> shape, by the headers of a model folder's weight files. InputError: there
    are none, or they cannot be read."""
    found: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as handle:
                names = handle.keys()
                found |= {name: tuple(handle.get_slice(name).get_shape()) for name in names}
        except (OSError, SafetensorError) as error:
            raise InputError(f"{file}: its header cannot be read: {error}") from error
    return found


def compare(found: Shapes, expected: Shapes, *, whole: bool = True, more: str = "") -> None:
    """InputError: one of `found` is not as `expected`, or (`whole`) one is lacking."""
    strange = next((name for name in found if name not in expected), None)
    lacking = next((name for name in expected if name not in found), None) if whole else None
    if name := strange or lacking:
        what = "has no such tensor" if strange else "has it, and it is not among those to be sent"
        near = f" (nearest: {nearest(name, expected if strange else found) or 'none'})"
        raise InputError(f"{name}: the engine's checkpoint {what}{near}{more}")
    for name, shape in found.items():
        if tuple(shape) != (wanted := tuple(expected[name])):
            raise InputError(f"{name} has shape {tuple(shape)}, the engine's has {wanted}{more}")
