"""Images through the vision tower one at a time: the same bits, whatever stands beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vireo.errors import InputError
from vireo.models.policy import Policy


@contextmanager
def image_by_image(policy: Policy) -> Iterator[None]:
    """The tower gets each image in a call of its own; on one rank, whose tower may run any number
    of times. InputError: the family's pixels do not come end to end with a grid."""
    if policy.family.grid is None:
        raise InputError(f"{policy.family.name}: only images with a grid of patches can be parted")
    model = policy.hf.model
    together = model.get_image_features

    def one_by_one(pixel_values: Tensor, image_grid_thw: Tensor, **options: Any) -> Any:
        parts = pixel_values.split(image_grid_thw.prod(-1).tolist())
        outs = [together(p, g[None], **options) for p, g in zip(parts, image_grid_thw)]
        out = outs[0]
        if getattr(out, "deepstack_features", None) is not None:  # a list of layers
            out.deepstack_features = [
                torch.cat(layer)  # in transformers 5.12; in 5.19 it is parted by image
                if isinstance(layer[0], Tensor)
                else [part for one in layer for part in one]
                for layer in zip(*(one.deepstack_features for one in outs))
            ]
        out.pooler_output = [part for one in outs for part in one.pooler_output]
        return out

    model.get_image_features = one_by_one
    try:
        yield
    finally:
        del model.get_image_features
