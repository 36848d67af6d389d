"""A tiny Qwen2.5-VL that has learned to look: what stands where in a picture decides its answers.

On random weights a flipped picture or a wrong position hardly moves a log-probability.
"""

from __future__ import annotations

import io
import random
import shutil
from functools import cache

import numpy as np
from PIL import Image as Pil
from PIL import ImageDraw

from tests.ranks.cases import engine_for
from tests.tiny_models import scratch
from vireo import parallel as parallel_module
from vireo.data.conversation import Conversation, Image, ImageRef, Text, Turn
from vireo.data.packing import by_rows
from vireo.families.tiny import build

COLOURS = {"red": (220, 30, 30), "blue": (30, 60, 220), "green": (30, 160, 60)}
STEPS, HALF = 60, 40


@cache
def trained() -> tuple[str, str]:
    """Folders of the model after HALF of its steps and after all of them (some 5 s, once)."""
    start = build("qwen2_5_vl", scratch() / "start", size="test")
    engine, renderer = engine_for(str(start), parallel_module.start(shard=False))
    rows = [question(k) for k in range(96)] + [sum_of(k) for k in range(24)]
    examples = [renderer.example(row) for row in rows]
    order = random.Random(0)
    folders = []
    for step in range(1, STEPS + 1):
        engine.step(by_rows(order.sample(examples, 16), 16), rate=3.0 * min(1.0, step / 10))
        if step in (HALF, STEPS):
            folders.append(shutil.copytree(start, scratch() / f"after-{step}"))
            engine.policy.hf.save_pretrained(folders[-1])
    return str(folders[0]), str(folders[1])


def question(k: int, answer: bool = True) -> Conversation:
    """Where the block is on fine grain, in a picture of one of four sizes (one of which a processor
    changes). One picture in six is stored on its side (EXIF)."""
    chance = random.Random(k)
    width, height = chance.choice([(84, 56), (84, 84), (112, 56), (100, 66)])
    name, colour = chance.choice(list(COLOURS.items()))
    right, bottom = chance.random() < 0.5, chance.random() < 0.5
    grain = np.random.default_rng(k).integers(100, 256, (height, width, 3), dtype=np.uint8)
    image = Pil.fromarray(grain)
    x, y = right * width // 2 + chance.randrange(8), bottom * height // 2 + chance.randrange(8)
    ImageDraw.Draw(image).rectangle([x, y, x + width // 3, y + height // 3], fill=colour)
    said = f"it is {name}, {'right' if right else 'left'} and {'low' if bottom else 'high'}"
    return row(k, (Image(0), Text("Where is it?")), said, answer, on_its_side(image, k % 6 == 1))


def sum_of(k: int, answer: bool = True) -> Conversation:
    """A row without a picture."""
    return row(k, (Text(f"What is {k} and {k + 3}?"),), f"it is {2 * k + 3}", answer)


def row(k: int, asked: tuple, said: str, answer: bool, *images: ImageRef) -> Conversation:
    turns = (Turn("user", asked),) + (Turn("assistant", (Text(said),)),) * answer
    return Conversation(turns, images, id=str(k), where=f"row {k}")


def on_its_side(image: Pil.Image, turned: bool) -> ImageRef:
    """A PNG of the picture; `turned`: its pixels lie on their side, and EXIF says so."""
    out, exif = io.BytesIO(), Pil.Exif()
    if turned:
        image = image.transpose(Pil.Transpose.ROTATE_90)
        exif[0x0112] = 6
    image.save(out, "PNG", exif=exif)
    return ImageRef(out.getvalue())


def prompts() -> list[Conversation]:
    """Three rows with a picture (the last of which lies on its side) and one without, that the
    model was not trained on, without their answers."""
    return [*(question(k, False) for k in (1000, 1002, 1003)), sum_of(100, False)]
