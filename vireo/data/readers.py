"""Open a data file, whatever its container, as a lazy sequence of checked conversations."""

from __future__ import annotations

import logging
import operator
import os
import re
import zlib
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, overload

import numpy as np
from tqdm import tqdm

from vireo.data.conversation import Conversation
from vireo.data.json_file import JsonFile
from vireo.data.prompt_rows import BY_ITSELF, Columns, prompt_row
from vireo.data.rows import (
    NOTHING_MORE,
    NOTHING_TO_LEARN,
    Allowed,
    check_row,
    is_plain,
    parse_row,
    row_place,
)
from vireo.errors import InputError, RowError

At = tuple[int, int, int, int]

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_DATA_FILE = re.compile(r"\.(jsonl?|ndjson|gz|parquet|txt|csv|arrow)$", re.IGNORECASE)
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?![a-z])", re.IGNORECASE)
_log = logging.getLogger(__name__)


class Streamed(Protocol):
    """Rows of a container from number `first` on, each to be called for its value.

    `stream` returns how many rows there are in all. `files`: the paths that are read.
    """

    @property
    def files(self) -> list[str]: ...
    def stream(self, first: int) -> Generator[tuple[At, Callable[[], Any]], None, int]: ...
    def place(self, at: At) -> tuple[str, int, int | None]: ...


class Source(Streamed, Protocol):
    """Rows of a container, found again by four numbers.

    `scan` gives every column that is no picture, or without `whole` perhaps only those of chats.
    """

    def scan(self, whole: bool = False) -> Iterator[tuple[At, Any]]: ...
    def read(self, at: At) -> Any: ...


class Rows(Sequence[Conversation]):
    """The good rows of a data file, in its order; each is read and parsed when it is asked for.

    `skipped`: the refused rows as errors; `total`: all rows of the file. Picklable: it holds the
    rows' places (32 bytes each), and every process opens the file for itself.
    """

    def __init__(
        self,
        source: Source,
        root: str | None,
        places: np.ndarray,
        skipped: list[RowError],
        allowed: Allowed = NOTHING_MORE,
        columns: Columns = BY_ITSELF,
    ):
        self._source, self._root, self._places = source, root, places
        self._allowed, self._columns = allowed, columns
        self.skipped = skipped
        self.total = len(places) + len(skipped)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def digest(self) -> int:
        """A checksum of which rows of the file are used and where they lie."""
        return zlib.crc32(self._places.tobytes())

    @overload
    def __getitem__(self, i: int) -> Conversation: ...
    @overload
    def __getitem__(self, i: slice) -> list[Conversation]: ...
    def __getitem__(self, i: int | slice) -> Conversation | list[Conversation]:
        """Raises RowError for what was not looked at before (pictures' values in parquet)."""
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        first, second, third, fourth = self._places[operator.index(i)].tolist()
        at = first, second, third, fourth
        read = partial(self._source.read, at)
        return conversation(self._source, self._root, at, read, self._allowed, self._columns)


def conversation(
    source: Streamed,
    root: str | None,
    at: At,
    read: Callable[[], Any],
    allowed: Allowed = NOTHING_MORE,
    columns: Columns = BY_ITSELF,
) -> Conversation:
    """The row that `read` gives, parsed. Raises RowError with the row's place."""
    row = None
    try:
        row = read()
        if isinstance(row, RowError):
            raise row
        chat = prompt_row(row, columns) if allowed.prompts else row
        return parse_row(chat, root, row_place(*source.place(at), row), allowed)
    except RowError as error:
        raise error.at(row_place(*source.place(at), row)) from error


def open_rows(
    path: str | Path,
    *,
    image_root: str | Path | None = None,
    on_bad_row: Literal["error", "skip"] = "error",
    progress: bool = False,
    name: str | None = None,
    allowed: Allowed = NOTHING_MORE,
    columns: Columns = BY_ITSELF,
) -> Rows:
    """Open a data file and check the structure, roles, counts and image paths of all its rows.

    path: JSON lines or a JSON array (plain or gzipped), a parquet file or a folder of them, a
        folder of `Dataset.save_to_disk`, or, where no such path exists, a hub name `org/name`
        (its split `train`). Known by content, not by name.
    image_root: the folder that relative image paths start from and none may leave. Default: the
        data file's folder; no limit for a data set from the hub.
    on_bad_row: `error` raises RowError at the first bad row; `skip` leaves it out. Rows with
        nothing to learn (no assistant turn, or an empty one) are always left out, with a warning.
    progress: show a bar on stderr when it takes longer than two seconds.
    name: how messages call the file. Default: its name without folders.
    allowed: what rows may do besides.
    columns: where rows of prompts (if allowed) have them. Default: recognised; docs/prompts.md.

    Raises InputError for a path that is no data, RowError for bad rows and unreadable files, and
    where no row is left.
    """
    rows = check_rows(
        path,
        image_root=image_root,
        on_bad_row=on_bad_row,
        progress=progress,
        name=name,
        allowed=allowed,
        columns=columns,
    )
    _report(rows, os.fspath(path))
    return rows


def check_rows(
    path: str | Path,
    *,
    image_root: str | Path | None = None,
    on_bad_row: Literal["error", "skip"] = "error",
    progress: bool = False,
    name: str | None = None,
    allowed: Allowed = NOTHING_MORE,
    columns: Columns = BY_ITSELF,
) -> Rows:
    """As `open_rows`, but a file of which every row is refused is no error, and nothing is said."""
    if on_bad_row not in ("error", "skip"):
        raise InputError(f"on_bad_row is {on_bad_row!r}, expected 'error' or 'skip'")
    source, root = open_source(os.fspath(path), image_root, name)
    places = array("q")
    skipped: list[RowError] = []
    for at, row in tqdm(
        source.scan(whole=allowed.prompts),
        "checking rows",
        unit=" rows",
        unit_scale=True,
        delay=2,
        disable=not progress,
    ):
        try:
            if isinstance(row, RowError):
                raise row
            chat = prompt_row(row, columns) if allowed.prompts else row
            if not is_plain(chat):
                check_row(chat, root, allowed)
            places.extend(at)
        except RowError as error:
            # A new error: the caught one would hold on to the row by its traceback.
            bad = RowError(error.reason, error.message, row_place(*source.place(at), row))
            if on_bad_row == "error" and error.reason not in NOTHING_TO_LEARN:
                raise bad from error
            skipped.append(bad)
    found = np.frombuffer(places, dtype=np.int64).reshape(-1, 4)
    return Rows(source, root, found, skipped, allowed, columns)


def _report(rows: Rows, path: str) -> None:
    if not rows.total:
        raise RowError("no_rows", "there are no rows in it", path)
    shown = "\n".join(f"  {error}" for error in rows.skipped[:10])
    if rows.skipped:
        more = f"\n  and {len(rows.skipped) - 10} more" if len(rows.skipped) > 10 else ""
        count = f"{len(rows.skipped)} of {rows.total} rows are left out"
        if not len(rows):
            raise RowError("no_rows", f"all {rows.total} rows are left out:\n{shown}{more}", path)
        _log.warning("%s: %s:\n%s%s", path, count, shown, more)


# -- which container -----------------------------------------------------------------------------


def open_source(
    path: str, image_root: str | Path | None, name: str | None = None
) -> tuple[Source, str | None]:
    """The container at a path, and the folder that its image paths start from.

    Raises InputError as `open_rows`.
    """
    if image_root is not None and not os.path.isdir(image_root):
        raise InputError(f"image_root {os.fspath(image_root)!r} is not a folder")
    root = None if image_root is None else os.path.abspath(image_root)
    if is_hub_name(path):
        return _load_from_hub(path), root
    if os.path.isdir(path):
        return _open_folder(path, name), root or os.path.abspath(path)
    if not os.path.exists(path):
        raise InputError(f"data file {path!r} is not found")
    if not os.path.isfile(path):
        raise InputError(f"data file {path!r} is not a regular file")
    try:
        with open(path, "rb") as file:
            head = file.read(8)
    except OSError as error:
        raise InputError(f"data file {path!r} cannot be opened: {error.strerror}") from error
    path = os.path.abspath(path)
    root = root or os.path.dirname(path)
    if head.startswith(b"PAR1"):
        return _parquet([path], [name or os.path.basename(path)]), root
    return JsonFile(path, name), root


def is_hub_name(path: str) -> bool:
    """Whether it is no path here but looks like a hub name, `org/name`."""
    return (
        not os.path.exists(path)
        and _HUB_NAME.fullmatch(path) is not None
        and _DATA_FILE.search(path) is None
    )


def _open_folder(path: str, name: str | None) -> Source:
    names = sorted(os.listdir(path))
    if "state.json" in names and "dataset_info.json" in names:
        return _load_saved(path, name)
    if "dataset_dict.json" in names:
        raise InputError(
            f"{path!r} holds several splits: give the folder of one, such as "
            f"{os.path.join(path, 'train')!r}"
        )
    files = [file for file in names if file.endswith(".parquet")]
    if not files:
        raise InputError(f"{path!r} is a folder with neither parquet files nor a saved data set")
    splits = {found[1].lower() for file in files if (found := _SPLIT.match(file))}
    if len(splits) > 1:
        raise InputError(
            f"{path!r} holds the splits {', '.join(sorted(splits))}: give one file, or a folder "
            "with the files of one split"
        )
    paths = [os.path.abspath(os.path.join(path, file)) for file in files]
    return _parquet(paths, [f"{name}/{file}" if name else file for file in files])


def _parquet(paths: list[str], names: list[str]) -> Source:
    from vireo.data.arrow_file import ParquetFiles

    return ParquetFiles(paths, names)


def _load_saved(path: str, name: str | None) -> Source:
    import datasets

    from vireo.data.arrow_file import SavedDataset

    try:
        found = datasets.load_from_disk(path)
    except Exception as error:  # the library raises all kinds for a damaged folder
        text = f"the saved data set cannot be read: {type(error).__name__}: {str(error)[:300]}"
        raise RowError("truncated", text, path) from error
    return SavedDataset(found, name or os.path.basename(os.path.abspath(path)))


def _load_from_hub(name: str) -> Source:
    from vireo.data.arrow_file import SavedDataset

    return SavedDataset(load_hub_rows(name), name)


def load_hub_rows(name: str, **options: Any) -> Any:
    """The split `train` of a hub's data set, by `datasets.load_dataset`. Raises InputError."""
    import datasets

    try:
        return datasets.load_dataset(name, split="train", **options)
    except Exception as error:  # no network, no such name, no such split, several configurations
        raise InputError(
            f"{name!r} is no file here, and the hub's data set of that name cannot be loaded "
            f"(offline, or no split 'train'?): {type(error).__name__}: {str(error)[:300]}"
        ) from error
