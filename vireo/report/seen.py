"""Pictures as a model sees them, rebuilt from the processor's own tensor, for any processor.

How a processor cuts and orders a picture differs from family to family. It is learned here by
showing it: a picture whose samples hold their own numbers tells where each of them goes. What
was learned is then proved, by giving the rebuilt picture to the processor again.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vireo.data.conversation import Conversation, ImageRef, Text, Turn
from vireo.data.conversation import Image as Slot
from vireo.data.images import image_size_from_header
from vireo.data.ragged import Example
from vireo.data.references import image_name
from vireo.data.render import Renderer
from vireo.errors import RowError

LARGEST = 4_000_000  # pixels of a picture that is rebuilt: more would take gigabytes
_KEPT = 4  # layouts remembered


@dataclass
class Seen:
    """One picture of a row.

    `pictures`: one as the model sees it (`rebuilt`), or its tiles; where that could not be had,
    the picture that the processor got. `original`, `size`: (width, height) in the file and as the
    model sees it (None: not known). `grids`: the processor's own small tensors of this picture.
    `tokens`: the image tokens in its place, the most frequent first (empty: not known).
    """

    name: str
    pictures: list[Image.Image]
    original: tuple[int, int]
    fitted: tuple[int, int]
    size: tuple[int, int] | None = None
    grids: dict[str, list] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    rebuilt: bool = False


class Eye:
    """Looks at pictures as one renderer's model does."""

    def __init__(self, renderer: Renderer):
        self.renderer = renderer
        # The same processor without what comes before it: probes must arrive as they are.
        self.bare = copy.copy(renderer)
        self.bare.image_size, self.bare.image_strategy = None, "longest"
        self.bare.longest, self.bare.many_images = 2**62, True
        self._layouts: dict[tuple, _Layout | None] = {}

    def look(self, row: Conversation, example: Example) -> list[Seen]:
        """A `Seen` for each picture of the row that `example` was made of."""
        fitted = self.renderer.pictures(row)
        seen = [
            Seen(image_name(ref), [picture], image_size_from_header(ref), picture.size)
            for ref, picture in zip(row.images, fitted)
        ]
        try:
            alone = [self._show(picture) for picture in fitted]
        except RowError:
            return seen
        for found, part in zip(seen, alone):
            found.tokens = self._tokens(part)
        total = sum((Counter(found.tokens) for found in seen), Counter())
        if total != Counter(self._tokens(example)) or not _same(alone, example):
            for found in seen:  # the processor treats the row's pictures together
                found.tokens = {}
            return seen
        for found, part in zip(seen, alone):
            self._rebuild(found, part)
        return seen

    # -- what the processor says ---------------------------------------------------------------

    def _show(self, picture: Image.Image) -> Example:
        turns = (Turn("user", (Slot(0), Text("."))), Turn("assistant", (Text("."),)))
        return self.bare.example(Conversation(turns, (ImageRef(picture),)))

    def _tokens(self, example: Example) -> dict[str, int]:
        counts = Counter(example.fields["input_ids"].tolist())
        names = {i: self.renderer.tokenizer.decode([i]) for i in self.renderer.image_ids}
        return dict(Counter({names[i]: counts[i] for i in names if counts[i]}).most_common())

    def _rebuild(self, found: Seen, part: Example) -> None:
        name = _pixel_key(part)
        if name is None:
            return
        pixels = part.fields[name].float()
        small = {
            n: v for n, v in part.fields.items()
            if part.keys[n].kind != "token" and n != name and v.numel() <= 32
        }  # fmt: skip
        found.grids = {n: v.squeeze(0).tolist() for n, v in small.items()}
        for size in _candidates(pixels, small.values()):
            blank = self._pixels(Image.new("RGB", size), name)
            if blank.shape != pixels.shape:
                continue
            if size[0] * size[1] > LARGEST:
                found.size = size
                return
            key = (name, size, tuple(pixels.shape))
            if key not in self._layouts:
                if len(self._layouts) >= _KEPT:
                    self._layouts.pop(next(iter(self._layouts)))
                self._layouts[key] = self._learn(name, size, blank)
            layout = self._layouts[key]
            picture = layout.picture(pixels) if layout else None
            if picture and layout and layout.alike(self._pixels(picture, name), pixels):
                found.pictures, found.size, found.rebuilt = [picture], size, True
                return
        tiles = self._tiles(found, name, pixels)
        if tiles:
            found.pictures, found.size, found.rebuilt = tiles, tiles[0].size, True

    def _pixels(self, picture: Image.Image, name: str) -> Tensor:
        return self._show(picture).fields[name].float()

    def _learn(self, name: str, size: tuple[int, int], black: Tensor) -> _Layout | None:
        """Where each sample of a picture of `size` (3 samples a pixel) stands in the tensor."""
        width, height = size
        reach = self._pixels(Image.new("RGB", size, "white"), name) - black
        if not (reach.abs() > 1e-6).all():
            return None
        number = np.arange(3 * width * height).reshape(height, width, 3)
        place = torch.zeros_like(black, dtype=torch.long)
        for digit in range(math.ceil(number.size.bit_length() / 8)):
            probe = Image.fromarray((number >> 8 * digit & 255).astype(np.uint8))
            got = ((self._pixels(probe, name) - black) / reach * 255).round().long()
            place += got << 8 * digit
        place = place.flatten()
        if place.min() < 0 or place.max() >= number.size:
            return None
        if len(place.unique()) != number.size:
            return None
        return _Layout(size, black.flatten(), reach.flatten(), place)

    def _tiles(self, found: Seen, name: str, pixels: Tensor) -> list[Image.Image]:
        """The tiles of a tensor [..., 3, H, W] of several pictures that each look like one."""
        *_, channels, height, width = (0, 0, *pixels.shape)
        if channels != 3 or min(height, width) < 28 or pixels.dim() < 4:
            return []
        black = self._pixels(Image.new("RGB", found.fitted), name)
        reach = self._pixels(Image.new("RGB", found.fitted, "white"), name) - black
        if black.shape != pixels.shape:
            return []
        flat = torch.where(reach.abs() > 1e-6, (pixels - black) / reach.clamp(min=1e-6), 0.5)
        samples = (flat * 255).round().clamp(0, 255).to(torch.uint8)
        tiles = samples.reshape(-1, 3, height, width).permute(0, 2, 3, 1).numpy()
        used = (reach.abs() > 1e-6).reshape(len(tiles), -1).any(dim=1).tolist()
        return [Image.fromarray(tile) for tile, real in zip(tiles, used) if real]


@dataclass
class _Layout:
    """`place[i]`: the sample of the picture that element i of the tensor holds, scaled."""

    size: tuple[int, int]
    black: Tensor
    reach: Tensor
    place: Tensor

    def picture(self, pixels: Tensor) -> Image.Image | None:
        """The picture of a tensor; None where copies of one sample differ."""
        values = ((pixels.flatten() - self.black) / self.reach * 255).round().clamp(0, 255)
        width, height = self.size
        samples = torch.zeros(3 * width * height)
        samples[self.place] = values
        if not torch.equal(samples[self.place], values):
            return None
        array = samples.to(torch.uint8).reshape(height, width, 3).numpy()
        return Image.fromarray(array)

    def alike(self, one: Tensor, other: Tensor) -> bool:
        """Equal but for less than half of one step in 255."""
        gap = (one - other).flatten().abs() / self.reach.abs()
        return one.shape == other.shape and bool((gap < 0.5 / 255).all())


def _pixel_key(example: Example) -> str | None:
    """The largest tensor of numbers with fractions that is not one value a token."""
    sizes = {
        name: value.numel()
        for name, value in example.fields.items()
        if example.keys[name].kind != "token" and value.is_floating_point()
    }
    return max(sizes, key=lambda name: sizes[name]) if sizes else None


def _candidates(pixels: Tensor, small: Any) -> Iterator[tuple[int, int]]:
    """(width, height) that the tensor may have: whole, or cut into square cells on a grid."""
    if (
        pixels.dim() >= 3
        and pixels.shape[-3] == 3
        and pixels.numel() == math.prod(pixels.shape[-3:])
    ):
        yield pixels.shape[-1], pixels.shape[-2]
    for grid in small:
        if grid.is_floating_point() or grid.numel() not in (2, 3):
            continue
        rows, columns = grid.flatten().tolist()[-2:]
        for copies in (1, 2):  # of a picture, as two frames of a film
            cell = pixels.numel() / (3 * copies * rows * columns) if rows * columns > 0 else 0
            side = math.isqrt(int(cell))
            if side and side * side == cell:
                yield columns * side, rows * side


def _same(alone: list[Example], example: Example) -> bool:
    """Whether the row's tensors are those of its pictures, one after the other."""
    for name, whole in example.fields.items():
        key = example.keys[name]
        if key.kind == "token":
            continue
        axis = key.axis % whole.dim() if key.kind == "packed" else 0
        parts = [part.fields[name] for part in alone if name in part.fields]
        if len(parts) != len(alone):
            return False
        shapes = {part.shape[:axis] + part.shape[axis + 1 :] for part in parts}
        if len(shapes) != 1 or not torch.equal(torch.cat(parts, dim=axis), whole):
            return False
    return True
