"""Small data files with pictures, for tests that train."""

from __future__ import annotations

import json
import random
from pathlib import Path

from PIL import Image, ImageDraw


def picture(seed: int, size: tuple[int, int] = (56, 56)) -> Image.Image:
    """A picture that differs from those of other seeds in colour, shape and place."""
    chance = random.Random(seed)
    image = Image.new("RGB", size, tuple(chance.randrange(256) for _ in range(3)))
    draw = ImageDraw.Draw(image)
    for _ in range(3):
        x, y = chance.randrange(size[0]), chance.randrange(size[1])
        colour = tuple(chance.randrange(256) for _ in range(3))
        draw.rectangle([x, y, x + size[0] // 3, y + size[1] // 3], fill=colour)
    return image


def write_rows(
    folder: Path, counts: list[int], sizes: tuple[tuple[int, int], ...] = ((56, 56),)
) -> Path:
    """`folder`/rows.json: row i has counts[i] images (0: text only) and an answer of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, made = [], 0
    for i, count in enumerate(counts):
        names = []
        for _ in range(count):
            names.append(f"{made}.png")
            picture(made, sizes[made % len(sizes)]).save(folder / names[-1])
            made += 1
        question = "<image>" * count + f"What is number {i}?"
        answer = "word " * (i % 3) + f"it is {i}"
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        rows.append({"id": f"r{i}", "image": names, "conversations": turns})
    path = folder / "rows.json"
    path.write_text(json.dumps(rows))
    return path


def losses(run_folder: Path) -> list[float]:
    """The loss of each step in a run's metrics."""
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [r["loss"] for r in map(json.loads, lines) if "loss" in r]
