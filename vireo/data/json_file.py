"""A data file of JSON lines or one JSON array, plain or gzipped: rows by their place in it.

No row is kept, so a file may be larger than the memory.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, BinaryIO

from vireo.data.rows import CONVERSATION_KEYS
from vireo.errors import RowError

At = tuple[int, int, int, int]  # start and size in bytes, row from 0, line from 1

_CHUNK = 1 << 20
_BOM = b"\xef\xbb\xbf"
_OTHER_ENCODINGS = (b"\xff\xfe", b"\xfe\xff", b"\0")
_SPACE = re.compile(r"[ \t\n\r]*")
_BAD_GZIP = (EOFError, gzip.BadGzipFile, zlib.error)
_decoder = json.JSONDecoder()


class JsonFile:
    """Rows of one file. Picklable; forked processes share the open file, as it is read by place."""

    def __init__(self, path: str, name: str | None = None):
        self.path, self.name = path, name or os.path.basename(path)
        self._file: BinaryIO | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    @property
    def files(self) -> list[str]:
        return [self.path]

    def scan(self, whole: bool = False) -> Iterator[tuple[At, Any]]:
        """Each row in order: its place, and its value or the RowError of a line that has none.

        Raises RowError where the file as a whole cannot be read any further.
        """
        file = self._open()
        file.seek(0)
        is_array, start = self._find_first(file)
        return self._array(file, start) if is_array else self._lines(file, start)

    def stream(self, first: int) -> Generator[tuple[At, Callable[[], Any]], None, int]:
        """Each row from number `first` on: its place, and a call that gives its value.

        Returns the number of rows. The rows before `first` are passed over as lines; only those of
        an array have to be decoded to see where they end. Raises RowError as `scan` does.
        """
        rows = 0
        try:
            with self._open_again() as file:
                is_array, start = self._find_first(file)
                if is_array:
                    for at, value in self._array(file, start):
                        if rows >= first:
                            yield at, partial(_given, value)
                        rows += 1
                else:
                    for at, raw in self._raw_lines(file, start):
                        if rows == 0:
                            self._check_first(raw, file)
                        if rows >= first:
                            yield at, partial(decode_text, raw)
                        rows += 1
        except _BAD_GZIP as error:
            raise self._bad_gzip(error) from error
        return rows

    def read(self, at: At) -> Any:
        """The row at a place. Raises RowError when the file has changed and no row is there."""
        return decode_text(os.pread(self._open().fileno(), at[1], at[0]))

    def place(self, at: At) -> tuple[str, int, int | None]:
        return self.name, at[2], at[3]

    def _open(self) -> BinaryIO:
        if self._file is None:
            file = open(self.path, "rb", buffering=_CHUNK)  # noqa: SIM115 (it stays open)
            self._file = self._unpacked(file) if _is_gzip(file) else file
        return self._file

    def _open_again(self) -> Any:
        """A handle of its own, read from start to end: what is in gzip stays packed."""
        file = open(self.path, "rb", buffering=_CHUNK)  # noqa: SIM115 (the caller closes it)
        if not _is_gzip(file):
            return file
        file.close()
        return io.BufferedReader(gzip.open(self.path), _CHUNK)

    def _unpacked(self, packed: BinaryIO) -> Any:
        """A nameless temporary file with what gzip holds: places need one that can be sought."""
        plain = tempfile.TemporaryFile(buffering=_CHUNK)  # noqa: SIM115 (it stays open)
        try:
            with packed, gzip.open(packed) as content:
                shutil.copyfileobj(content, plain, _CHUNK)
        except _BAD_GZIP as error:
            raise self._bad_gzip(error) from error
        plain.flush()
        return plain

    def _bad_gzip(self, error: Exception) -> RowError:
        return RowError("truncated", f"the gzip file is cut short or damaged: {error}", self.name)

    def _find_first(self, file: BinaryIO) -> tuple[bool, int]:
        """Whether the rows are in one array, and where the text starts; the file is then there."""
        head = file.read(4)
        if head.startswith(_OTHER_ENCODINGS) or b"\0" in head:
            raise RowError("encoding", "the text is not UTF-8 but UTF-16 or 32", self.name)
        start = len(_BOM) if head.startswith(_BOM) else 0
        file.seek(start)
        while chunk := file.read(_CHUNK):
            if text := chunk.lstrip():
                file.seek(start)
                return text.startswith(b"["), start
        raise RowError("no_rows", "the file is empty", self.name)

    # -- one row a line ----------------------------------------------------------------------

    def _lines(self, file: BinaryIO, start: int) -> Iterator[tuple[At, Any]]:
        for at, raw in self._raw_lines(file, start):
            if at[2] == 0:
                self._check_first(raw, file)
            yield at, _decoded(raw)

    def _raw_lines(self, file: BinaryIO, start: int) -> Iterator[tuple[At, bytes]]:
        row = 0
        for line, raw in enumerate(file, 1):
            if not raw.isspace():
                yield (start, len(raw), row, line), raw
                row += 1
            start += len(raw)

    def _check_first(self, raw: bytes, file: BinaryIO) -> None:
        """Refuse a file that is one JSON value but no list, such as `{"data": [...]}`."""
        value, at = _decoded(raw), file.tell()
        if isinstance(value, RowError):
            rest = file.read(64 * _CHUNK) if value.reason == "json" else b""
            file.seek(at)
            try:
                json.loads(raw + (rest if rest.strip() else b"?"))
            except (ValueError, RecursionError):
                return
        elif isinstance(value, dict) and any(key in value for key in CONVERSATION_KEYS):
            return
        elif not _is_blank(file):
            file.seek(at)
            return
        text = "the file is one JSON value, not a list of rows: expected an array or a row a line"
        raise RowError("not_a_list", text, self.name)

    # -- one array ---------------------------------------------------------------------------

    def _array(self, file: BinaryIO, start: int) -> Iterator[tuple[At, Any]]:
        """The array's elements, found in a window of text that moves through the file.

        The window is read as Latin-1, in which a character is a byte: JSON's own characters are the
        same ones, so the decoder finds where an element ends, in bytes.
        """
        window = _Window(file, start)
        window.skip(1)  # the bracket
        row = 0
        while row or window.next() != "]":
            window.next()
            line = window.line
            value, size = self._element(window)
            yield (window.start, size, row, line), value
            window.skip(size)
            row += 1
            mark = window.next()
            if mark == "]":
                break
            if mark != ",":
                what = f"expected ',' or ']', found {mark!r}" if mark else "the array is cut off"
                raise self._broken(window, what)
            window.skip(1)
        window.skip(1)
        if window.next():
            raise self._broken(window, "there is more behind the end of the array")
        if not row:
            raise RowError("no_rows", "the array is empty", self.name)

    def _element(self, window: _Window) -> tuple[Any, int]:
        while True:
            text, at = window.text, window.at
            try:
                value, end = _decoder.raw_decode(text, at)
            except json.JSONDecodeError as error:
                # At the window's end more text may mend it; strings are reported by their start.
                cut = error.msg.startswith("Unterminated") or error.pos > len(text) - 16
                if cut and window.grow():
                    continue
                window.skip(min(error.pos, len(text)) - at)
                raise self._broken(window, error.msg) from error
            except (ValueError, RecursionError) as error:
                raise self._broken(window, str(error)) from error
            if end == len(text) and window.grow():
                continue  # a number may go on
            raw = text[at:end]
            try:
                if raw.isascii():
                    _check_keys(raw, value)
                else:
                    value = decode_text(raw.encode("latin-1"))
            except RowError as error:
                value = error
            return value, end - at

    def _broken(self, window: _Window, what: str) -> RowError:
        place = f"{self.name} line {window.line}"
        return RowError("json", f"the file is not valid JSON: {what[:200]}", place)


class _Window:
    """A piece of the file as Latin-1 text, with a position in it (`at`) that only moves forward."""

    def __init__(self, file: BinaryIO, start: int):
        self.file, self.text, self.at, self.line = file, "", 0, 1
        self._base = start
        self.next()

    @property
    def start(self) -> int:
        """The position in bytes from the start of the file."""
        return self._base + self.at

    def grow(self) -> bool:
        """Drop what was read and add more; False at the end of the file."""
        more = self.file.read(max(_CHUNK, len(self.text)))
        self._base += self.at
        self.text, self.at = self.text[self.at :] + more.decode("latin-1"), 0
        return bool(more)

    def skip(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count

    def next(self) -> str:
        """The next character that is no white space, now at the position; "" at the end."""
        while True:
            found = _SPACE.match(self.text, self.at)
            self.skip(found.end() - self.at if found else 0)
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.grow():
                return ""


# -- JSON text -----------------------------------------------------------------------------------


def _given(value: Any) -> Any:
    return value


def _decoded(raw: bytes) -> Any:
    """The value of a line, or the RowError of one that has none."""
    try:
        return decode_text(raw)
    except RowError as error:
        return error


def decode_text(raw: bytes) -> Any:
    """The value of one JSON text in UTF-8. Raises RowError `encoding` or `json`."""
    try:
        text = raw.decode().strip(" \t\r\n")
    except UnicodeDecodeError as error:
        what = f"byte {error.start + 1} is not UTF-8: {raw[error.start : error.end]!r}"
        raise RowError("encoding", what) from error
    try:
        value, end = _decoder.raw_decode(text)
    except json.JSONDecodeError as error:
        raise RowError("json", f"not valid JSON: {error.msg} (column {error.pos + 1})") from error
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, brackets without end
        raise RowError("json", f"not valid JSON for Python: {str(error)[:200]}") from error
    if end != len(text):
        what = f"not valid JSON: {text[end : end + 10]!r} behind its end (column {end + 1})"
        raise RowError("json", what)
    _check_keys(text, value)
    return value


def _check_keys(text: str, value: Any) -> None:
    """Refuse an object with one key twice: the decoder would drop the first value silently.

    The costly look at every object is taken only where the number of colons behind quotes is not
    that of the keys of row, turns and parts.
    """
    expected = 0
    if isinstance(value, dict):
        turns = value.get("conversations") or value.get("messages")
        objects = [value]
        if isinstance(turns, list):
            objects += [turn for turn in turns if isinstance(turn, dict)]
            for turn in objects[1:]:
                parts = turn.get("content")
                if isinstance(parts, list):
                    objects += [part for part in parts if isinstance(part, dict)]
        expected = sum(map(len, objects))
    if text.count('":') != expected:
        try:
            json.loads(text, object_pairs_hook=_without_twins)
        except RecursionError as error:
            raise RowError("json", "not valid JSON for Python: too many brackets") from error


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twin = next(key for key in keys if keys.count(key) > 1)
        raise RowError("json", f"the key {twin[:80]!r} stands twice in one object")
    return found


def _is_gzip(file: BinaryIO) -> bool:
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    return packed


def _is_blank(file: BinaryIO) -> bool:
    return all(not chunk.strip() for chunk in iter(lambda: file.read(_CHUNK), b""))
