"""An example's tokens as pieces of text that a person can read, each trained, masked or image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vireo.data.ragged import IGNORE, Example
from vireo.data.render import Renderer
from vireo.report.page import plain

Kind = Literal["trained", "masked", "image"]


@dataclass(frozen=True)
class Piece:
    """One token, a run of one image token, or the tokens that share a character.

    `text`: what it stands for, blanks and control characters made visible; `start`: its place in
    the row; `count`: its tokens; `control`: whether it is a control token.
    """

    text: str
    kind: Kind
    start: int
    ids: tuple[int, ...]
    control: bool = False

    @property
    def count(self) -> int:
        return len(self.ids)


def pieces(renderer: Renderer, example: Example) -> list[Piece]:
    """Every token of the expanded ids, in order."""
    ids = example.fields["input_ids"].tolist()
    trained = (example.fields["labels"] != IGNORE).tolist()
    kinds: list[Kind] = [
        "image" if token in renderer.image_ids else "trained" if loss else "masked"
        for token, loss in zip(ids, trained)
    ]
    special = {i for i, t in renderer.tokenizer.added_tokens_decoder.items() if t.special}
    out: list[Piece] = []
    before: list[int] = []  # the last piece's ids: some tokenizers decode by what stands before
    start = 0
    while start < len(ids):
        kind, end = kinds[start], start + 1
        if kind == "image":
            while end < len(ids) and ids[end] == ids[start]:
                end += 1
            text = _decode(renderer, [ids[start]])
        else:
            text = _after(renderer, before, ids[start:end])
            # A token may end within a character: its bytes are completed by the next ones.
            while text.endswith("\ufffd") and end - start < 4:
                if end == len(ids) or kinds[end] != kind or ids[end] in special:
                    break
                end += 1
                text = _after(renderer, before, ids[start:end])
        control = ids[start] in special
        before = ids[start:end] if kind != "image" else ids[start : start + 1]
        out.append(Piece(visible(text), kind, start, tuple(ids[start:end]), control))
        start = end
    return out


def visible(text: str) -> str:
    """Text with a sign for each space, line end and tab, and control characters as escapes."""
    signs = text.replace(" ", "\u00b7").replace("\n", "\u21b5").replace("\t", "\u21e5")
    return plain(signs)


def _decode(renderer: Renderer, ids: list[int]) -> str:
    return renderer.tokenizer.decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def _after(renderer: Renderer, before: list[int], ids: list[int]) -> str:
    """What `ids` add to the text of the ids before them."""
    known = _decode(renderer, before) if before else ""
    return _decode(renderer, before + ids)[len(known) :]
