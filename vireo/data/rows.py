"""One row of a data file, as parsed JSON or Arrow gives it, becomes a Conversation or a RowError.

Both published formats are one here: LLaVA (`conversations` of from/value, `image`) and messages
(`messages` of role/content, `images`). What is accepted and refused is listed in docs/data.md.
"""

from __future__ import annotations

import json
import math
import reprlib
from dataclasses import dataclass
from typing import Any

from vireo.data.conversation import Conversation, Image, ImageRef, Role, Text, Turn
from vireo.data.references import ImageError, as_row_error, is_data_url, local_path
from vireo.errors import RowError

PLACEHOLDER = "<image>"
CONVERSATION_KEYS = ("conversations", "messages")
IMAGE_KEYS = ("images", "image")
VIDEO_KEYS = ("videos", "video")
KNOWN_KEYS = frozenset(("id", "weight", "tools", *CONVERSATION_KEYS, *IMAGE_KEYS, *VIDEO_KEYS))
ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
# Rows with nothing wrong but nothing to learn either: left out with a warning, never an error.
NOTHING_TO_LEARN = frozenset(("no_assistant", "empty_assistant"))

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


@dataclass(slots=True)
class _Slot:
    """An image part; `value` is its own image, None where the row's column has it."""

    value: Any


@dataclass(slots=True)
class _Draft:
    """A turn before its image slots have numbers."""

    role: Role
    items: list[str | _Slot]
    tool_calls: tuple[dict, ...]


def parse_row(row: Any, root: str | None = None, where: str = "") -> Conversation:
    """The conversation of one row; images stay references (with `root`) and no file is touched.

    Raises RowError, without its place in the file.
    """
    if not isinstance(row, dict):
        raise RowError("row_type", f"a row must be an object, found {_short.repr(row)}")
    for key in VIDEO_KEYS:
        if not _is_empty(row.get(key)):
            raise RowError("video", f"the row has a {key!r} column, and video is not supported")
    drafts = [_draft(turn, i) for i, turn in enumerate(_turns(row))]
    images = _place_images(drafts, row)
    for image in images:
        _check_image(image, root)
    conversation = Conversation(
        turns=_number_slots(drafts),
        images=tuple([ImageRef(image, root) for image in images]),
        id=row_id(row),
        weight=_weight(row),
        tools=_objects(row.get("tools"), "tools"),
        where=where,
        extra={key: value for key, value in row.items() if key not in KNOWN_KEYS},
    )
    _check_id(conversation.id)
    _check_answers(conversation.turns)
    return conversation


def row_id(row: Any) -> str | None:
    """The row's id as text; None where it has none."""
    value = row.get("id") if isinstance(row, dict) else None
    return value if value is None or isinstance(value, str) else str(value)


def row_place(name: str, number: int, line: int | None, row: Any) -> str:
    """How messages call a row: `train.json row 11 (id 'a', line 12)`; rows count from 0."""
    known = row_id(row)
    details = [] if known is None else [f"id {known[:100]!r}"]
    details += [] if line is None else [f"line {line}"]
    return f"{name} row {number}" + (f" ({', '.join(details)})" if details else "")


# -- turns ---------------------------------------------------------------------------------------


def _turns(row: dict) -> list:
    given = [key for key in CONVERSATION_KEYS if row.get(key) is not None]
    if not given:
        raise RowError("no_conversation", "the row has neither 'conversations' nor 'messages'")
    if len(given) > 1:
        raise RowError("ambiguous_format", "the row has both 'conversations' and 'messages'")
    turns = row[given[0]]
    if not isinstance(turns, list) or not turns:
        what = f"{given[0]!r} must be a list of turns, found {_short.repr(turns)}"
        raise RowError("no_conversation", what)
    return turns


def _draft(turn: Any, i: int) -> _Draft:
    if not isinstance(turn, dict):
        what = f"turn {i + 1} must be an object, found {_short.repr(turn)}"
        raise RowError("no_conversation", what)
    name, content = _either(turn, "from", "role", i), _either(turn, "value", "content", i)
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        what = f"turn {i + 1} has the role {_short.repr(name)}, expected one of {', '.join(ROLES)}"
        raise RowError("unknown_role", what)
    if turn.get("weight") not in (None, 1):
        raise RowError("weight", f"turn {i + 1} has a weight of its own: only rows can have one")
    calls = _objects(turn.get("tool_calls"), "tool_calls")
    if calls and role != "assistant":
        raise RowError("tool_calls", f"turn {i + 1} is a {role}'s and calls tools")
    items: list[str | _Slot] = []
    if isinstance(content, str):
        items = [content]
    elif isinstance(content, list):
        items = [_part(part, i) for part in content]
    elif content is not None or not calls:
        what = f"the text of turn {i + 1} must be a string or a list of parts, found "
        raise RowError("content_type", what + _short.repr(content))
    for item in items:
        if isinstance(item, str):
            _check_text(item, f"the text of turn {i + 1}")
    return _Draft(role, items, calls)


def _either(turn: dict, first: str, second: str, i: int) -> Any:
    """The value under one of two names; Arrow fills the other one with null."""
    value, other = turn.get(first), turn.get(second)
    if value is None:
        return other
    if other is not None and other != value:
        raise RowError("ambiguous_format", f"turn {i + 1} has both {first!r} and {second!r}")
    return value


def _part(part: Any, i: int) -> str | _Slot:
    if not isinstance(part, dict):
        what = f"a part of turn {i + 1} must be an object with a 'type', found "
        raise RowError("content_type", what + _short.repr(part))
    kind = part.get("type")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            what = f"a text part of turn {i + 1} must hold a string, found "
            raise RowError("content_type", what + _short.repr(part.get("text")))
        return part["text"]
    if kind in ("image", "image_url"):
        return _Slot(_own_image(part, i))
    if isinstance(kind, str) and "video" in kind:
        raise RowError("video", f"turn {i + 1} has a {kind!r} part, and video is not supported")
    what = f"turn {i + 1} has a part of type {_short.repr(kind)}, expected 'text' or 'image'"
    raise RowError("part_type", what)


def _own_image(part: dict, i: int) -> Any:
    if part.get("bytes") is not None:
        return {"bytes": part["bytes"], "path": part.get("path")}
    values = [part[key] for key in ("image", "path", "url", "image_url") if part.get(key) is not None]
    values = [v["url"] if isinstance(v, dict) and v.get("url") is not None else v for v in values]
    if any(value != values[0] for value in values):
        raise RowError("ambiguous_image", f"an image part of turn {i + 1} names two images")
    return values[0] if values else None


def _check_answers(turns: tuple[Turn, ...]) -> None:
    answers = [turn for turn in turns if turn.role == "assistant"]
    if not answers:
        raise RowError("no_assistant", "the row has no assistant turn, so nothing to learn")
    for turn in answers:
        if not (turn.tool_calls or turn.text.strip() or len(turn.parts) > _texts(turn)):
            raise RowError("empty_assistant", "the text of an assistant turn is empty")


def _texts(turn: Turn) -> int:
    return sum(isinstance(part, Text) for part in turn.parts)


# -- images --------------------------------------------------------------------------------------


def _place_images(drafts: list[_Draft], row: dict) -> list[Any]:
    """The row's images in reading order; placeholders in texts become slots in the drafts."""
    column, emptied = _column(row)
    slots = [item for draft in drafts for item in draft.items if isinstance(item, _Slot)]
    if slots:  # parts are the structure, so `<image>` in a text was typed
        unfilled = [slot for slot in slots if slot.value is None]
        if not unfilled and column == [slot.value for slot in slots]:
            return column
        if len(unfilled) != len(column):
            what = f"{len(column)} images in the column but {len(unfilled)} image parts without one"
            raise RowError("placeholder_count", what)
        for slot, value in zip(unfilled, column):
            slot.value = value
        return [slot.value for slot in slots]
    asking = [draft for draft in drafts if draft.role in ("user", "system")]
    if not column:
        if emptied and any(_opens_or_closes(item) for draft in asking for item in draft.items):
            what = f"0 images but a {PLACEHOLDER} for one: the image column is empty. Give the "
            raise RowError("placeholder_count", what + "image, or drop the column if it is text")
        return []
    count = sum(_count(draft) for draft in asking)
    if count == 0 and not any(_count(draft) for draft in drafts):
        first = next((draft for draft in drafts if draft.role == "user"), None)
        if first is not None:  # as LLaVA does: images go before the first question
            first.items[:0] = [_Slot(value) for value in column]
            return column
    if count != len(column):
        what = f"{len(column)} images but {count} {PLACEHOLDER} placeholders in what the user and "
        raise RowError("placeholder_count", what + "the system say: their numbers must be equal")
    for draft in asking:
        draft.items = [piece for item in draft.items for piece in _split(item)]
    return column


def _count(draft: _Draft) -> int:
    return sum(item.count(PLACEHOLDER) for item in draft.items if isinstance(item, str))


def _opens_or_closes(item: str | _Slot) -> bool:
    """Whether a text has `<image>` where data sets put it, not in the middle of a sentence."""
    text = item.strip() if isinstance(item, str) else ""
    return text.startswith(PLACEHOLDER) or text.endswith(PLACEHOLDER)


def _split(item: str | _Slot) -> list[str | _Slot]:
    if not isinstance(item, str) or PLACEHOLDER not in item:
        return [item]
    first, *others = item.split(PLACEHOLDER)
    pieces: list[str | _Slot] = [first]
    for text in others:
        pieces += [_Slot(None), text]
    return pieces


def _number_slots(drafts: list[_Draft]) -> tuple[Turn, ...]:
    turns, count = [], 0
    for draft in drafts:
        parts: list[Text | Image] = []
        for item in draft.items:
            if isinstance(item, _Slot):
                parts.append(Image(count))
                count += 1
            elif item:
                parts.append(Text(item))
        turns.append(Turn(draft.role, tuple(parts), draft.tool_calls))
    return tuple(turns)


def _column(row: dict) -> tuple[list[Any], bool]:
    """The images of the row's column, and whether it has a column that is there but empty."""
    found: list[list[Any]] = []
    for key in IMAGE_KEYS:
        if not _is_empty(value := row.get(key)):
            found.append(value if isinstance(value, list) else [value])
    if not found:
        return [], any(key in row for key in IMAGE_KEYS)
    if len(found) > 1 and found[0] != found[1]:
        raise RowError("ambiguous_image", "the columns 'images' and 'image' name different images")
    return found[0], False


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list) and not value)


def _check_image(value: Any, root: str | None) -> None:
    """Kind of value and path rules, by the text alone."""
    if isinstance(value, dict):
        content = value.get("bytes")
        value = content if content is not None else value.get("path")
        if not isinstance(value, str if content is None else bytes):
            what = "an image object must hold 'bytes' or a 'path', found "
            raise RowError("bad_image_value", what + _short.repr(value))
    if isinstance(value, bytes):
        return
    if not isinstance(value, str) or not value:
        what = f"an image must be a path, a data URL or bytes, found {_short.repr(value)}"
        raise RowError("bad_image_value", what)
    if is_data_url(value):
        return
    if "\0" in value or not _can_encode(value):
        raise RowError("bad_image_value", f"no file can be named {_short.repr(value)}")
    if value[0] == "/" or ":" in value or ".." in value:  # other paths cannot leave the root
        try:
            local_path(value, root)
        except ImageError as error:
            raise as_row_error(error) from error


# -- the other columns ---------------------------------------------------------------------------


def _weight(row: dict) -> float:
    value = row.get("weight")
    if value is None:
        return 1.0
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            if math.isfinite(value) and value >= 0:
                return float(value)
        except OverflowError:  # an integer beyond every float
            pass
    what = f"the row's weight must be a finite number of at least 0, found {_short.repr(value)}"
    raise RowError("weight", what)


def _objects(value: Any, what: str) -> tuple[dict, ...]:
    """A list of objects; the list, or each object, may be JSON text (as Arrow columns hold them)."""
    if _is_empty(value):
        return ()
    items = _unpacked(value, what)
    found = [_unpacked(item, what) for item in items] if isinstance(items, list) else []
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in found):
        message = f"{what!r} must be a list of objects, found {_short.repr(value)}"
        raise RowError("tool_calls", message)
    _check_text(json.dumps(found, ensure_ascii=False, default=str), repr(what))
    return tuple(found)


def _unpacked(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowError("tool_calls", f"{what!r} holds text that is no JSON: {error}") from error


def _check_id(text: str | None) -> None:
    if text is not None:
        _check_text(text, "the row's id")


def _check_text(text: str, what: str) -> None:
    if not _can_encode(text):
        raise RowError("unicode", f"{what} holds half a surrogate pair, which is no character")


def _can_encode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
