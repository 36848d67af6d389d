"""From the tensors of a checkpoint to those of a model, by transformers' own table for the model.

Most are only renamed. Some are converted: experts that are stored one by one are one tensor in
memory, others are stored transposed.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from vireo.errors import InputError


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: `pattern` is what the table knows it by, None if it is only renamed."""

    key: str
    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pattern: str | None = None

    def blank(self) -> Tensor:
        """A tensor of this shape and type that has no values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class Layout:
    """How the checkpoints of a model are laid out; `known` are the names that it has in memory."""

    def __init__(self, hf: Any, known: dict[str, Tensor]):
        self.hf, self.known = hf, known
        table = get_model_conversion_mapping(hf)
        self.renamings: Any = [entry for entry in table if isinstance(entry, WeightRenaming)]
        self.converters: Any = [entry for entry in table if isinstance(entry, WeightConverter)]

    def place(self, key: str) -> tuple[str, str | None]:
        """Key on disk -> name in memory (the first, of several), and the pattern that converts."""
        prefix = self.hf.base_model_prefix
        return rename_source_key(key, self.renamings, self.converters, prefix, self.known)

    def convert(
        self, name: str, pieces: list[Stored], read: Callable[[Stored], Tensor]
    ) -> dict[str, Tensor]:
        """The tensors, by name in memory, that these pieces are there; `name` is the first.

        Memory: twice that of the tensors made. `Stored.blank` for `read` gives shapes alone.
        """
        converter = deepcopy(self._converter(pieces))
        for piece in sorted(pieces, key=lambda piece: dot_natural_key(piece.key)):
            # It calls what it is given, and lets go of each piece that has become part of another.
            converter.add_tensor(name, piece.key, piece.pattern, partial(read, piece))
        made = converter.convert(name, model=self.hf, config=self.hf.config)
        return {n: t[0] if isinstance(t, list) else t for n, t in made.items()}

    def check(self, path: str, name: str, pieces: list[Stored]) -> dict[str, Tensor]:
        """`convert` without values; InputError if pieces are missing, left over or misshapen."""
        wanted = self._published(name, pieces)
        found = {self.inner(piece.key): piece for piece in pieces}
        if lacking := [key for inner, (key, _) in wanted.items() if inner not in found]:
            raise InputError(f"{path}: the checkpoint lacks tensors: {some(lacking)}")
        if extra := [piece.key for inner, piece in found.items() if inner not in wanted]:
            raise InputError(f"{path}: the checkpoint has unknown tensors: {some(extra)}")
        self._check_square(path, pieces)
        try:
            made = self.convert(name, pieces, Stored.blank)
        except (RuntimeError, ValueError):  # pieces that do not fit each other
            made = {}
        if made and all(
            n in self.known and self.known[n].shape == t.shape for n, t in made.items()
        ):
            return made
        for inner, piece in found.items():
            if piece.shape != wanted[inner][1]:
                raise InputError(misshapen(path, piece.key, piece.shape, wanted[inner][1]))
        raise InputError(f"{path}: {pieces[0].key} cannot be converted to {name}")

    def _converter(self, pieces: list[Stored]) -> Any:
        return next(c for c in self.converters if pieces[0].pattern in c.source_patterns)

    def inner(self, key: str) -> str:
        """A key by the names of memory, before pieces become one, below the base model."""
        name, _ = rename_source_key(key, self.renamings, [])
        return name.removeprefix(f"{self.hf.base_model_prefix}.")

    def _published(self, name: str, pieces: list[Stored]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The keys and shapes that the tensor `name` is saved as, by `inner`."""
        converter = self._converter(pieces)
        if len(converter.target_patterns) > 1:  # one piece that becomes several: it is there
            return {self.inner(piece.key): (piece.key, piece.shape) for piece in pieces}
        reverse = converter.reverse_transform()
        whole, pattern = rename_source_key(name, [], [reverse])
        value = torch.empty(self.known[name].shape, device="meta")
        reverse.add_tensor(whole, name, pattern, value)
        made = reverse.convert(whole, model=self.hf, config=self.hf.config)
        shapes = {key: (t[0] if isinstance(t, list) else t).shape for key, t in made.items()}
        return {self.inner(key): (key, tuple(shape)) for key, shape in shapes.items()}

    def _check_square(self, path: str, pieces: list[Stored]) -> None:
        """Refuse what transformers would leave as it is, whichever way round it is stored."""
        for operation in self._converter(pieces).operations:
            if not getattr(operation, "check_dims", False):
                continue
            for piece in pieces:
                if piece.shape[operation.dim0] == piece.shape[operation.dim1]:
                    raise InputError(
                        f"{path}: {piece.key} has shape {piece.shape}; whether it is stored "
                        "transposed is told by its shape, so its matrices must not be square: "
                        "choose other sizes"
                    )


def save_as_published(hf: Any) -> None:
    """Have `hf.save_pretrained` write the layout that is published, which engines read.

    transformers transposes on loading if the shapes differ, and asks the same on saving, when they
    never do: the layout of memory would be written.
    """
    table = [
        entry
        for entry in get_model_conversion_mapping(hf, add_legacy=False)
        if not isinstance(entry, PrefixChange)  # as transformers does for a model not read by it
    ]
    asking = [
        operation
        for entry in table
        for operation in getattr(entry, "operations", [])
        if getattr(operation, "check_dims", False)
    ]
    for operation in asking:
        operation.check_dims = False
    if asking:
        hf._weight_conversions = table


def misshapen(path: str, key: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    return f"{path}: {key} has shape {shape}, the config wants {wanted}"


def some(names: list[str]) -> str:
    """The first names of a list."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
