"""Processor outputs and model inputs that are lists of tensors, a list a row: made flat, and back.

Some models that bring their own code take every slice of a picture as a tensor of its own width,
and of each slice the place of its tokens. Flat, they are (S slices, h x w patches each)

    pixel_values  [3, patch, sum of h * w * patch]   the slices end to end
    tgt_sizes     [S, 2]                             h and w of each
    image_bound   [T]                                a value a token: the slice (from 1), or 0

so that tokens may be put in or taken out before a slice, and rows padded on either side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def flatten(out: Any) -> dict[str, Tensor]:
    """One row of such a processor, as a batch of one: input_ids and image_bound [1, T]."""
    ids = out["input_ids"].long()
    places = torch.zeros_like(ids)
    for slice_, (start, end) in enumerate(out["image_bound"][0].tolist(), 1):
        places[0, start:end] = slice_
    flat = {"input_ids": ids, "image_bound": places}
    if pixels := out["pixel_values"][0]:
        flat |= {"pixel_values": torch.cat(list(pixels), dim=-1), "tgt_sizes": out["tgt_sizes"][0]}
    return flat


def nest(inputs: dict[str, Tensor]) -> dict[str, Any]:
    """The lists of a padded batch (`Batch.pad`): pixel_values, tgt_sizes and image_bound a row.

    The other inputs stay as they are. ValueError: the slices of its rows are not those it has.
    """
    ids = inputs["input_ids"]
    places = inputs.get("image_bound", torch.zeros_like(ids)).cpu()
    sizes = inputs.get("tgt_sizes", ids.new_zeros((0, 2)))
    counts = places.amax(dim=1).tolist()
    if sum(counts) != len(sizes):
        raise ValueError(f"{len(sizes)} slices, and {sum(counts)} places for them in the tokens")
    slices: list[Tensor] = []
    if len(sizes):
        pixels = inputs["pixel_values"]
        slices = list(pixels.split((sizes.prod(dim=1) * pixels.shape[1]).tolist(), dim=-1))
    ends = torch.tensor(counts).cumsum(0).tolist()
    return inputs | {
        "pixel_values": [slices[end - count : end] for count, end in zip(counts, ends)],
        "tgt_sizes": list(sizes.split(counts)),
        "image_bound": [_bounds(row, count) for row, count in zip(places, counts)],
    }


def _bounds(places_T: Tensor, slices: int) -> Tensor:
    """[slices, 2]: the first token of each, and the one behind its last."""
    found = [(places_T == i).nonzero()[:, 0] for i in range(1, slices + 1)]
    bounds = [[int(at[0]), int(at[-1]) + 1] for at in found]
    return torch.tensor(bounds, dtype=torch.long).reshape(-1, 2)


def with_blank(inputs: dict[str, Tensor], blank: dict[str, Tensor]) -> dict[str, Tensor]:
    """A padded batch without pictures, and one more row: the text and picture of `blank` (as
    `flatten` has them). No label is in it, so nothing but the graph is changed by it."""
    ids = blank["input_ids"]
    row = {
        "input_ids": ids,
        "image_bound": blank["image_bound"],
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(ids.shape[1], device=ids.device)[None],
    }
    inputs = {"image_bound": torch.zeros_like(inputs["input_ids"])} | inputs
    joined = {n: pad_sequence([*inputs[n], *more], batch_first=True) for n, more in row.items()}
    return {**inputs, **joined, **{n: blank[n] for n in ("pixel_values", "tgt_sizes")}}
