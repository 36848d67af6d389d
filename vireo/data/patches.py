"""The pictures of the Qwen-VL processors, in half of their time: the same numbers, bit for bit.

Pixels are put in the order of patches while they are bytes, and doubled (the towers see a still
picture as two frames) once they are numbers; transformers does it the other way round.
"""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor


class Patches:
    """Made from such a processor's `image_processor`, whose own resize and normalisation it uses.

    Any error that those raise may come of a call: a picture that is too thin, for one.
    """

    def __init__(self, inner: Any):
        self.inner = inner
        self.merge = inner.merge_size

    def __call__(self, pictures: list[Image.Image]) -> dict[str, Tensor]:
        """pixel_values float32 [patches, 3 * frames * size * size], image_grid_thw [pictures, 3]"""
        made = [self._one(picture) for picture in pictures]
        return {
            "pixel_values": torch.cat([pixels for pixels, _ in made])
            if len(made) > 1
            else made[0][0],
            "image_grid_thw": torch.tensor([[1, *grid] for _, grid in made]),
        }

    def _one(self, picture: Image.Image) -> tuple[Tensor, tuple[int, int]]:
        inner, size, merge = self.inner, self.inner.patch_size, self.merge
        image_1CHW = pil_to_tensor(picture)[None]
        if inner.do_resize:
            image_1CHW = inner.resize(
                images=image_1CHW, size=inner.size, resample=inner.resample, factor=size * merge
            )
        _, channels, height, width = image_1CHW.shape
        rows, columns = height // size, width // size
        shape = (channels, rows // merge, merge, size, columns // merge, merge, size)
        patches_NCPP = (
            image_1CHW.view(shape)
            .permute(1, 4, 2, 5, 0, 3, 6)
            .reshape(rows * columns, channels, size, size)
        )
        values_NCPP = inner.rescale_and_normalize(
            patches_NCPP,
            inner.do_rescale,
            inner.rescale_factor,
            inner.do_normalize,
            tuple(inner.image_mean),
            tuple(inner.image_std),
        )
        frames = inner.temporal_patch_size
        values = values_NCPP[:, :, None].expand(-1, -1, frames, -1, -1)
        return values.reshape(rows * columns, -1), (rows, columns)
