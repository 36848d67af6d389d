"""Rows with a prompt, its expected answer and its images in columns of their own.

Each becomes a row of `messages`, whose rules then hold. Columns are named by the settings
(`Columns`) or recognised by the tables here; docs/prompts.md has where each layout is published.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vireo.data.row_images import IMAGE_KEYS, is_empty, short
from vireo.data.rows import CONVERSATION_KEYS, ROLES
from vireo.errors import InputError, RowError

PROMPTS = ("prompt", "problem", "question")
LABELS = ("label", "answer", "solution", "reward_model.ground_truth", "bbox")
# The columns of a COCO annotation, whose `bbox` is x, y, width, height.
_ANNOTATION = frozenset(("segmentation", "iscrowd"))


@dataclass(frozen=True)
class Columns:
    """Columns by name, `a.b` for b inside the object a. None: what the row's layout has."""

    prompt: str | None = None
    label: str | None = None
    images: str | None = None

    @classmethod
    def of(cls, input_key: str | None, label_key: str | None, multimodal_keys: str | None):
        """Those that settings of these names give. Raises InputError, which names the flag."""
        images = _image_key(multimodal_keys)
        flags = {"input_key": input_key, "label_key": label_key, "multimodal_keys": images}
        for flag, key in flags.items():
            if key is not None and not all(key.split(".")):
                raise InputError(f"--{flag}: found {key!r}, expected a column, or a.b inside it")
        return cls(input_key, label_key, images)


@dataclass(frozen=True)
class _Grounding:
    """A published layout of phrases and the box that each describes; the prompt asks for it."""

    marks: frozenset[str]  # columns that a row of this layout has, all of them
    phrases: str
    images: str | None  # None: as in other rows


_GROUNDING = (
    _Grounding(frozenset(("answer", "bbox")) | _ANNOTATION, "answer", None),
    _Grounding(frozenset(("captions", "bbox", "raw_anns", "image_path")), "captions", "image_path"),
)
BY_ITSELF = Columns()


def prompt_row(row: Any, columns: Columns = BY_ITSELF) -> Any:
    """The row as one of `messages`, its label as the column `answer`; those of today as they are.

    Raises RowError where a named column is missing, or where the row can be read in two ways.
    """
    if not isinstance(row, dict):
        return row
    own = [key for key in CONVERSATION_KEYS if row.get(key) is not None]
    if own and (columns == BY_ITSELF or (columns.prompt is None and len(own) > 1)):
        return row
    made = {key: value for key, value in row.items() if key not in CONVERSATION_KEYS}
    layout, images, label = None if own else _grounding(row, columns), columns.images, columns.label
    if layout is not None:
        images, label = images or layout.images, "bbox"
        made["messages"] = [{"role": "user", "content": _question(row[layout.phrases])}]
    else:
        prompt = columns.prompt or (own[0] if own else _recognised(row, PROMPTS, "prompt", label))
        told = prompt.rsplit(".", 1)[-1] in CONVERSATION_KEYS
        if label is None and not told:
            label = _recognised(row, LABELS, "label", prompt)
        turns = _turns(_value(row, prompt, "input_key"), prompt)
        if _is_answer(turns[-1]):
            if not told:
                what = f"the prompt in column {prompt!r} ends with an assistant's turn: let it end "
                raise RowError("turn_order", what + "with the user's, and make the answer a label")
            turns = turns if label is None else turns[:-1]
        made.pop(prompt, None)
        made["messages"] = turns
    if images is not None:
        found = _value(row, images, "multimodal_keys")
        for key in (images, *IMAGE_KEYS):
            made.pop(key, None)
        made["images"] = found
    if label is not None:
        found = _value(row, label, "label_key")
        made.pop(label, None)
        made["answer"] = _box(found, row) if label == "bbox" else found
    return made


def _image_key(text: str | None) -> str | None:
    if text is None or not text.lstrip().startswith("{"):
        return text
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if isinstance(found, dict) and list(found) == ["image"] and isinstance(found["image"], str):
        return found["image"]
    raise InputError(
        f"--multimodal_keys: found {text!r}, expected the name of a column, or "
        '{"image": "NAME"}; other media are not supported'
    )


def _get(row: dict, path: str) -> Any:
    """The value at a path; None where there is none. A column may have a dot in its name."""
    if path in row or "." not in path:
        return row.get(path)
    found: Any = row
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _value(row: dict, path: str, flag: str) -> Any:
    found = _get(row, path)
    if found is None:
        what = f"there is nothing in column {path!r}: name another with --{flag}; "
        raise RowError("missing_column", what + _there(row, path))
    return found


def _there(row: dict, path: str = "") -> str:
    """The columns of a row, and the keys of the object that a path leads into."""
    first, dot, _ = path.partition(".")
    text = "the row has " + (", ".join(map(short, list(row)[:30])) or "no column")
    inner = row.get(first)
    if dot and isinstance(inner, dict):
        text += f"; {first!r} has {', '.join(map(short, list(inner)[:30])) or 'nothing'}"
    return text


def _recognised(row: dict, names: Sequence[str], what: str, other: str | None) -> Any:
    """The one of some columns that a row has, `other` aside. None: a label that it lacks."""
    flag = "--input_key" if what == "prompt" else "--label_key"
    found = [name for name in names if name != other and not is_empty(_get(row, name))]
    if len(found) > 1 and any(_get(row, name) != _get(row, found[0]) for name in found):
        either = " or ".join(map(repr, found))
        raise RowError("ambiguous_format", f"the {what} can be {either}: name it with {flag}")
    if not found and what == "prompt":
        known = ", ".join(map(repr, (*CONVERSATION_KEYS, *names)))
        text = f"the row has none of {known}: name the prompt's column with {flag}; {_there(row)}"
        raise RowError("no_conversation", text)
    return found[0] if found else None


def _turns(prompt: Any, column: str) -> list:
    if isinstance(prompt, str) and prompt:
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and prompt and all(isinstance(turn, dict) for turn in prompt):
        return prompt
    what = f"the prompt in column {column!r} must be a text or a list of turns, found "
    raise RowError("content_type", what + short(prompt))


def _is_answer(turn: dict) -> bool:
    role = turn.get("from") if turn.get("role") is None else turn["role"]
    return isinstance(role, str) and ROLES.get(role.lower()) == "assistant"


def _grounding(row: dict, columns: Columns) -> _Grounding | None:
    if columns.prompt is not None or columns.label not in (None, "bbox"):
        return None
    for layout in _GROUNDING:
        if layout.marks.issubset(row) and isinstance(row[layout.phrases], list):
            return layout
    return None


def _question(phrases: list) -> str:
    if not phrases or not isinstance(phrases[0], str) or not phrases[0].strip():
        what = "the box of the row is described by no phrase, found " + short(phrases)
        raise RowError("content_type", what)
    return (
        f'Where in the picture is what this phrase describes: "{phrases[0].strip()}"? '
        "Answer with its bounding box in pixels, [x1, y1, x2, y2]."
    )


def _box(value: Any, row: dict) -> Any:
    """A box by its corners, if the row's layout says that it has the width and the height."""
    if not _ANNOTATION.issubset(row):
        return value
    numbers = [n for n in value if type(n) in (int, float)] if isinstance(value, list) else []
    if len(numbers) != 4 or numbers != value or not all(map(math.isfinite, numbers)):
        what = f"a 'bbox' must be x, y, width and height, found {short(value)}"
        raise RowError("content_type", what)
    x, y, width, height = numbers
    return [x, y, x + width, y + height]
