"""Ragged data that obeys one batch API: `Ragged` columns, `Example` (one row), `Batch` (rows).

Every key of an example has a kind (`families.entry.Key`), and every operation (select, slice,
concatenate, to device, pack, pad, pickle) works on every kind, so no code path can forget pixels.

Shape legend: T tokens of one row, B rows, L longest row, R position rows (1, or 4 for M-RoPE).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from vireo.families.entry import Key

IGNORE = -100  # a label that carries no loss

# Keys that every example has, whatever its family.
BASE_KEYS = {
    "input_ids": Key("token"),
    "labels": Key("token", fill=IGNORE),
    "loss_weight": Key("token", fill=0.0),
    "positions": Key("token", fill=0),
}
# Of these, what is the trainer's own and never reaches a model under its name.
TRAINER_KEYS = ("labels", "loss_weight", "positions", "lengths")


@dataclass
class Example:
    """One row as the model sees it.

    `fields`: input_ids [T] int64, labels [T] int64 (aligned with input_ids, not shifted; IGNORE
    where no loss), loss_weight [T] float32, positions [R, T] int64, and the processor's own keys.
    """

    fields: dict[str, Tensor]
    keys: dict[str, Key]
    images: int = 0
    where: str = ""

    def __post_init__(self) -> None:
        length = len(self)
        for name, value in self.fields.items():
            if name not in self.keys:
                raise KeyError(f"{name}: the family's entry gives no kind for this processor key")
            key = self.keys[name]
            if key.kind == "token" and value.shape[key.axis] != length:
                raise ValueError(f"{name}: {value.shape[key.axis]} values for {length} tokens")

    def __len__(self) -> int:
        return self.fields["input_ids"].shape[-1]

    @property
    def supervised(self) -> int:
        return int((self.fields["labels"] != IGNORE).sum())


class Ragged:
    """One key over many rows: its kind, and a tensor a row (None where a row lacks the key)."""

    def __init__(self, key: Key, rows: Sequence[Tensor | None]):
        self.key, self.rows = key, list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: Iterable[int]) -> Ragged:
        return type(self)(self.key, [self.rows[i] for i in indices])

    def extend(self, other: Ragged) -> Ragged:
        if other.key != self.key:
            raise ValueError(f"columns of two kinds: {self.key} and {other.key}")
        return type(self)(self.key, self.rows + other.rows)

    def to(self, device: torch.device | str) -> Ragged:
        # A copy to the host that nobody waits for could be read before it is there.
        no_wait = torch.device(device).type != "cpu"
        return type(self)(
            self.key,
            [None if row is None else row.to(device, non_blocking=no_wait) for row in self.rows],
        )

    def packed(self) -> Tensor | None:
        """Rows end to end, along `key.axis`; padded keys are padded all the same."""
        rows = [row for row in self.rows if row is not None]
        if not rows:
            return None
        if self.key.kind == "padded":
            return self.padded()
        axis, wide = self.key.axis, _largest(rows)
        for i, row in enumerate(rows):
            wide[axis] = row.shape[axis]
            if list(row.shape) != wide:
                rows[i] = _put(row, row.new_full(wide, self.key.fill))
        return torch.cat(rows, dim=axis)

    def padded(self, fill: float | None = None, left: bool = False) -> Tensor | None:
        """Rows stacked: [B, ..., L] for tokens, [B, ...] for padded keys.

        `left` puts the tokens last along their dimension. Packed keys stay end to end, as the
        models of such families take them.
        """
        if self.key.kind == "packed":
            return self.packed()
        rows = [row for row in self.rows if row is not None]
        if not rows:
            return None
        if len(rows) < len(self.rows):
            raise ValueError("a padded or token key must be present in every row")
        value = self.key.fill if fill is None else fill
        out = rows[0].new_full((len(rows), *_largest(rows)), value)
        end = self.key.axis if left and self.key.kind == "token" else None
        for i, row in enumerate(rows):
            _put(row, out[i], end)
        return out


def _largest(rows: Sequence[Tensor]) -> list[int]:
    return [max(sizes) for sizes in zip(*(row.shape for row in rows))]


def _put(row: Tensor, out: Tensor, end: int | None = None) -> Tensor:
    """`out` with `row` in its first corner; at the end of the dimension `end`."""
    spans = [slice(0, size) for size in row.shape]
    if end is not None:
        spans[end] = slice(out.shape[end] - row.shape[end], None)
    out[tuple(spans)] = row
    return out


@dataclass
class Batch:
    """Rows in order, a `Ragged` column a key; `images` and `where` are per row."""

    columns: dict[str, Ragged]
    images: list[int] = field(default_factory=list)
    where: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Batch:
        if not examples:
            raise ValueError("a batch needs at least one example")
        keys: dict[str, Key] = {}
        for example in examples:
            keys.update({name: example.keys[name] for name in example.fields})
        columns = {n: Ragged(key, [e.fields.get(n) for e in examples]) for n, key in keys.items()}
        for column in columns.values():  # a text row beside image rows: no image token anywhere
            if column.key.kind == "token":
                for i, example in enumerate(examples):
                    if column.rows[i] is None:
                        like = next(row for row in column.rows if row is not None)
                        shape = list(like.shape)
                        shape[column.key.axis] = len(example)
                        column.rows[i] = like.new_full(shape, column.key.fill)
        return cls(columns, [e.images for e in examples], [e.where for e in examples])

    def __len__(self) -> int:
        return len(self.images)

    @property
    def lengths(self) -> list[int]:
        column = self.columns.get("input_ids")  # a part without rows has no columns
        return [row.shape[-1] for row in column.rows if row is not None] if column else []

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def select(self, indices: Iterable[int]) -> Batch:
        """The rows at `indices`, in that order; keys that none of them has are dropped."""
        at = list(indices)
        columns = {name: column.select(at) for name, column in self.columns.items()}
        columns = {n: c for n, c in columns.items() if any(row is not None for row in c.rows)}
        return Batch(columns, [self.images[i] for i in at], [self.where[i] for i in at])

    def __getitem__(self, rows: slice) -> Batch:
        return self.select(range(*rows.indices(len(self))))

    def split(self, parts: int) -> list[Batch]:
        """`parts` batches of consecutive rows whose sizes differ by at most one."""
        edges = [round(i * len(self) / parts) for i in range(parts + 1)]
        return [self[a:b] for a, b in pairwise(edges)]

    @staticmethod
    def cat(batches: Sequence[Batch]) -> Batch:
        return Batch.of([example for batch in batches for example in batch.examples()])

    def examples(self) -> list[Example]:
        keys = {name: column.key for name, column in self.columns.items()}
        return [
            Example(
                {n: v for n, c in self.columns.items() if (v := c.rows[i]) is not None},
                keys,
                self.images[i],
                self.where[i],
            )
            for i in range(len(self))
        ]

    def to(self, device: torch.device | str) -> Batch:
        columns = {name: column.to(device) for name, column in self.columns.items()}
        return Batch(columns, self.images, self.where)

    def pack(self) -> dict[str, Tensor]:
        """All rows in one sequence: token keys [1, sum T], positions [R, 1, sum T].

        No attention mask: positions that restart are what marks the boundaries, and `lengths`
        [rows], which stays on the host.
        """
        out: dict[str, Tensor] = {"lengths": torch.tensor(self.lengths)}
        for name, column in self.columns.items():
            value = column.packed()
            if value is None:
                continue
            if column.key.kind == "token":  # a batch of one, just before the tokens
                axis = column.key.axis
                value = value.unsqueeze(axis if axis >= 0 else axis - 1)
            out[name] = value
        return out

    def pad(self, pad_id: int, left: bool = False) -> dict[str, Tensor]:
        """Rows stacked: token keys [B, L], positions [R, B, L], attention_mask [B, L]."""
        out: dict[str, Tensor] = {}
        for name, column in self.columns.items():
            value = column.padded(pad_id if name == "input_ids" else None, left)
            if value is not None:
                out[name] = value
        out["positions"] = out["positions"].transpose(0, 1).contiguous()
        ones = [torch.ones_like(row) for row in self.columns["input_ids"].rows if row is not None]
        mask = Ragged(Key("token", fill=0), ones).padded(left=left)
        assert mask is not None
        out["attention_mask"] = mask
        return out
