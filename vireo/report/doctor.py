"""`vireo doctor`: every row of the data looked at, and what a run would make of it."""

from __future__ import annotations

import bisect
import json
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from tqdm import tqdm

from vireo import __version__
from vireo.data.conversation import Conversation
from vireo.data.rows import NOTHING_TO_LEARN
from vireo.errors import RowError
from vireo.report.doctor_images import Pictures
from vireo.report.doctor_rows import Refused, RowCounts, TokenCounts
from vireo.report.figures import share
from vireo.report.opened import Opened, open_files
from vireo.report.output import show, write


def doctor(
    *,
    train_file: str,
    vlm_model_name_or_path: str | None = None,
    image_root: str | None = None,
    json_file: str | None = None,
    html_file: str | None = None,
    limit: int | None = None,
    world: int = 1,
    **flags: int,
) -> dict[str, Any]:
    """Look at every row (the first `limit` of each file), print the report and write its forms.

    `flags`: the trainer's own batch settings by name. Returns the report, a dict of JSON values
    whose keys docs/data-tools.md lists. InputError: a file or model that cannot be read, or
    settings that the trainer would refuse. Bad rows are counted, never raised.
    """
    from vireo.settings import load_settings

    model = vlm_model_name_or_path
    wanted = [f"--{name}={value}" for name, value in flags.items()]
    # A model is a must there; without one only its batch settings are asked for.
    settings = load_settings([f"--vlm_model_name_or_path={model or 'none-given'}", *wanted])
    files = open_files(train_file, image_root)
    tokens = None
    if model is not None:
        from vireo.data.render import Renderer
        from vireo.hub import local_folder

        renderer = Renderer(local_folder(model), budget=settings.batch.max_tokens_per_gpu)
        tokens = TokenCounts(renderer)
    report = {"vireo": __version__, "model": model, "limit": limit} | _look(files, limit, tokens)
    opened = [len(file.rows) for file in files]
    if (tokens or flags) and any(opened):
        from vireo.report import doctor_steps

        report["steps"] = doctor_steps.steps(settings, world, opened)
        if tokens:
            report["micro_batches"] = doctor_steps.batches(
                settings,
                world,
                [min(count, limit or count) for count in opened],
                tokens.lengths,
                tokens.images,
                can_pack=tokens.renderer.family.can_pack,
                can_mix=tokens.renderer.family.can_mix,
            )
    from vireo.report.doctor_text import text

    show(text(report))
    if json_file is not None:
        write(json_file, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        print(f"wrote {json_file}")
    if html_file is not None:
        from vireo.report.doctor_page import page

        write(html_file, page(report))
        print(f"wrote {html_file}")
    return report


def _look(files: list[Opened], limit: int | None, tokens: TokenCounts | None) -> dict[str, Any]:
    """One pass over the rows; the report but for the sections `steps` and `micro_batches`."""
    everything = _Together(files)
    refused, counts, pictures = Refused(), RowCounts(), Pictures()
    bad_of: Counter[int] = Counter()
    for k, file in enumerate(files):
        bad_of[k] = len(file.skipped)
        for error in file.skipped:
            refused.add(error)
    chosen = everything.first(limit)
    for number in _bar(chosen):
        try:
            _look_at(number, everything.read(number), counts, pictures, tokens)
        except RowError as error:
            refused.add(error)
            bad_of[everything.file_of(number)] += 1
            if tokens:
                tokens.skip()
    total, bad = sum(file.total for file in files), sum(refused.counts.values())
    nothing = sum(refused.counts[reason] for reason in NOTHING_TO_LEARN)
    looked = sum(len(file.skipped) for file in files) + len(chosen)
    twins = counts.twins(everything.place)
    twins["images"] = pictures.twins(everything.read)
    return {
        "rows": {
            "total": total,
            "looked_at": looked,
            "bad": bad,
            "bad_share": share(bad, looked),
            "nothing_to_learn": nothing,
            "text_only": counts.text_only,
            "text_only_share": share(counts.text_only, counts.rows),
        },
        "files": [
            {"file": file.path, "rows": file.total, "bad": bad_of[k]}
            for k, file in enumerate(files)
        ],
        "bad_rows": refused.report(),
        "turns": counts.turns(),
        "images": pictures.report(everything.place) | {"per_row": counts.images_per_row()},
        "lengths": tokens.report() if tokens else counts.characters(),
        "duplicates": twins,
        "steps": None,
        "micro_batches": None,
    }


def _bar(rows: Iterable[int]) -> Iterable[int]:
    """A bar on stderr for what takes more than two seconds, seldom drawn where it is a file."""
    pause = 0.2 if sys.stderr.isatty() else 30
    return tqdm(rows, "looking at rows", unit=" rows", unit_scale=True, delay=2, mininterval=pause)


def _look_at(
    number: int,
    row: Conversation,
    counts: RowCounts,
    pictures: Pictures,
    tokens: TokenCounts | None,
) -> None:
    """Count one row; RowError for its first fault, after all its pictures were looked at."""
    found, fault = [], None
    for ref in row.images:
        try:
            found.append(pictures.look(ref, number))
        except RowError as error:
            fault = fault or error.at(row.where)
    counts.add(number, row, [content for _, content in found] if not fault else None)
    if fault:
        raise fault
    if tokens:
        tokens.add(row, [size for size, _ in found])


class _Together:
    """The good rows of several files under one numbering."""

    def __init__(self, files: list[Opened]):
        self.files = files
        self.ends = list(accumulate(len(file.rows) for file in files))

    def first(self, limit: int | None) -> list[int] | range:
        """The numbers of the first `limit` rows of each file."""
        if limit is None:
            return range(self.ends[-1])
        starts = [0, *self.ends[:-1]]
        return [
            n
            for start, end in zip(starts, self.ends)
            for n in range(start, min(end, start + limit))
        ]

    def file_of(self, number: int) -> int:
        return bisect.bisect_right(self.ends, number)

    def read(self, number: int) -> Conversation:
        k = self.file_of(number)
        return self.files[k].rows[number - (self.ends[k] - len(self.files[k].rows))]

    def place(self, number: int) -> str:
        return self.read(number).where
