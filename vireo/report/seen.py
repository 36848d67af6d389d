"""Pictures as a model sees them, rebuilt from the processor's own tensor."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

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


@dataclass
class Seen:
    """One picture of a row.

    `pictures`: what the model sees, in one or several parts (`rebuilt`), else what the processor
    got. `original`: (width, height) in the file, upright. `grids`, `tokens`: the processor's own
    small tensors of it, and the image tokens in its place (both empty where not known).
    """

    name: str
    original: tuple[int, int]
    pictures: list[Image.Image]
    rebuilt: bool = False
    grids: dict[str, list] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    @property
    def facts(self) -> list[str]:
        """Sizes, grids and tokens in words."""
        sizes = Counter(f"{part.width} x {part.height}" for part in self.pictures)
        parts = " and ".join(f"{n} of {size}" if n > 1 else size for size, n in sizes.items())
        facts = [f"{self.original[0]} x {self.original[1]} in the file"]
        facts += [f"the model sees {parts}" if self.rebuilt else f"{parts} before the processor"]
        facts += [f"{name} {value}" for name, value in self.grids.items()]
        return facts + [f"{count:,} {token}" for token, count in self.tokens.items()]


def look(renderer: Renderer, row: Conversation, example: Example) -> list[Seen]:
    """A `Seen` for each picture of the row that `example` was made of."""
    bare = copy.copy(renderer)  # what the settings do to a picture is done already
    bare.image_size, bare.image_strategy, bare.longest = None, "longest", 2**62
    fitted = renderer.pictures(row)
    seen = [
        Seen(image_name(ref), image_size_from_header(ref), [picture])
        for ref, picture in zip(row.images, fitted)
    ]
    try:
        alone = [_alone(bare, picture) for picture in fitted]
    except RowError:  # a template that wants more than one turn
        return seen
    tokens = [_image_tokens(renderer, part) for part in alone]
    if sum(tokens, Counter()) != _image_tokens(renderer, example):
        return seen  # beside others, a picture is not what it is alone
    for found, part, counts in zip(seen, alone, tokens):
        found.tokens = dict(counts.most_common())
        small = {name: value for name, value in _tensors(part).items() if value.numel() <= 32}
        found.grids = {name: value.squeeze(0).tolist() for name, value in small.items()}
        pictures = _rebuild(bare, part)
        # Put together as the model has it, if that is what the processor makes of it again.
        if pictures and _rebuild(bare, _alone(bare, pictures[0]))[:1] == pictures[:1]:
            found.pictures, found.rebuilt = pictures, True
    return seen


def _alone(renderer: Renderer, picture: Image.Image) -> Example:
    turns = (Turn("user", (Slot(0), Text("."))), Turn("assistant", (Text("."),)))
    return renderer.example(Conversation(turns, (ImageRef(picture),)))


def _image_tokens(renderer: Renderer, example: Example) -> Counter[str]:
    ids = example.fields["input_ids"].tolist()
    return Counter(renderer.tokenizer.decode([i]) for i in ids if i in renderer.image_ids)


def _tensors(example: Example) -> dict[str, Tensor]:
    return {n: v for n, v in example.fields.items() if example.keys[n].kind != "token"}


def _rebuild(renderer: Renderer, example: Example) -> list[Image.Image]:
    """The pictures in the largest tensor of an example; none where its form is not known."""
    processor = renderer.processor.image_processor
    tensors = sorted(_tensors(example).values(), key=Tensor.numel)
    pictures = []
    for samples in unpack(tensors.pop(), tensors, processor):  # [3, H, W]
        if processor.do_normalize:
            mean, std = (torch.tensor(v) for v in (processor.image_mean, processor.image_std))
            samples = samples * std.view(-1, 1, 1) + mean.view(-1, 1, 1)
        if processor.do_rescale:
            samples = samples / processor.rescale_factor
        pixels = samples.round().clamp(0, 255).to(torch.uint8)
        pictures.append(Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()))
    return pictures


def unpack(pixels: Tensor, grids: list[Tensor], processor: Any) -> list[Tensor]:
    """The pictures [3, H, W] in a processor's tensor; none if it has none of these forms.

    [patches, 3 * frames * side * side] in blocks of merge x merge patches, with a grid
    [[frames, rows, columns]]; [1, 3, side, patches * side] with [rows, columns] for each picture;
    whole pictures or tiles [..., 3, H, W], of which empty ones are left out.
    """
    side, merge = getattr(processor, "patch_size", 0), getattr(processor, "merge_size", 1)
    for grid in grids:
        if grid.shape == (1, 3) and pixels.dim() == 2 and grid.prod() == len(pixels):
            _, rows, columns = grid[0].tolist()
            blocks = (-1, rows // merge, columns // merge, merge, merge)
            frames = pixels.shape[1] // (3 * side * side)
            patches = pixels.reshape(*blocks, 3, frames, side, side)[0, ..., 0, :, :]
            return [patches.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * side, columns * side)]
        if grid.dim() == 2 and grid.shape[1] == 2 and pixels.shape[:3] == (1, 3, side):
            strips = pixels[0].split((grid.prod(dim=1) * side).tolist(), dim=-1)
            return [
                strip.reshape(3, side, rows, columns, side).transpose(1, 2).flatten(3).flatten(1, 2)
                for strip, (rows, columns) in zip(strips, grid.tolist())
            ]
    if pixels.dim() < 3 or pixels.shape[-3] != 3 or min(pixels.shape[-2:]) < 56:  # a patch
        return []
    return [tile for tile in pixels.reshape(-1, *pixels.shape[-3:]) if tile.any()]
