"""`vireo doctor`: every row of the data looked at, and what a run would make of it."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from vireo import __version__
from vireo.data.conversation import Conversation, ImageRef
from vireo.data.images import as_row_error, load_image
from vireo.data.mixture import Mixture
from vireo.data.pixels import orientation
from vireo.data.references import ImageError, open_reference
from vireo.data.rows import NOTHING_TO_LEARN
from vireo.errors import RowError
from vireo.report.doctor_page import page, text
from vireo.report.figures import SHOWN, First, histogram, share, spread
from vireo.report.opened import open_files
from vireo.report.page import show, write
from vireo.settings import load_settings


def doctor(
    *, json_file: str | None = None, html_file: str | None = None, world: int = 1, **flags: Any
) -> dict[str, Any]:
    """Look at every row, print the report and write its forms.

    `flags`: the trainer's own by name; without a model, lengths are characters. Returns the report,
    a dict of JSON values whose keys docs/data-tools.md lists. InputError: a file or model that
    cannot be read, or a setting that the trainer refuses. Bad rows are counted, never raised.
    """
    model = flags.get("vlm_model_name_or_path")
    flags |= {"vlm_model_name_or_path": model or "none-given"}  # a must for settings, not here
    settings = load_settings([f"--{name}={value}" for name, value in flags.items()])
    renderer = None
    if model:
        from vireo.data.render import open_renderer  # and torch with it

        renderer = open_renderer(settings)
    look = Look(open_files(settings), renderer)
    report = {"vireo": __version__, "files": settings.data.train_file, "model": model}
    report |= look.report()
    if look.lengths and (renderer or settings.batch.model_fields_set):
        from vireo.report.doctor_steps import foretell

        report |= foretell(settings, world, look)
    show(text(report))
    if json_file:
        write(json_file, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    if html_file:
        write(html_file, page(report))
    return report


class Look:
    """One pass over all rows. Of each it keeps its length (0: a bad one), its number of images and
    a hash of its content, 20 bytes; of each distinct picture its size, about 300 bytes.

    `renderer`: the trainer's, or None to count characters.
    """

    def __init__(self, rows: Mixture, renderer: Any):
        self.rows, self.renderer = rows, renderer
        self.bad: dict[str, First] = defaultdict(First)
        self.lengths, self.images, self.contents = array("I"), array("I"), array("Q")
        self.measured = array("I")  # lengths, those over the limit too
        self.roles, self.images_per_row, self.modes = Counter[str](), Counter[str](), Counter[str]()
        self.references = self.exif_turned = self.limit = self.trained = self.image_tokens = 0
        self.long = First()
        self.sizes: dict[int, tuple[int, int]] = {}  # upright (width, height) by hash of the bytes
        self._pictures: dict[int, int] = {}  # hash of the bytes by hash of the path
        if renderer:
            self.limit, renderer.longest = renderer.longest, 2**62
            renderer.tokenizer.model_max_length = 2**62  # or it warns
        for error in rows.skipped:
            self.bad[error.reason].add(f"{error.where}: {error.message}")
        for i in tqdm(range(len(rows)), "looking at rows", unit=" rows", delay=2, disable=None):
            length, images, content = 0, 0, i  # of a bad row, like no other one's
            try:
                length, images, content = self._row(rows[i])
            except RowError as error:
                self.bad[error.reason].add(f"{error.where}: {error.message}")
            self.lengths.append(length)
            self.images.append(images)
            self.contents.append(content)

    def _row(self, row: Conversation) -> tuple[int, int, int]:
        """Length, images, hash of the content. RowError after all its pictures were looked at."""
        self.roles.update(turn.role for turn in row.turns)
        self.images_per_row[str(len(row.images))] += 1
        pictures, fault = [], None
        for ref in row.images:
            try:
                pictures.append(self._picture(ref, row.where))
            except ImageError as error:
                fault = fault or as_row_error(error, row.where)
        if fault:
            raise fault
        length = self._length(row, pictures)
        return length, len(pictures), digest(repr((row.turns, row.tools, pictures)).encode())

    def _length(self, row: Conversation, pictures: list[int]) -> int:
        """A row's length. A blank picture takes the same tokens, so none is decoded twice."""
        if self.renderer is None:
            self.measured.append(sum(len(turn.text) for turn in row.turns))
            return self.measured[-1]
        blank = tuple(ImageRef(Image.new("RGB", self.sizes[picture])) for picture in pictures)
        example = self.renderer.example(replace(row, images=blank))
        self.measured.append(len(example))
        if len(example) > self.limit:
            what = (
                f"{len(example)} tokens, the limit is {self.limit}: raise it or leave the row out"
            )
            raise RowError("too_long", what, row.where)
        ids = example.fields["input_ids"].tolist()
        self.trained += example.supervised
        self.image_tokens += sum(token in self.renderer.image_ids for token in ids)
        return len(example)

    def _picture(self, ref: ImageRef, where: str) -> int:
        """The hash of a picture's bytes. Each distinct one is decoded once, and none is kept.

        A refused one is tried again where it is named again, so that no message need be kept.
        """
        self.references += 1
        name = digest(repr(ref).encode()) if isinstance(ref.value, str) else None
        if name in self._pictures:
            return self._pictures[name]
        with open_reference(ref) as stream:
            content = digest(stream.read())
            if content not in self.sizes:
                size = load_image(ref).size
                stream.seek(0)
                header = Image.open(stream)
                self.modes[header.mode] += 1
                self.exif_turned += orientation(header) > 1 or header.size != size
                if max(size) > 8 * min(size):
                    self.long.add(f"{where}: {size[0]} x {size[1]}")
                self.sizes[content] = size
        if name is not None:
            self._pictures[name] = content
        return content

    # -- the report ----------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """The sections of the report in their order; `foretell` fills the empty ones."""
        by_count = sorted(self.bad.items(), key=lambda item: -item[1].count)
        bad = sum(first.count for _, first in by_count)
        nothing = sum(self.bad[reason].count for reason in NOTHING_TO_LEARN & self.bad.keys())
        sizes = np.array(list(self.sizes.values()), dtype=np.int64).reshape(-1, 2)
        return {
            "rows": {
                "total": self.rows.total,
                "bad": bad,
                "nothing_to_learn": nothing,
                "roles": dict(self.roles.most_common()),
                "images_per_row": dict(self.images_per_row.most_common()),
            },
            "bad_rows": {reason: vars(first) for reason, first in by_count},
            "lengths": self._lengths(),
            "steps": None,
            "micro_batches": None,
            "images": {
                "references": self.references,
                "distinct": len(sizes),
                "modes": dict(self.modes.most_common()),
                "exif_turned": self.exif_turned,
                "width": spread(sizes[:, 0]),
                "height": spread(sizes[:, 1]),
                "longest_side": histogram(sizes.max(axis=1)),
                "longer_than_8_to_1": vars(self.long),
            },
            "duplicates": self._duplicates(),
        }

    def _lengths(self) -> dict[str, Any]:
        found: dict[str, Any] = {"unit": "tokens" if self.renderer else "characters"}
        found |= {"per_row": spread(self.measured), "histogram": histogram(self.measured)}
        if self.renderer:
            total = sum(self.lengths)
            found |= {"total": total, "image": self.image_tokens, "trained": self.trained}
            found |= {"trained_share": share(self.trained, total), "limit": self.limit}
        return found

    def _duplicates(self) -> dict[str, Any]:
        """Rows whose content an earlier one has, whatever their id."""
        _, first, which = np.unique(self.contents, return_index=True, return_inverse=True)
        again = np.flatnonzero(first[which] != np.arange(len(which)))
        pairs = [(self.rows[int(first[which[i]])], self.rows[i]) for i in again[:SHOWN].tolist()]
        examples = [[one.where, other.where] for one, other in pairs]
        return {"rows": vars(First(len(again), examples))}


def digest(content: bytes) -> int:
    """64 bits that stand for some bytes."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
