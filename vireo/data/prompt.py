"""What a rollout starts from: one conversation, as the trainer and as an engine see it."""

from __future__ import annotations

import base64
import hashlib
import io
from dataclasses import dataclass, field
from functools import cached_property

from PIL import Image as Pil

from vireo.data.conversation import Conversation
from vireo.data.ragged import Example


@dataclass
class Prompt:
    """Made once for a group of samples, by one processor call.

    `example`: the trainer's side, ids with their images expanded and the processor's tensors,
    without loss. `ids` and `text`: the same prompt with one placeholder for an image, as the chat
    template writes it. `pictures`: RGB, at the size that the model sees where its family says
    what that is (`Family.grid`). `answer`: the text of the row's last turn, if an assistant's.
    """

    example: Example
    ids: list[int]
    text: str
    pictures: list[Pil.Image] = field(default_factory=list)
    answer: str | None = None
    row: Conversation | None = None

    @cached_property
    def pngs(self) -> list[bytes]:
        """The pictures as PNG: no pixel changes on the way to an engine."""
        return [_png(picture) for picture in self.pictures]

    @cached_property
    def urls(self) -> list[bytes]:
        """The pictures as data URLs, each in JSON already: they are large, and the same in every
        request of a group."""
        return [b'"data:image/png;base64,%s"' % base64.b64encode(png) for png in self.pngs]

    @cached_property
    def expanded(self) -> list[int]:
        """The trainer's ids, which an engine's must equal."""
        return self.example.fields["input_ids"].tolist()

    @cached_property
    def key(self) -> str:
        """Names what an engine is sent: equal for equal prompts."""
        parts = [repr(self.ids).encode(), *self.pngs]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def _png(picture: Pil.Image) -> bytes:
    out = io.BytesIO()
    picture.save(out, "PNG", compress_level=1)
    return out.getvalue()
