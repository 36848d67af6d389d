"""Small data sets made on the spot, in LLaVA format: for the quick start, demos and tests.

Each call writes OUT/train.json, OUT/val.json, OUT/images/*.png and OUT/README.md; image paths in
the JSON files are relative to OUT. The same arguments write the same bytes, over and over.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from vireo.errors import InputError

SIDE = 56  # pixels; four 28x28 cells, which a patch-14 model with 2x2 merging sees as 4 tokens

DIGITS_VAL = 300
DIGITS_README = """\
# Handwritten digits as questions and answers

1,497 training and 300 held-out rows: a picture of a handwritten digit, the question "Which digit
is this?", and the digit. The 8x8 pictures are enlarged to 56x56 (bicubic).

Source: "Optical Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak, UCI Machine Learning
Repository, https://doi.org/10.24432/C50P49, licence CC BY 4.0
(https://creativecommons.org/licenses/by/4.0/); the 1,797 pictures that scikit-learn's `load_digits`
carries. Changes: enlarged, shuffled, put into question form.
"""

COLOURS = {"red": "#d62728", "green": "#2ca02c", "blue": "#1f77b4", "yellow": "#f2c80f"}
SHAPES = ("circle", "square", "triangle")
SHAPES_README = """\
# Shapes as questions and answers

One to four shapes of one kind and colour, drawn by a program, with a question about the colour, the
kind or the number. Nine rows of ten are for training, the rest is held out. Free of any licence
(CC0 1.0).
"""


def write_digits(out: str | Path, *, seed: int = 0) -> Path:
    """Write 1,497 training and 300 held-out rows of scikit-learn's handwritten digits to `out`.

    `seed` decides which rows are held out, and the order. InputError without scikit-learn.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InputError(
            "the digits come with scikit-learn, which is not installed: pip install scikit-learn"
        ) from None

    digits = load_digits()
    out = Path(out)
    (out / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for i, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        name = f"digit_{i:04d}"
        small = Image.fromarray((pixels * 255 / 16).round().astype("uint8"))  # 0..16 to 0..255
        small.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(out / f"images/{name}.png")
        rows.append(_row(name, "Which digit is this?", str(label)))
    random.Random(seed).shuffle(rows)
    return _write(out, rows, DIGITS_VAL, DIGITS_README)


def write_shapes(out: str | Path, *, rows: int = 2000, seed: int = 0) -> Path:
    """Write `rows` pictures of coloured shapes with one question each to `out`, 10 % held out."""
    if rows < 10:
        raise InputError(f"shapes need at least 10 rows, so that one can be held out; got {rows}")
    rng = random.Random(seed)
    out = Path(out)
    (out / "images").mkdir(parents=True, exist_ok=True)
    table = []
    for i in range(rows):
        name = f"shapes_{i:05d}"
        colour, shape, count = rng.choice(list(COLOURS)), rng.choice(SHAPES), rng.randint(1, 4)
        _draw(colour, shape, count, rng).save(out / f"images/{name}.png")
        question, answer = rng.choice(
            [
                ("What colour is it?", colour),
                ("Which shape is it?", shape),
                ("How many shapes are there?", str(count)),
            ]
        )
        table.append(_row(name, question, answer))
    return _write(out, table, rows // 10, SHAPES_README)


def _draw(colour: str, shape: str, count: int, rng: random.Random) -> Image.Image:
    """`count` shapes, each somewhere inside its own quarter of a white picture."""
    image = Image.new("RGB", (SIDE, SIDE), "white")
    draw = ImageDraw.Draw(image)
    half = SIDE // 2
    for quarter in rng.sample(range(4), count):
        size = rng.randint(14, 24)
        x = quarter % 2 * half + rng.randint(1, half - size - 1)
        y = quarter // 2 * half + rng.randint(1, half - size - 1)
        box = (x, y, x + size, y + size)
        if shape == "circle":
            draw.ellipse(box, fill=COLOURS[colour])
        elif shape == "square":
            draw.rectangle(box, fill=COLOURS[colour])
        else:
            corners = [(x + size // 2, y), (x, y + size), (x + size, y + size)]
            draw.polygon(corners, fill=COLOURS[colour])
    return image


def _row(name: str, question: str, answer: str) -> dict[str, Any]:
    return {
        "id": name,
        "image": f"images/{name}.png",
        "conversations": [
            {"from": "human", "value": f"<image>\n{question}"},
            {"from": "gpt", "value": answer},
        ],
    }


def _write(out: Path, rows: list[dict], held_out: int, readme: str) -> Path:
    """The two JSON arrays, one row a line so that `head` and an error's line number help."""
    for name, part in (("train", rows[:-held_out]), ("val", rows[-held_out:])):
        lines = ",\n".join(json.dumps(row) for row in part)
        (out / f"{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    (out / "README.md").write_text(readme, encoding="utf-8")
    return out
