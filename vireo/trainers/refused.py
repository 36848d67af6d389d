"""Refused rows: the same list on every rank, each row once, kept in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vireo.data.render import Renderer
from vireo.data.rows import NOTHING_TO_LEARN
from vireo.errors import RowError
from vireo.parallel import Parallel


class Refused:
    """`on_bad_row` is error (the first one stops every rank) or skip (`say` tells of each)."""

    def __init__(
        self, parallel: Parallel, on_bad_row: str, known: Iterable[str], say: Callable[[str], None]
    ):
        self.parallel, self.on_bad_row, self.say = parallel, on_bad_row, say
        # A dict for its order and its quick look-ups.
        self.rows: dict[str, None] = dict.fromkeys(known)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def first(self) -> str:
        return next(iter(self.rows), "none")

    def share(self, errors: list[RowError]) -> None:
        """Rows that this rank has just had to refuse; collective."""
        if not self.parallel.max([len(errors)])[0]:
            return
        everywhere = [error for part in self.parallel.gather(errors) for error in part]
        # A stream meets rows with nothing to learn here; they are never an error.
        wrong = [error for error in everywhere if error.reason not in NOTHING_TO_LEARN]
        if wrong and self.on_bad_row == "error":
            raise wrong[0]
        for text in map(str, everywhere):
            if text not in self.rows:  # each epoch and each evaluation meets it again
                self.rows[text] = None
                self.say(f"skipped {text}")

    def validate(self, renderer: Renderer, files: Iterable[Sequence[Any]]) -> None:
        """Render every row of `files` once, shared out over the ranks; collective."""
        errors: list[RowError] = []
        for rows in files:
            for i in range(self.parallel.rank, len(rows), self.parallel.world):
                try:
                    renderer.example(rows[i])
                except RowError as error:
                    errors.append(error)
                    if self.on_bad_row == "error" and error.reason not in NOTHING_TO_LEARN:
                        break
        self.share(errors)
