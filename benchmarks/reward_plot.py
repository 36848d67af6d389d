"""Draws the rewards of runs, two panels beside each other: each rollout's, and the held-out ones.

    python benchmarks/reward_plot.py --out docs/images/smollm2.png \
        "SmolLM2 adds" RUN-0,RUN-1 "SmolLM2 reads digits" RUN

A run is its folder, or its metrics.jsonl. Needs Pillow alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from loss_plot import GREY, INK, LEFTS, OTHER, OURS, PANEL, THEIRS, TOPS, axes, dot, write
from PIL import Image, ImageDraw

TENTHS = range(0, 11, 2)
COLOURS = (OURS, THEIRS, OTHER)


def panel(pen: ImageDraw.ImageDraw, left: int, title: str, runs: list[list[dict]]) -> None:
    steps = max(record["step"] for run in runs for record in run)
    top, height = TOPS[0], PANEL[1]
    place = axes(
        pen,
        left,
        top,
        height,
        steps,
        (0, 10),
        TENTHS,
        lambda tenth: "01"[tenth // 10] + f".{tenth % 10}",
    )
    for run, colour in zip(runs, COLOURS):
        trained = [(r["step"], r["reward"]) for r in run if "reward" in r]
        pen.line([place(x, 10 * y) for x, y in trained], fill=colour, width=3)
        for record in run:
            if "eval_reward" in record:
                at = place(record["step"], 10 * record["eval_reward"])
                dot(pen, at, "white", 13)
                dot(pen, at, colour, 10)
    write(pen, (left, 26), title, 34, INK)
    write(pen, (left, top - 38), "reward at temperature 1: rollouts, dots held out", 24, GREY)
    write(pen, (left, top + height + 48), "rollout", 24, GREY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("panels", nargs=4, metavar="TITLE RUNS")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    image = Image.new("RGB", (1720, 640), "white")
    pen = ImageDraw.Draw(image)
    for left, title, names in zip(LEFTS, given.panels[::2], given.panels[1::2]):
        paths = [Path(name) for name in names.split(",")]
        files = [path / "metrics.jsonl" if path.is_dir() else path for path in paths]
        runs = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        panel(pen, left, title, runs)
    image.quantize(64).save(given.out, optimize=True)


if __name__ == "__main__":
    main()
