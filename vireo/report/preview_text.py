"""The preview for a terminal: colours where there are any, else brackets round what is trained."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from vireo.errors import RowError
from vireo.report.page import plain
from vireo.report.pieces import Piece
from vireo.report.preview import Preview, Row
from vireo.report.seen import Seen

_CODES = {"trained": "1;32", "image": "35", "masked": "2", "bad": "31", "head": "1"}
_REFUSED = 10  # rows listed of those refused when the file was opened


def text(preview: Preview, colour: bool) -> str:
    """The whole preview; each token stands between spaces, spaces in it are dots."""
    lines = list(_lines(preview, _Paint(colour)))
    return "\n".join(lines) + "\n"


class _Paint:
    def __init__(self, colour: bool):
        self.colour = colour

    def __call__(self, kind: str, words: str) -> str:
        return f"\x1b[{_CODES[kind]}m{words}\x1b[0m" if self.colour else words

    def tokens(self, kind: str, words: list[str]) -> str:
        """Tokens of one kind and line; without colours what is trained stands in brackets."""
        joined = " ".join(words)
        if self.colour:
            return self(kind, joined)
        return f"[[ {joined} ]]" if kind == "trained" else joined


def _lines(preview: Preview, paint: _Paint) -> Iterator[str]:
    legend = (
        paint.tokens("trained", ["trained"]),
        paint("masked", "masked"),
        paint("image", "image"),
    )
    yield f"{plain(preview.model)} ({preview.family}): {'  '.join(legend)}"
    for file in preview.files:
        yield f"{plain(file.path)}: {file.total:,} rows, {len(file.skipped):,} refused"
        for error in file.skipped[:_REFUSED]:
            yield paint("bad", f"  refused: {plain(str(error))}")
        if len(file.skipped) > _REFUSED:
            yield f"  and {len(file.skipped) - _REFUSED:,} more"
        for row in file.rows:
            yield ""
            if isinstance(row, RowError):
                yield paint("bad", f"refused: {plain(str(row))}")
            else:
                yield from _row(row, paint)
    if preview.padding is not None:
        yield ""
        yield from _shares(preview)


def _row(row: Row, paint: _Paint) -> Iterator[str]:
    weights = ", ".join(f"{weight:g}" for weight in row.weights)
    yield paint("head", plain(row.where))
    yield (
        f"{row.length:,} tokens, {row.trained:,} trained, {row.image_tokens:,} image, "
        f"loss weight {weights}"
    )
    for number, image in enumerate(row.images, 1):
        yield f"image {number}: {plain(image.name)}: {image_facts(image)}"
    for line in _by_line(row.tokens):
        groups = groupby(line, key=lambda piece: piece.kind)
        yield " ".join(paint.tokens(kind, [label(p) for p in group]) for kind, group in groups)


def _by_line(tokens: list[Piece]) -> Iterator[list[Piece]]:
    line: list[Piece] = []
    for piece in tokens:
        line.append(piece)
        if "\u21b5" in piece.text:
            yield line
            line = []
    if line:
        yield line


def label(piece: Piece) -> str:
    """The piece's text; `pad x 64` for a run of image tokens, `你(3)` for a character of three."""
    if piece.count == 1:
        return piece.text
    return (
        f"{piece.text} x {piece.count}" if piece.kind == "image" else f"{piece.text}({piece.count})"
    )


def image_facts(image: Seen) -> str:
    """Sizes, grid and tokens in words."""
    facts = [f"{image.original[0]} x {image.original[1]} in the file"]
    if image.size is not None:
        tiles = f"{len(image.pictures)} tiles of " if len(image.pictures) > 1 else ""
        facts.append(f"the model sees {tiles}{image.size[0]} x {image.size[1]}")
    else:
        facts.append(f"{image.fitted[0]} x {image.fitted[1]} before the processor")
    facts += [f"{name} {value}" for name, value in image.grids.items()]
    if image.tokens:
        facts.append(", ".join(f"{count:,} {name}" for name, count in image.tokens.items()))
    return "; ".join(facts)


def _shares(preview: Preview) -> Iterator[str]:
    yield f"one padded batch of these rows: {preview.padding:.1%} padding"
    if preview.filled is None:
        yield "packed share: --max_tokens_per_gpu gives the budget"
        return
    how = "packed" if preview.packing else "padded (the family cannot be packed)"
    yield (
        f"{how} to {preview.budget:,} tokens: {preview.micro_batches} micro-batch(es), "
        f"{preview.filled:.1%} filled"
    )
