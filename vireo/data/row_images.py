"""The images of one row: which columns and parts name them, and where they stand in the text."""

from __future__ import annotations

import re
import reprlib
from dataclasses import dataclass
from typing import Any

from vireo.data.conversation import Role
from vireo.data.references import ImageError, as_row_error, is_data_url, local_path, quoted
from vireo.errors import RowError

PLACEHOLDER = "<image>"
IMAGE_KEYS = ("images", "image")
_LIKE_IMAGES = re.compile("image|img|picture|photo", re.IGNORECASE)

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80
short = _repr.repr  # a value for a message: what rows hold may be huge


@dataclass(slots=True)
class Slot:
    """An image part; `value` is its own image, None where the row's column has it."""

    value: Any


@dataclass(slots=True)
class Draft:
    """A turn before its image slots have numbers."""

    role: Role
    items: list[str | Slot]
    fields: dict[str, Any]  # of `Turn`, besides its role and parts


def place_images(drafts: list[Draft], row: dict) -> list[Any]:
    """The row's images in reading order; placeholders in texts become slots in the drafts."""
    column, emptied = _column(row)
    slots = [item for draft in drafts for item in draft.items if isinstance(item, Slot)]
    if slots:  # parts are the structure, so `<image>` in a text was typed
        unfilled = [slot for slot in slots if slot.value is None]
        if not unfilled and column == [slot.value for slot in slots]:
            return column
        if len(unfilled) != len(column):
            what = f"{len(column)} image(s) in the column for {len(unfilled)} image part(s) that "
            raise RowError("placeholder_count", what + "name none: their numbers must be equal")
        for slot, value in zip(unfilled, column):
            slot.value = value
        return [slot.value for slot in slots]
    if not column:
        if any(_asks(draft) and _opens_or_closes(draft) for draft in drafts):
            _check_none_lost(row, emptied)
        return []
    counts = [_count(draft) for draft in drafts]
    asked = sum([count for count, draft in zip(counts, drafts) if _asks(draft)])
    if asked == len(column):
        for draft, count in zip(drafts, counts):
            if count and _asks(draft):
                draft.items = [piece for text in draft.items for piece in _split(text)]
        return column
    first = next((draft for draft in drafts if draft.role == "user"), None)
    if not any(counts) and first is not None:  # as LLaVA does: before the first question
        first.items[:0] = [Slot(value) for value in column]
        return column
    what = f"{len(column)} image(s) but {asked} {PLACEHOLDER} in what the user and the "
    raise RowError("placeholder_count", what + "system say: their numbers must be equal")


def _check_none_lost(row: dict, emptied: bool) -> None:
    """A text asks for an image, and there is none: then nothing may look as if there was one."""
    other = next((k for k, v in row.items() if _LIKE_IMAGES.search(str(k)) and not is_empty(v)), "")
    what = f"0 images but {PLACEHOLDER} in the text: "
    if emptied:
        what += "the image column is empty. Give the image, or drop the column if it is text"
    elif other:
        what += f"if {short(other)} names the image, call that column 'image', else rename it"
    if emptied or other:
        raise RowError("placeholder_count", what)


def _asks(draft: Draft) -> bool:
    """Whether `<image>` in the turn's text can be a placeholder: in an answer it is text."""
    return draft.role in ("user", "system")


def _count(draft: Draft) -> int:
    return sum([item.count(PLACEHOLDER) for item in draft.items if isinstance(item, str)])


def _opens_or_closes(draft: Draft) -> bool:
    """Whether a text has `<image>` where data sets put it, not in the middle of a sentence."""
    texts = [item.strip() for item in draft.items if isinstance(item, str)]
    return any(text.startswith(PLACEHOLDER) or text.endswith(PLACEHOLDER) for text in texts)


def _split(text: str | Slot) -> list[str | Slot]:
    if not isinstance(text, str):
        return [text]
    first, *others = text.split(PLACEHOLDER)
    pieces: list[str | Slot] = [first]
    for after in others:
        pieces += [Slot(None), after]
    return pieces


def _column(row: dict) -> tuple[list[Any], bool]:
    """The images of the row's column, and whether it has a column that is there but empty."""
    found: list[list[Any]] = []
    emptied = False
    for key in IMAGE_KEYS:
        if key in row:
            value = row[key]
            if is_empty(value):
                emptied = True
            else:
                found.append(value if isinstance(value, list) else [value])
                for image in found[-1]:
                    check_kind(image)
    if not found:
        return [], emptied
    if len(found) > 1 and found[0] != found[1]:
        raise RowError("ambiguous_image", "the columns 'images' and 'image' name different images")
    return found[0], False


def is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list) and not value)


def check_kind(value: Any) -> None:
    """An image is named by a text, by bytes or by an object with one of them."""
    inner = value
    if isinstance(value, dict):
        content = value.get("bytes")
        inner = value.get("path") if content is None else content
        if not isinstance(inner, str if content is None else bytes) or inner == "":
            what = "an image object must hold 'bytes' or a 'path', found "
            raise RowError("bad_image_value", what + short(value))
    if not isinstance(inner, str | bytes) or inner == "":
        what = "an image must be a path, a data URL or bytes, found " + short(value)
        raise RowError("bad_image_value", " ".join(what.split()))


def check_image(value: Any, root: str | None) -> None:
    """Path rules of what `check_kind` accepts, by the text alone."""
    if isinstance(value, dict):
        value = value["path"] if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes) or is_data_url(value):
        return
    if "\0" in value or not can_encode(value):
        raise RowError("bad_image_value", f"no file can be named {quoted(value, 100)}")
    if value[0] == "/" or ":" in value or ".." in value:  # other paths cannot leave the root
        try:
            local_path(value, root)
        except ImageError as error:
            raise as_row_error(error) from error


def can_encode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
