"""`vireo preview`: the first rows of a data file as the trainer sees them, token by token."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field

from vireo.data.conversation import Conversation
from vireo.data.ragged import IGNORE, Example
from vireo.data.render import Renderer
from vireo.errors import RowError
from vireo.hub import local_folder
from vireo.report import micro_batches
from vireo.report.opened import Opened, open_files
from vireo.report.output import show, write
from vireo.report.pieces import Piece, pieces
from vireo.report.seen import Eye, Seen


@dataclass(frozen=True)
class Row:
    """One row as the trainer sees it."""

    where: str
    id: str | None
    tokens: list[Piece]
    length: int
    trained: int
    image_tokens: int
    weights: list[float]  # the different weights of its trained tokens
    images: list[Seen]


@dataclass
class File:
    """One data file: its first rows (a RowError where one is refused when it is rendered)."""

    path: str
    total: int
    skipped: list[RowError]  # refused when the file was opened
    rows: list[Row | RowError] = field(default_factory=list)


@dataclass
class Preview:
    """What both forms of the preview show."""

    model: str
    family: str
    files: list[File]
    padding: float | None = None  # share of padding in one padded batch of the rows
    budget: int | None = None
    packing: bool = True  # whether the family's rows can be joined
    filled: float | None = None  # share of the budgets that holds tokens
    micro_batches: int = 0

    @property
    def rows(self) -> list[Row]:
        return [row for file in self.files for row in file.rows if isinstance(row, Row)]

    @property
    def refused(self) -> int:
        return sum(
            len(f.skipped) + sum(isinstance(r, RowError) for r in f.rows) for f in self.files
        )


def preview(
    *,
    train_file: str,
    vlm_model_name_or_path: str,
    count: int = 4,
    html: str | None = None,
    processor_name_or_path: str | None = None,
    image_root: str | None = None,
    image_size: int | None = None,
    image_strategy: str = "longest",
    chat_template: str | None = None,
    max_length: int | None = None,
    max_tokens_per_gpu: int | None = None,
) -> None:
    """Print the first `count` rows of each file, or write them to the page `html`.

    InputError: a file or model that cannot be read. Refused rows are shown, never raised.
    """
    if chat_template is not None:  # the settings know the names
        from vireo.settings import load_settings

        load_settings(
            [
                f"--vlm_model_name_or_path={vlm_model_name_or_path}",
                f"--chat_template={chat_template}",
            ]
        )
    files = open_files(train_file, image_root)
    folder = local_folder(vlm_model_name_or_path)
    processor = local_folder(processor_name_or_path) if processor_name_or_path else None
    renderer = Renderer(
        folder,
        processor,
        chat_template=chat_template,
        image_size=image_size,
        image_strategy=image_strategy,
        max_length=max_length,
        budget=max_tokens_per_gpu,
    )
    made = collect(renderer, files, count, max_tokens_per_gpu, vlm_model_name_or_path)
    if html is None:
        from vireo.report.preview_text import text

        show(text(made, colour=sys.stdout.isatty() and not os.environ.get("NO_COLOR")))
        return
    from vireo.report.preview_page import page

    write(html, page(made))
    print(f"wrote {html}: {len(made.rows)} rows shown, {made.refused} refused")


def collect(
    renderer: Renderer, files: list[Opened], count: int, budget: int | None, model: str
) -> Preview:
    """The first `count` rows of each file through the trainer's own path."""
    out = Preview(model, renderer.family.name, [], budget=budget)
    eye = Eye(renderer)
    examples = []
    for file in files:
        shown = File(file.path, file.total, file.skipped)
        out.files.append(shown)
        for i in range(min(count, len(file.rows))):
            try:
                row = file.rows[i]
                example = renderer.example(row)
                shown.rows.append(_row(eye, row, example))
                examples.append(example)
            except RowError as error:
                shown.rows.append(error)
    if examples:
        light = micro_batches.stand_ins([len(e) for e in examples], [e.images for e in examples])
        can_mix = renderer.family.can_mix
        whole = micro_batches.of_rows(light, len(light), can_mix=can_mix)
        out.padding = micro_batches.padding_share(whole)
        if budget is not None:
            out.packing = renderer.family.can_pack
            parts = micro_batches.by_budget(light, budget, can_mix=can_mix, padded=not out.packing)
            out.micro_batches = len(parts)
            out.filled = micro_batches.filled_share(parts, budget)
    return out


def _row(eye: Eye, row: Conversation, example: Example) -> Row:
    tokens = pieces(eye.renderer, example)
    supervised = example.fields["labels"] != IGNORE
    return Row(
        where=example.where,
        id=row.id,
        tokens=tokens,
        length=len(example),
        trained=example.supervised,
        image_tokens=sum(piece.count for piece in tokens if piece.kind == "image"),
        weights=sorted(set(example.fields["loss_weight"][supervised].tolist())),
        images=eye.look(row, example) if row.images else [],
    )
