"""Rows of both formats for tests, and any JSON value."""

from __future__ import annotations

from hypothesis import strategies as st

from vireo.errors import RowError


def llava(identity: str = "a", answer: str = "Red.", **columns) -> dict:
    turns = [{"from": "human", "value": "What colour?"}, {"from": "gpt", "value": answer}]
    return {"id": identity, "conversations": turns, **columns}


def messages(*turns: tuple, **columns) -> dict:
    return {"messages": [{"role": role, "content": text} for role, text in turns], **columns}


def user(content, answer="Yes.", **columns) -> dict:
    return messages(("user", content), ("assistant", answer), **columns)


def attempt(action):
    """What an action returns, or the RowError that it raises."""
    try:
        return action()
    except RowError as error:
        return error


words = st.sampled_from(
    [
        *("id", "conversations", "messages", "from", "value", "role", "content", "image", "images"),
        *("type", "text", "path", "bytes", "url", "image_url", "weight", "tools", "tool_calls"),
        *("human", "gpt", "user", "assistant", "system", "tool", "<image>", "a.png", "../a"),
        *("http://x", "data:,", "", " ", "[{}]", "\ud800"),
    ]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | words | st.text(max_size=5)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)
