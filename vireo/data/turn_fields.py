"""What a turn has besides its role and its text: tool calls, thoughts, names; nothing gets lost."""

from __future__ import annotations

import json
from typing import Any

from vireo.data.conversation import Role
from vireo.data.row_images import IMAGE_KEYS, can_encode, is_empty, short
from vireo.errors import RowError

VIDEO_KEYS = ("videos", "video")
# Each optional text of a turn, and the keys that rows have for it.
_FIELDS = {
    "reasoning_content": ("reasoning_content", "reasoning", "thinking"),
    "name": ("name",),
    "tool_call_id": ("tool_call_id",),
}


def turn_fields(turn: dict, role: Role, number: int) -> dict[str, Any]:
    """`tool_calls` and the optional texts of `Turn`, as far as the turn has them. Raises RowError.

    Other keys change nothing, but for those whose loss would teach something else.
    """
    if turn.get("weight") not in (None, 1):
        raise RowError("weight", f"turn {number} has a weight, which only a row can have")
    for key in (*IMAGE_KEYS, *VIDEO_KEYS):
        if is_empty(turn.get(key)):
            continue
        if key in VIDEO_KEYS:
            raise RowError("video", f"turn {number} has a {key!r}, and video is not supported")
        what = f"turn {number} has {key!r} of its own: write them into the row's {key!r} column, "
        raise RowError("bad_image_value", what + "or into image parts of the turn")
    if not is_empty(turn.get("function_call")):
        what = f"turn {number} has a 'function_call': write it as a list 'tool_calls'"
        raise RowError("tool_calls", what)
    fields: dict[str, Any] = {}
    calls = tuple([_call(call, number) for call in objects(turn.get("tool_calls"), "tool_calls")])
    if calls:
        if role != "assistant":
            raise RowError("tool_calls", f"turn {number} is a {role}'s and calls tools")
        fields["tool_calls"] = calls
    for field, keys in _FIELDS.items():
        value = _text(turn, keys, number)
        if value is not None:
            fields[field] = value
    if role != "assistant" and fields.get("reasoning_content"):
        what = f"turn {number} is a {role}'s and has thoughts, which only an assistant has"
        raise RowError("content_type", what)
    return fields


def _text(turn: dict, keys: tuple[str, ...], number: int) -> str | None:
    found = {key: turn[key] for key in keys if turn.get(key) is not None}
    if not found:
        return None
    key, value = next(iter(found.items()))
    if any(other != value for other in found.values()):
        both = " and ".join(map(repr, found))
        raise RowError("ambiguous_format", f"turn {number} has {both}, which differ")
    if key in ("name", "tool_call_id") and type(value) in (int, float):
        value = str(value)
    if not isinstance(value, str):
        what = f"{key!r} of turn {number} must be a string, found {short(value)}"
        raise RowError("content_type", what)
    check_text(value, f"{key!r} of turn {number}")
    return value


def _call(call: dict, number: int) -> dict:
    """The call with its arguments as an object, which is what engines hand to chat templates.

    Text that is no JSON object stays text.
    """
    inner = call.get("function")
    function = inner if isinstance(inner, dict) else call
    if not isinstance(function.get("name"), str) or not function["name"]:
        what = f"a tool call of turn {number} must have the name of a function, found {short(call)}"
        raise RowError("tool_calls", what)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments, object_pairs_hook=_without_twins)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            _check_characters(value, "'tool_calls'")
            arguments = value
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if inner is not None else function


def objects(value: Any, what: str) -> tuple[dict, ...]:
    """A list of objects; the list or each object may be JSON text, as Arrow columns hold them."""
    items = _unpacked(value, what)
    if is_empty(items):
        return ()
    found = [_unpacked(item, what) for item in items] if isinstance(items, list) else []
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in found):
        message = f"{what!r} must be a list of objects, found {short(value)}"
        raise RowError("tool_calls", message)
    _check_characters(found, repr(what))
    return tuple(found)


def _unpacked(value: Any, what: str) -> Any:
    if not isinstance(value, str) or not value:
        return value
    try:
        return json.loads(value, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        text = str(error)[:200]
        raise RowError("tool_calls", f"{what!r} holds text that is no JSON: {text}") from error


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise RowError("tool_calls", f"JSON text has one key twice in an object: {short(pairs)}")
    return found


def _check_characters(value: Any, what: str) -> None:
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, TypeError, RecursionError) as error:  # brackets without end, odd keys
        raise RowError("tool_calls", f"{what} cannot be written as JSON: {error}") from error
    check_text(text, what)


def check_text(text: str, what: str) -> None:
    """Raises RowError where a text cannot be encoded."""
    if not can_encode(text):
        raise RowError("unicode", f"{what} holds half a surrogate pair, which is no character")
