"""Data files opened for looking at: refused rows are kept as errors, whatever their number."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from vireo.data import readers
from vireo.data.conversation import Conversation
from vireo.data.mixture import short_names
from vireo.data.rows import check_row, row_place
from vireo.errors import InputError, RowError


@dataclass(frozen=True)
class Opened:
    """One data file: its good rows, read when asked for, and the refused ones as errors."""

    path: str
    rows: Sequence[Conversation]
    skipped: list[RowError]

    @property
    def total(self) -> int:
        return len(self.rows) + len(self.skipped)


def open_files(train_file: str, image_root: str | None) -> list[Opened]:
    """The files of a comma list, opened as the trainer does with `--on_bad_row skip`.

    Unlike the trainer, a file of which every row is refused is no error. InputError: a file that
    cannot be read, or that has no rows.
    """
    names = [name.strip() for name in train_file.split(",")]
    if not all(names):
        raise InputError(f"--train_file {train_file!r}: an empty name in the list of files")
    return [_open(path, image_root, short) for path, short in zip(names, short_names(names))]


def _open(path: str, image_root: str | None, name: str | None) -> Opened:
    with _without_warnings():
        try:
            rows = readers.open_rows(
                path, image_root=image_root, on_bad_row="skip", progress=True, name=name
            )
        except RowError as error:
            refused = _refused_rows(path, image_root, name) if error.reason == "no_rows" else []
            if not refused:
                raise error.at(path) from error
            return Opened(path, [], refused)
    return Opened(path, rows, rows.skipped)


def _refused_rows(path: str, image_root: str | None, name: str | None) -> list[RowError]:
    """The errors of a file that `open_rows` gives up on, since none of its rows is good."""
    source, root = readers.open_source(path, image_root, name)
    refused = []
    try:
        for at, row in source.scan():
            try:
                if isinstance(row, RowError):
                    raise row
                check_row(row, root)
            except RowError as error:
                where = row_place(*source.place(at), row)
                refused.append(RowError(error.reason, error.message, where))
    except RowError:  # an empty file
        return []
    return refused


@contextmanager
def _without_warnings() -> Iterator[None]:
    """The reader's own list of refused rows stays unsaid: the report says it better."""
    log = logging.getLogger(readers.__name__)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
