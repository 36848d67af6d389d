"""One row of a data file, as parsed JSON or Arrow gives it, becomes a Conversation or a RowError.

Both published formats are one here: LLaVA (`conversations` of from/value, `image`) and messages
(`messages` of role/content, `images`). What is accepted and refused is listed in docs/data.md.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from typing import Any

from vireo.data.conversation import Conversation, Image, ImageRef, Role, Text, Turn
from vireo.data.references import is_data_url, quoted, web_url
from vireo.data.row_images import (
    IMAGE_KEYS,
    PLACEHOLDER,
    Draft,
    Slot,
    can_encode,
    check_image,
    check_kind,
    is_empty,
    place_images,
    short,
)
from vireo.data.turn_fields import VIDEO_KEYS, check_text, objects, turn_fields
from vireo.errors import RowError

CONVERSATION_KEYS = ("conversations", "messages")
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

_TURN_KEYS = frozenset(("from", "role", "value", "content"))
_MOST_WEIGHT = 3e38  # of a 32-bit float, which the loss is weighted in
_RARE_KEYS = frozenset(("weight", "tools", "images", *VIDEO_KEYS))
_OWN_IMAGE = ("image", "path", "url", "image_url")
_PLAIN_PATH = re.compile(r"(?!.*\.\.)\w[\w./ -]*", re.ASCII)


@dataclass(frozen=True)
class Allowed:
    """What rows may do where a person allowed it: have no answer (`prompts`), name images by
    http(s) URL (`urls`; see `references.fetched`), or by paths out of the image root (`paths`)."""

    prompts: bool = False
    urls: bool = False
    paths: bool = False


NOTHING_MORE = Allowed()


def parse_row(
    row: Any, root: str | None = None, where: str = "", allowed: Allowed = NOTHING_MORE
) -> Conversation:
    """The conversation of one row; images stay references (with `root`) and no file is touched.

    Raises RowError, without its place in the file.
    """
    drafts, images = check_row(row, root, allowed)
    if allowed.paths and root is not None:
        images, root = [_from_root(image, root) for image in images], None
    return Conversation(
        turns=_number_slots(drafts),
        images=tuple([ImageRef(image, root) for image in images]),
        id=row_id(row),
        weight=_weight(row),
        tools=objects(row.get("tools"), "tools"),
        where=where,
        extra={key: value for key, value in row.items() if key not in KNOWN_KEYS},
    )


def check_row(
    row: Any, root: str | None = None, allowed: Allowed = NOTHING_MORE
) -> tuple[list[Draft], list[Any]]:
    """All that `parse_row` refuses, and what it found; this runs over every row of a file at start.

    Raises RowError.
    """
    if not isinstance(row, dict):
        raise RowError("row_type", f"a row must be an object, found {short(row)}")
    for key in VIDEO_KEYS:
        if key in row and not is_empty(row[key]):
            raise RowError("video", f"the row has a {key!r} column, and video is not supported")
    drafts = [_draft(turn, i) for i, turn in enumerate(_turns(row), 1)]
    images = place_images(drafts, row)
    for image in images:
        if not (allowed.urls and web_url(image)):
            check_image(image, None if allowed.paths else root)
    if "id" in row:
        check_text(row_id(row) or "", "the row's id")
    if "weight" in row:
        _weight(row)
    if "tools" in row:
        objects(row["tools"], "tools")
    if not allowed.prompts:
        _check_answers(drafts)
    return drafts, images


def is_plain(row: Any) -> bool:
    """Whether a row is of the commonest shape, which `check_row` accepts; False says nothing.

    A short cut for files of millions of rows: a fifth of the full check's time.
    """
    if type(row) is not dict or not _RARE_KEYS.isdisjoint(row):
        return False
    turns, name, content = row.get("conversations"), "from", "value"
    if turns is None:
        turns, name, content = row.get("messages"), "role", "content"
    if type(turns) is not list or ("conversations" in row and "messages" in row):
        return False
    slots, answers = 0, 0
    for turn in turns:
        if type(turn) is not dict or len(turn) != 2:
            return False
        speaker, text = turn.get(name), turn.get(content)
        if type(speaker) is not str or type(text) is not str or not can_encode(text):
            return False
        role = ROLES.get(speaker)
        if role == "assistant" and not text.isspace() and text:
            answers += 1
        elif role == "user":
            slots += text.count(PLACEHOLDER)
        else:
            return False
    own_id = row.get("id", 0)
    if not answers or type(own_id) not in (str, int) or not can_encode(str(own_id)):
        return False
    image = row.get("image")
    if type(image) is str:
        return slots == 1 and _PLAIN_PATH.fullmatch(image) is not None
    return "image" not in row and not slots


def row_id(row: Any) -> str | None:
    """The row's id as text; None where it has none."""
    value = row.get("id") if isinstance(row, dict) else None
    return value if value is None or isinstance(value, str) else str(value)


def row_place(name: str, number: int, line: int | None, row: Any) -> str:
    """How messages call a row: `train.json row 11 (id 'a', line 12)`; rows count from 0."""
    known = row_id(row)
    details = [] if known is None else [f"id {quoted(known, 100)}"]
    details += [] if line is None else [f"line {line}"]
    return f"{name} row {number}" + (f" ({', '.join(details)})" if details else "")


# -- turns ---------------------------------------------------------------------------------------


def _turns(row: dict) -> list:
    turns, other = row.get("conversations"), row.get("messages")
    name = "messages" if turns is None else "conversations"
    if turns is None:
        turns = other
    elif other is not None:
        raise RowError("ambiguous_format", "the row has both 'conversations' and 'messages'")
    if turns is None:
        raise RowError("no_conversation", "the row has neither 'conversations' nor 'messages'")
    if not isinstance(turns, list) or not turns:
        what = f"{name!r} must be a list of turns, found {short(turns)}"
        raise RowError("no_conversation", what)
    return turns


def _draft(turn: Any, number: int) -> Draft:
    if not isinstance(turn, dict):
        what = f"turn {number} must be an object, found {short(turn)}"
        raise RowError("no_conversation", what)
    name, content = _either(turn, "from", "role", number), _either(turn, "value", "content", number)
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        expected = ", ".join(ROLES)
        what = f"turn {number} has the role {short(name)}, expected one of {expected}"
        raise RowError("unknown_role", what)
    fields = {} if _TURN_KEYS.issuperset(turn) else turn_fields(turn, role, number)
    if isinstance(content, str):
        if not content.isascii():
            check_text(content, f"the text of turn {number}")
        return Draft(role, [content], fields)
    if isinstance(content, list):
        return Draft(role, [_part(part, number) for part in content], fields)
    if content is None and ("tool_calls" in fields or fields.get("reasoning_content")):
        return Draft(role, [], fields)
    what = f"the text of turn {number} must be a string or a list of parts, found "
    raise RowError("content_type", what + short(content))


def _either(turn: dict, first: str, second: str, number: int) -> Any:
    """The value under one of two names; Arrow fills the other one with null."""
    value = turn.get(first)
    if value is None:
        return turn.get(second)
    if second in turn and turn[second] not in (None, value):
        raise RowError("ambiguous_format", f"turn {number} has both {first!r} and {second!r}")
    return value


def _part(part: Any, number: int) -> str | Slot:
    if not isinstance(part, dict):
        what = f"a part of turn {number} must be an object with a 'type', found "
        raise RowError("content_type", what + short(part))
    kind = part.get("type")
    if kind == "text":
        text = part.get("text")
        if not isinstance(text, str):
            what = f"a text part of turn {number} must hold a string, found {short(text)}"
            raise RowError("content_type", what)
        check_text(text, f"the text of turn {number}")
        if len(part) > 2:
            _check_alone(part, (*_OWN_IMAGE, "bytes"), number)
        return text
    if kind in ("image", "image_url"):
        if len(part) > 1:
            _check_alone(part, ("text",), number)
            return Slot(_own_image(part, number))
        return Slot(None)
    if isinstance(kind, str) and "video" in kind:
        raise RowError("video", f"turn {number} has a {kind!r} part, and video is not supported")
    what = f"turn {number} has a part of type {short(kind)}, expected 'text' or 'image'"
    raise RowError("part_type", what)


def _check_alone(part: dict, others: tuple[str, ...], number: int) -> None:
    """A part is text or an image: what it holds besides would be lost."""
    for key in others:
        if not is_empty(part.get(key)):
            what = f"a part of turn {number} has the type {part['type']!r} and {key!r} besides"
            raise RowError("part_type", what + ": make two parts of it")


def _own_image(part: dict, number: int) -> Any:
    if part.get("bytes") is not None:
        value = {"bytes": part["bytes"], "path": part.get("path")}
        check_kind(value)
        return value
    given = [part.get(key) for key in _OWN_IMAGE]
    values = [value for value in given if value is not None]
    values = [v["url"] if isinstance(v, dict) and v.get("url") is not None else v for v in values]
    for value in values:
        check_kind(value)
    if any(value != values[0] for value in values):
        raise RowError("ambiguous_image", f"an image part of turn {number} names two images")
    return values[0] if values else None


def _from_root(image: Any, root: str) -> Any:
    """The image, by a path that needs no root; data URLs, URLs and bytes as they are."""
    if isinstance(image, dict) and image.get("bytes") is None:
        return image | {"path": _from_root(image["path"], root)}
    if not isinstance(image, str) or is_data_url(image) or ":/" in image:
        return image
    return os.path.join(root, image)


def _check_answers(drafts: list[Draft]) -> None:
    answers = [draft for draft in drafts if draft.role == "assistant"]
    if not answers:
        raise RowError("no_assistant", "the row has no assistant turn, so nothing to learn")
    for draft in answers:
        said = [*draft.items, draft.fields.get("reasoning_content", "")]
        if "tool_calls" not in draft.fields and not any(
            isinstance(item, Slot) or item.strip() for item in said
        ):
            raise RowError("empty_assistant", "the text of an assistant turn is empty")


def _number_slots(drafts: list[Draft]) -> tuple[Turn, ...]:
    turns, count = [], 0
    for draft in drafts:
        parts: list[Text | Image] = []
        for item in draft.items:
            if isinstance(item, Slot):
                parts.append(Image(count))
                count += 1
            elif item:
                parts.append(Text(item))
        turns.append(Turn(draft.role, tuple(parts), **draft.fields))
    return tuple(turns)


# -- the other columns ---------------------------------------------------------------------------


def _weight(row: dict) -> float:
    value = row.get("weight")
    if value is None:
        return 1.0
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            if math.isfinite(value) and 0 <= value <= _MOST_WEIGHT:
                return float(value)
        except OverflowError:  # an integer beyond every float
            pass
    what = f"the row's weight must be a number from 0 to {_MOST_WEIGHT:.0e}, found {short(value)}"
    raise RowError("weight", what)
