"""Always-on alarms: is a row scored beside others as it is alone, and do its pixels matter?

Packing that leaks, positions that are wrong and pixels that get lost raise no error: the loss just
falls a little slower. So every so many steps one row of a step is scored again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vireo.data.ragged import IGNORE, Batch, Example
from vireo.training.engine import TrainEngine

# Mean |difference of log-probabilities| over a row's answer. float32: measured <= 1e-6. bf16: the
# same tokens in another shape differ by 0.03, a leak or wrong positions by more than 0.1.
PACKED_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 0.1}
BLIND_LIMIT = 1e-6  # a model that sees nothing has exactly 0


@torch.no_grad()
def look(engine: TrainEngine, micro_batches: Sequence[Batch]) -> dict[str, float]:
    """Score one row of this rank's micro-batches three times: beside others, alone, and alone with
    its pixels permuted and inverted (a blank picture changes so, too). Collective.

    Returns `check/packed_vs_alone`, the most over all ranks of the mean |difference of log p| of a
    row, and `check/blindness`, the least of what the pixels change; each is left out where no
    rank has rows for it.
    """
    engine.policy.eval()
    batch, at = _chosen(engine, micro_batches)
    idle, rows = at is None, batch.examples()
    row = rows[at or 0]
    beside = _answers(engine.forward(batch)[0], rows)[at or 0]
    row = _to_its_end(row, engine.policy.hf.config.get_text_config().vocab_size)
    # With a mask, as plain transformers does it: packing that is wrong is so with one row, too.
    alone = engine.forward(Batch.of([row]), packing=False)[0]
    unseen = engine.forward(Batch.of([_unseen(row)]), packing=False)[0]
    engine.reshard()
    apart = float((beside - alone[: len(beside)]).abs().mean())
    change = float((alone - unseen).abs().mean())
    if math.isnan(apart + change):  # which the maximum over ranks may lose
        apart, change = math.inf, -math.inf
    has_images = not idle and row.images > 0
    most, blindest, any_row, any_image = engine.parallel.max(
        [
            0.0 if idle else apart,
            -change if has_images else -float("inf"),
            float(not idle),
            float(has_images),
        ]
    )
    found = {"check/packed_vs_alone": most} if any_row else {}
    return found | ({"check/blindness": -blindest} if any_image else {})


def complaint(found: dict[str, float], dtype: torch.dtype) -> str | None:
    """What is wrong with the values of `look`, if anything; `dtype`: the type computed in."""
    apart, limit = found.get("check/packed_vs_alone", 0.0), PACKED_LIMIT[dtype]
    if not apart <= limit:  # NaN is no good value either
        return (
            "a row beside others has other log-probabilities than alone: they differ by "
            f"{apart:.3g} on average, expected at most {limit:g}: rows of a micro-batch leak into "
            "each other, or have wrong positions; try --packing false, and `vireo check-family`"
        )
    change = found.get("check/blindness", 1.0)
    if not change > BLIND_LIMIT:
        return (
            f"other pixels change the log-probabilities of an answer by {change:.3g}: the model "
            "does not see its pictures; look at the rows with `vireo preview`, and at the model "
            "with `vireo check-family`"
        )
    return None


def _chosen(engine: TrainEngine, micro_batches: Sequence[Batch]) -> tuple[Batch, int | None]:
    """A micro-batch and a row in it, None for an empty one: the fullest with pictures, if any, and
    the last row with pictures: what leaks from a row reaches those behind it.

    Where kinds of rows cannot mix, all ranks take one of the same kind.
    """
    with_images = [batch for batch in micro_batches if any(batch.images)]
    candidates: Sequence[Batch] = with_images or micro_batches
    empty = engine.empty
    if engine.empty_images is not None and engine.parallel.max([len(with_images)])[0]:
        candidates, empty = with_images, engine.empty_images
    if not candidates:
        return empty, None
    batch = max(candidates, key=len)
    return batch, max(range(len(batch)), key=lambda i: (batch.images[i] > 0, i))


def _answers(logprobs: Tensor, rows: Sequence[Example]) -> list[Tensor]:
    """The log-probabilities of each row, from those of all supervised tokens in reading order."""
    return list(logprobs.split([row.supervised for row in rows]))


def _to_its_end(row: Example, vocabulary: int) -> Example:
    """The row with what follows its last answer scored, too: its pictures may stand there.

    An image token may be one that the head has no logit for.
    """
    ids, labels = row.fields["input_ids"], row.fields["labels"].clone()
    behind = int((labels != IGNORE).nonzero()[-1]) + 1
    labels[behind:] = ids[behind:].where(ids[behind:] < vocabulary, IGNORE)
    return replace(row, fields=row.fields | {"labels": labels})


def _unseen(row: Example) -> Example:
    """The row with other pixels. Zeros stay: some models look for padding that is made of them."""
    pixels = row.fields.get("pixel_values")
    if pixels is None:
        return row
    order = torch.randperm(pixels.shape[-1], generator=torch.Generator().manual_seed(0))
    return replace(row, fields=row.fields | {"pixel_values": -pixels[..., order]})
