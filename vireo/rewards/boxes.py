"""Rewards for boxes: [x1, y1, x2, y2], in the units of the label."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from vireo.errors import InputError
from vireo.rewards import expected_answer
from vireo.rewards.text import said
from vireo.rollout.sample import Sample

Box = Sequence[float]

_NUMBER = re.compile(r"(?<![\w.])-?(?:\d+(?:\.\d*)?|\.\d+)")  # 2 in bbox_2d is none
_KEYED = re.compile(r'"bbox_2d"\s*:\s*\[([^\[\]]*)\]')
_LARGEST = 1e100  # areas of larger boxes are not finite


def box_iou(sample: Sample) -> float:
    """Intersection over union, 0 to 1, of the response's box and the label's; 0 for a response
    that does not hold just four numbers, all of them or those of its one "bbox_2d": [...], or
    whose corners are the wrong way round."""
    found = _found(sample)
    return 0.0 if found is None else _areas(found, _wanted(sample, "box_iou"))[0]


def box_giou(sample: Sample) -> float:
    """Generalised IoU, -1 to 1 (Rezatofighi et al. 2019, arXiv 1902.09630): IoU minus the share of
    the smallest box round both that neither covers; -1 where `box_iou` finds no box."""
    found = _found(sample)
    if found is None:
        return -1.0
    iou, union, hull = _areas(found, _wanted(sample, "box_giou"))
    return iou - (hull - union) / hull


def _areas(a: Box, b: Box) -> tuple[float, float, float]:
    """IoU, and the areas of the union and of the box round both."""
    wide = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    high = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    both = wide * high
    union = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)) - both
    hull = (max(a[2], b[2]) - min(a[0], b[0])) * (max(a[3], b[3]) - min(a[1], b[1]))
    return both / union, union, hull


def _found(sample: Sample) -> Box | None:
    text = said(sample)
    keyed = _KEYED.findall(text)
    numbers = [float(n) for n in _NUMBER.findall(keyed[0] if len(keyed) == 1 else text)]
    return numbers if len(numbers) == 4 and _is_box(numbers) else None


def _wanted(sample: Sample, who: str) -> Box:
    label = sample.conversation.extra.get("answer")
    label = expected_answer(sample, who) if label is None else label
    try:
        given = json.loads(label) if isinstance(label, str) else label
        box = [float(n) for n in (given["bbox_2d"] if isinstance(given, dict) else given)]
    except (ValueError, TypeError, KeyError, OverflowError):
        box = []
    if len(box) != 4 or not _is_box(box):
        raise InputError(
            f"{sample.name}: {who} expects a label [x1, y1, x2, y2] with x1 < x2 and y1 < y2, "
            f"found {label!r:.80}"
        )
    return box


def _is_box(numbers: Box) -> bool:
    fit = all(abs(n) < _LARGEST for n in numbers)  # and no nan
    return fit and numbers[0] < numbers[2] and numbers[1] < numbers[3]
