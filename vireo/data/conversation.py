"""A conversation: who said what, with images by reference. Nothing here decodes a pixel."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ImageRef:
    """A picture that has not been decoded: a path, a data URL, encoded bytes or a PIL image.

    `root` is the folder that a path must stay inside (None: any path of this machine is allowed).
    Relative paths are relative to `root`.
    """

    value: Any
    root: str | None = None

    def __str__(self) -> str:
        if isinstance(self.value, str):
            return self.value if len(self.value) <= 200 else self.value[:80] + "..."
        return f"<{type(self.value).__name__}>"


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Image:
    """An image slot: `index` points into `Conversation.images`."""

    index: int


@dataclass(frozen=True, slots=True)
class Turn:
    role: Role
    parts: tuple[Text | Image, ...]
    tool_calls: tuple[dict, ...] = ()  # their arguments are objects, unless they are free text
    # What the chat template gets besides, where the row has it.
    reasoning_content: str | None = None  # an assistant's thoughts before its text
    name: str | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        return "".join(p.text for p in self.parts if isinstance(p, Text))


@dataclass(frozen=True, slots=True)
class Conversation:
    """One row: its turns, and its images in reading order (`Image.index` counts 0, 1, 2, ...)."""

    turns: tuple[Turn, ...]
    images: tuple[ImageRef, ...] = ()
    id: str | None = None  # as text; None where the row has none
    weight: float = 1.0  # factor on the row's loss
    tools: tuple[dict, ...] = ()
    where: str = ""  # "file.json line 12 (row 11, id 'a')", for error messages
    extra: dict[str, Any] = field(default_factory=dict, compare=False)


def read_rows(path: str | Path, **options: Any):
    """Open a data file as a sequence of conversations; see `vireo.data.readers.open_rows`."""
    from vireo.data.readers import open_rows

    return open_rows(path, **options)
