"""The rows that a grid runs on: drawn here, the same every time, or the first ones of a file."""

from __future__ import annotations

import random
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

from PIL import Image as Pil
from PIL import ImageDraw

from vireo.data.conversation import Conversation, Image, ImageRef, Text, Turn, read_rows

FILE_ROWS = 8
SIDE = 224  # pixels, where a processor does not say
COUNTS = (0, 1, 2, 3, 1, 0, 3, 2)  # images of each drawn row
# Width and height of the pictures, in units of `side`: two rows' worth of each shape.
SHAPES = ((1, 1), (1, 1), (1.5, 1), (1, 2.5), (0.5, 0.5), (3, 2))
ANSWERS = ("7", "It is red.", "A small circle on the left, and a larger square.", "No.")


def picture(size: tuple[int, int], seed: int) -> Pil.Image:
    """A picture that differs from those of other seeds in colours, shapes and places."""
    chance = random.Random(seed)
    width, height = size
    image = Pil.new("RGB", size, tuple(chance.randrange(256) for _ in range(3)))
    draw = ImageDraw.Draw(image)
    for kind in (draw.rectangle, draw.ellipse, draw.rectangle, draw.ellipse):
        x, y = chance.randrange(width), chance.randrange(height)
        colour = tuple(chance.randrange(256) for _ in range(3))
        kind([x - width // 3, y - height // 3, x + width // 3, y + height // 3], fill=colour)
    return image


def natural_side(processor: Any) -> int:
    """The side in pixels of a small picture that an image processor takes as it is, or as a tile.

    Named by the setting that says most: a tile's, a crop's, or the size of the whole.
    """
    images = getattr(processor, "image_processor", None)
    for name in ("max_image_size", "crop_size", "size", "scale_resolution"):
        size = getattr(images, name, None)
        if isinstance(size, int):
            return size
        if size is None:
            continue
        edges = dict(size)
        short, long = edges.get("shortest_edge"), edges.get("longest_edge")
        if short and long and long > 20 * short:  # numbers of pixels, whatever they are called
            return 2 * round(sqrt(short))
        if side := edges.get("height") or short or long:
            return side
    return SIDE


def drawn_rows(vision: bool, side: int) -> list[Conversation]:
    """Rows with 0 to 3 images of several shapes, answers from one token on, and further turns."""
    rows, made = [], 0
    for i, count in enumerate(COUNTS if vision else (0, 0, 0, 0)):
        images = []
        for k in range(count):
            # The first two of a row have one shape, so that only their content tells them apart.
            wide, high = SHAPES[(i + max(0, k - 1)) % len(SHAPES)]
            size = max(8, round(wide * side)), max(8, round(high * side))
            images.append(ImageRef(picture(size, seed=made)))
            made += 1
        early = min(count, 2)
        turns = [
            Turn("user", (*map(Image, range(early)), Text("What is it? " * (i % 3) + "Say."))),
            Turn("assistant", (Text(ANSWERS[i % len(ANSWERS)]),)),
        ]
        if i % 2 or count > early:
            turns.append(Turn("user", (Text("And"), *map(Image, range(early, count)), Text("?"))))
            turns.append(Turn("assistant", (Text(f"It is number {i}."),)))
        where = f"drawn row {i} ({count} images)"
        rows.append(Conversation(tuple(turns), tuple(images), where=where))
    return rows


def file_rows(path: str | Path) -> list[Conversation]:
    """The first rows of a data file. InputError, RowError as `read_rows` raises them."""
    rows = read_rows(path)
    return [rows[i] for i in range(min(FILE_ROWS, len(rows)))]


def with_images(row: Conversation, images: list[Any]) -> Conversation:
    """The row with these decoded pictures in its slots."""
    return replace(row, images=tuple(map(ImageRef, images)))
