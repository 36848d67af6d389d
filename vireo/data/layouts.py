"""Three rows of each published layout of prompts, made here: what `vireo data layouts` writes.

The columns and their types are those of the published sets (docs/prompts.md); questions and
pictures are our own. The same call writes the same bytes.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

SIZE = (112, 84)  # pixels of a picture
ASK = "Solve this problem step by step. The last line of the response is Answer: $Answer.\n\n"
SUMS = (
    ("Anna has 12 pears and gives away 5. How many are left?", "7"),
    ("What is the remainder of 100 divided by 7?", "2"),
    ("A rectangle of area 48 is 6 wide. What is its perimeter?", "28"),
)
CONTEST = (
    ("How many integers from 1 to 1000 are divisible by 4 or by 6?", "333"),
    ("Find the sum of all primes below 30.", "129"),
    ("In how many ways can 6 people sit at a round table?", "120"),
)
ANGLES = ((50, 60), (35, 90), (72, 54))  # two of a triangle, in degrees
COUNTS = (3, 5, 4)
BOXES = (  # colour, and where: x, y, width, height
    ("red", (10, 8, 30, 24)),
    ("green", (60, 40, 36, 20)),
    ("blue", (24, 44, 18, 32)),
)


def write_layouts(out: str | Path) -> Path:
    """Write a file of each layout to the folder `out`, and return it."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    asked = [([{"role": "user", "content": ASK + text}], answer) for text, answer in SUMS]
    marked = [([{**turn, "step_loss_mask": 1} for turn in turns], a) for turns, a in asked]
    _lines(out / "dapo-math-17k.jsonl", [{"prompt": p, "label": a} for p, a in marked])
    contest = [([{"role": "user", "content": text}], answer) for text, answer in CONTEST]
    _lines(out / "aime-2024.jsonl", [{"prompt": p, "label": a} for p, a in contest])
    _parquet(
        out / "dapo-math-17k.parquet",
        [
            {
                "data_source": "math_dapo",
                "prompt": turns,
                "ability": "MATH",
                "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
                "extra_info": {"index": f"row-{i}"},
            }
            for i, (turns, answer) in enumerate(asked)
        ],
    )
    _parquet(out / "geometry3k.parquet", [_triangle(i, *angles) for i, angles in enumerate(ANGLES)])
    _parquet(out / "clevr-cogent.parquet", [_items(count) for count in COUNTS])
    _parquet(out / "refcoco.parquet", [_region(i) for i in range(len(BOXES))])
    return out


def _triangle(i: int, first: int, second: int) -> dict[str, Any]:
    image = Image.new("RGB", SIZE, "white")
    draw = ImageDraw.Draw(image)
    draw.polygon([(16, 68), (96, 68), (40 + 12 * i, 14)], outline="black")
    draw.text((24, 56), str(first), fill="black")
    draw.text((74, 56), str(second), fill="black")
    return {
        "images": [_png(image, None)],
        "problem": "<image>Two angles of a triangle are given in degrees. Find the third.",
        "answer": str(180 - first - second),
    }


def _items(count: int) -> dict[str, Any]:
    image = Image.new("RGB", SIZE, "white")
    draw = ImageDraw.Draw(image)
    for k in range(count):
        x, y = 8 + 34 * (k % 3), 12 + 38 * (k // 3)
        draw.ellipse((x, y, x + 20, y + 20), fill=BOXES[k % 3][0])
    return {
        "image": _png(image, f"items_{count}.png"),
        "problem": "How many items are in the picture?",
        "solution": f"<answer> {count} </answer>",
    }


def _region(i: int) -> dict[str, Any]:
    image = Image.new("RGB", SIZE, "white")
    draw = ImageDraw.Draw(image)
    for colour, (x, y, width, height) in BOXES:
        draw.rectangle((x, y, x + width - 1, y + height - 1), fill=colour)
    colour, (x, y, width, height) = BOXES[i]
    right, bottom = x + width, y + height
    return {
        "question_id": str(i),
        "image": _png(image, f"region_{i}.png"),
        "question": "Which area is marked in the picture?",
        "answer": [f"the {colour} block", f"{colour} one"],
        "segmentation": [x, y, right, y, right, bottom, x, bottom],
        "bbox": [x, y, width, height],
        "iscrowd": 0,
        "file_name": f"region_{i}.png",
    }


def _png(image: Image.Image, path: str | None) -> dict[str, Any]:
    """A picture as the library `datasets` stores it."""
    out = io.BytesIO()
    image.save(out, "PNG")
    return {"bytes": out.getvalue(), "path": path}


def _lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _parquet(path: Path, rows: list[dict]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    picture = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    types = {
        "image": picture,
        "images": pa.list_(picture),
        "bbox": pa.list_(pa.float32()),
        "segmentation": pa.list_(pa.float32()),
        "iscrowd": pa.int8(),
    }
    columns = {name: pa.array([row[name] for row in rows], types.get(name)) for name in rows[0]}
    pq.write_table(pa.table(columns), path)
