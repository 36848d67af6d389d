"""Draws two trainings' loss curves and how far they are apart, with Pillow alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

SIZE = (1720, 1060)
PANEL = (720, 420, 280)  # width, height of the curves, height of the differences
LEFTS = (110, 970)
TOPS = (120, 650)
INK, GREY, GRID = "#24292f", "#57606a", "#d8dee4"
OURS, THEIRS, APART, OTHER = "#0969da", "#f2851b", "#6639ba", "#bf3989"
FLOOR, CEILING = -9, 0  # powers of ten on the axis of differences

Place = Callable[[float, float], tuple[float, float]]


def draw(text: Any, vlm: Any, vlm_as_it_comes: Any, path: Path) -> None:
    """A PNG of two panels. Each argument is a `Pair` of trl_loss.py."""
    image = Image.new("RGB", SIZE, "white")
    pen = ImageDraw.Draw(image)
    lines = ((text, None), (vlm, vlm_as_it_comes))
    titles = ("Text: tiny Qwen3", "Pictures and text: tiny Qwen2.5-VL")
    for left, title, (pair, other) in zip(LEFTS, titles, lines):
        write(pen, (left, 26), title, 34, INK)
        curves(pen, left, pair)
        differences(pen, left, pair, other)
    image.quantize(64).save(path, optimize=True)


def curves(pen: ImageDraw.ImageDraw, left: int, pair: Any) -> None:
    top, height = TOPS[0], PANEL[1]
    ours, theirs = [record["loss"] for record in pair.vireo], pair.trl.losses
    highest = math.ceil(max(ours + theirs))
    place = axes(pen, left, top, height, len(ours), (0, highest), range(highest + 1), str)
    pen.line([place(i, y) for i, y in enumerate(ours, 1)], fill=OURS, width=5)
    for i, y in enumerate(theirs, 1):
        dot(pen, place(i, y), THEIRS)
    right = left + PANEL[0] - 190
    write(pen, (left, top - 38), "loss of each optimizer step", 24, GREY)
    pen.line([(right, top + 24), (right + 40, top + 24)], fill=OURS, width=5)
    write(pen, (right + 56, top + 8), "Vireo", 24, INK)
    dot(pen, (right + 20, top + 60), THEIRS)
    write(pen, (right + 56, top + 44), "TRL", 24, INK)


def differences(pen: ImageDraw.ImageDraw, left: int, pair: Any, other: Any) -> None:
    top, height = TOPS[1], PANEL[2]
    count = len(pair.differences)
    powers = range(FLOOR, CEILING + 1, 3)
    place = axes(pen, left, top, height, count, (FLOOR, CEILING), powers, "1e{}".format)
    limit = place(1, math.log10(1e-4))[1]
    for x in range(left, left + PANEL[0], 16):
        pen.line([(x, limit), (x + 8, limit)], fill=INK, width=2)
    write(pen, (left + 14, limit + 4), "tolerance 1e-4", 22, INK)
    write(pen, (left, top - 38), "difference of the losses, logarithmic", 24, GREY)
    plot_differences(pen, place, pair.differences, APART)
    write(pen, (left + 340, limit + 8), f"TRL as it comes, {pair.way.label}", 22, APART)
    if other is not None:
        plot_differences(pen, place, other.differences, OTHER)
        write(pen, (left + 340, limit - 36), f"TRL as it comes, {other.way.label}", 22, OTHER)
    write(pen, (left, top + height + 48), "optimizer step", 24, GREY)


def plot_differences(
    pen: ImageDraw.ImageDraw, place: Place, values: Sequence[float], colour: str
) -> None:
    logs = [math.log10(max(value, 10**FLOOR)) for value in values]
    points = [place(i, y) for i, y in enumerate(logs, 1)]
    pen.line(points, fill=colour, width=2)
    for point in points:
        dot(pen, point, colour, 4)


def axes(
    pen: ImageDraw.ImageDraw,
    left: int,
    top: int,
    height: int,
    steps: int,
    span: tuple[float, float],
    ticks: Sequence[int],
    label: Callable[[int], str],
) -> Place:
    """Frame, grid and labels; returns where (step, value) is, in pixels."""
    width, (low, high) = PANEL[0], span

    def place(x: float, y: float) -> tuple[float, float]:
        return (left + width * x / steps, top + height * (high - y) / (high - low))

    for tick in ticks:
        y = place(0, tick)[1]
        pen.line([(left, y), (left + width, y)], fill=GRID, width=2)
        write(pen, (left - 14, y - 14), label(tick), 24, GREY, right=True)
    for step in range(0, steps + 1, 10):
        x = place(step, low)[0]
        pen.line([(x, top + height), (x, top + height + 8)], fill=GREY, width=2)
        write(pen, (x + 12, top + height + 10), str(step), 24, GREY, right=True)
    pen.rectangle((left, top, left + width, top + height), outline=GREY, width=2)
    return place


def dot(pen: ImageDraw.ImageDraw, at: tuple[float, float], colour: str, radius: int = 6) -> None:
    x, y = at
    pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)


def write(
    pen: ImageDraw.ImageDraw,
    at: tuple[float, float],
    words: str,
    size: int,
    colour: str,
    right: bool = False,
) -> None:
    font = ImageFont.load_default(size)
    x, y = at
    pen.text((x - pen.textlength(words, font) if right else x, y), words, fill=colour, font=font)
