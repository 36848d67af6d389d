"""`vireo preview`: the first rows of a data file as the trainer sees them, token by token."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from vireo.data.mixture import Mixture
from vireo.data.packing import micro_batches, padding_share
from vireo.data.ragged import IGNORE, Example
from vireo.data.render import Renderer, open_renderer
from vireo.errors import RowError
from vireo.report.opened import open_files
from vireo.report.page import plain, show, write
from vireo.report.seen import Seen, look
from vireo.settings import load_settings

Kind = Literal["trained", "masked", "image"]
LINE_END = "\u21b5"
_LISTED = 20  # rows of a file that were refused when it was opened


@dataclass(frozen=True)
class Piece:
    """One token, a run of one image token, or the tokens that share a character: `ids`.

    `text`: what it stands for, blanks and control characters made visible.
    """

    text: str
    kind: Kind
    ids: tuple[int, ...]

    @property
    def label(self) -> str:
        """The text; `<|image_pad|> x 64` for a run, `你(3)` for a character of three tokens."""
        many = " x {}" if self.kind == "image" else "({})"
        return self.text + (many.format(len(self.ids)) if len(self.ids) > 1 else "")


@dataclass(frozen=True)
class Row:
    """One row as the trainer sees it; `facts`: its counts in words."""

    where: str
    facts: str
    tokens: list[Piece]
    images: list[Seen]


# A data file's path and counts in words; its refused rows, and then those shown.
File = tuple[str, list[Row | RowError]]


def preview(*, count: int = 4, html: str | None = None, **flags: Any) -> None:
    """Print the first `count` rows of each file, or write them to the page `html`.

    `flags`: the trainer's own, by name. InputError: a file or model that cannot be read, or a
    setting that the trainer refuses. Refused rows are shown, never raised.
    """
    from vireo.report.preview_page import page, text

    flags = {"global_batch_size": 1} | flags  # which a budget asks for, though there are no steps
    settings = load_settings([f"--{name}={value}" for name, value in flags.items()])
    rows, renderer = open_files(settings), open_renderer(settings)
    files, padding = collect(renderer, rows, settings.data.train_file or [], count)
    model = f"{settings.model.vlm_model_name_or_path} ({renderer.family.name})"
    summary = f"{model}: {padding:.1%} padding in one padded batch of these rows"
    if html is None:
        show(text(files, summary, sys.stdout.isatty() and not os.environ.get("NO_COLOR")))
    else:
        write(html, page(files, summary))


def collect(
    renderer: Renderer, rows: Mixture, paths: list[str], count: int
) -> tuple[list[File], float]:
    """The first `count` rows of each file through the trainer's own path, and the share of padding
    in one padded batch of all of them."""
    files, examples = list[File](), []
    for path, part in zip(paths, rows.parts):
        facts = f"{path}: {part.total:,} rows, {len(part.skipped):,} refused"
        facts += f" (the first {_LISTED}:)" if len(part.skipped) > _LISTED else ""
        shown: list[Row | RowError] = [*part.skipped[:_LISTED]]
        for i in range(min(count, len(part))):
            try:
                example = renderer.example(row := part[i])
                images = look(renderer, row, example) if row.images else []
                shown.append(_row(renderer, example, images))
                examples.append(example)
            except RowError as error:
                shown.append(error)
        files.append((facts, shown))
    whole = micro_batches(examples, rows=len(examples) or 1, can_mix=renderer.family.can_mix)
    return files, padding_share(whole)


def _row(renderer: Renderer, example: Example, images: list[Seen]) -> Row:
    tokens = pieces(renderer, example)
    weights = sorted(set(example.fields["loss_weight"].tolist()) - {0.0}) or [0.0]
    image = sum(len(piece.ids) for piece in tokens if piece.kind == "image")
    facts = f"{len(example):,} tokens, {example.supervised:,} trained, {image:,} image"
    facts += f", loss weight {', '.join(f'{weight:g}' for weight in weights)}"
    return Row(example.where, facts, tokens, images)


def pieces(renderer: Renderer, example: Example) -> list[Piece]:
    """Every token of the expanded ids, in order."""
    ids, labels = example.fields["input_ids"].tolist(), example.fields["labels"].tolist()
    kinds: list[Kind] = [
        "image" if token in renderer.image_ids else "masked" if label == IGNORE else "trained"
        for token, label in zip(ids, labels)
    ]

    def decode(tokens: list[int]) -> str:
        return renderer.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)

    out: list[Piece] = []
    before: list[int] = []  # the last piece: some tokenizers decode by what stands before
    for kind, places in groupby(range(len(ids)), key=kinds.__getitem__):
        run, now = [ids[i] for i in places], list[int]()
        if kind == "image":
            out += [Piece(visible(decode([i])), kind, tuple(same)) for i, same in groupby(run)]
            before = run[-1:]
            continue
        for i, token in enumerate(run, 1):
            now.append(token)
            text = decode(before + now)[len(decode(before)) :]
            # A token may end within a character, whose other bytes are in the tokens after it.
            if not text.endswith("\ufffd") or len(now) == 4 or i == len(run):
                out.append(Piece(visible(text), kind, tuple(now)))
                before, now = now, []
    return out


def visible(text: str) -> str:
    """Text with a sign for each space, line end and tab, and control characters as escapes."""
    return plain(text.replace(" ", "\u00b7").replace("\n", LINE_END).replace("\t", "\u21e5"))
