"""Rows in Arrow columns: parquet files, and data sets of the `datasets` library.

Pictures stored as bytes are not read when a file is opened, only when their row is.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from functools import cached_property, partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vireo.data.row_images import IMAGE_KEYS
from vireo.data.rows import KNOWN_KEYS
from vireo.errors import RowError, VireoError

At = tuple[int, int, int, int]  # file, row group, row in the group, row in the file (all from 0)

_BATCH = 256
_GROUPS_KEPT = 2  # decoded row groups held in memory
_FILES_KEPT = 128  # files held open: a data set may have more than a process is allowed


class ParquetFiles:
    """The rows of parquet files, one after the other. Picklable; each process opens its own.

    `names`: how messages call the files.
    """

    def __init__(self, paths: list[str], names: list[str]):
        self.paths, self.names = paths, names
        self._pid = 0
        self._files: OrderedDict[int, pq.ParquetFile] = OrderedDict()
        self._groups: OrderedDict[tuple[int, int], pa.Table] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "names": self.names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["paths"], state["names"])  # type: ignore[misc]

    @property
    def files(self) -> list[str]:
        return self.paths

    def scan(self, whole: bool = False) -> Iterator[tuple[At, Any]]:
        for number in range(len(self.paths)):
            row = 0
            file = self._file(number)
            columns, lazy = _columns_to_check(file, whole)
            for group in range(file.num_row_groups):
                done = 0
                for records in self._batches(number, group, columns, lazy):
                    for i, record in enumerate(records, done):
                        yield (number, group, i, row), record
                        row += 1
                    done += len(records)

    def stream(self, first: int) -> Generator[tuple[At, Callable[[], Any]], None, int]:
        """Each row from number `first` on: its place, and a call that gives its value.

        Returns the number of rows. What is passed over is known from the files' ends. A row group
        is decoded when its first row is asked for, and lives as long as one of its calls.
        """
        rows = 0
        for number in range(len(self.paths)):
            row, content = 0, self._file(number).metadata
            for group in range(content.num_row_groups):
                count = content.row_group(group).num_rows
                table = _Group(self, number, group)
                for i in range(min(max(first - rows, 0), count), count):
                    yield (number, group, i, row + i), partial(table.row, i)
                rows, row = rows + count, row + count
        return rows

    def read(self, at: At) -> Any:
        return _record(self._group(at[0], at[1]), at[2])

    def place(self, at: At) -> tuple[str, int, int | None]:
        return self.names[at[0]], at[3], None

    def decode(self, number: int, group: int) -> pa.Table:
        """A row group of a file. Raises RowError when it is damaged."""
        try:
            return self._file(number).read_row_group(group, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(number, error) from error

    def _batches(
        self, number: int, group: int, columns: list[str], lazy: set[str]
    ) -> Iterator[list[Any]]:
        batches = self._file(number).iter_batches(
            _BATCH, row_groups=[group], columns=columns, use_threads=False
        )
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (pa.ArrowException, OSError) as error:
                raise self._damaged(number, error) from error
            yield _records(batch, lazy)

    def _file(self, number: int) -> pq.ParquetFile:
        if self._pid != os.getpid():  # a forked process must not share the parent's readers
            self._pid, self._files = os.getpid(), OrderedDict()
        if number not in self._files:
            try:
                self._files[number] = pq.ParquetFile(self.paths[number])
            except (pa.ArrowException, OSError) as error:
                raise self._damaged(number, error) from error
            if len(self._files) > _FILES_KEPT:
                self._files.popitem(last=False)
        self._files.move_to_end(number)
        return self._files[number]

    def _group(self, number: int, group: int) -> pa.Table:
        key = number, group
        if key not in self._groups:
            self._groups[key] = self.decode(number, group)
            if len(self._groups) > _GROUPS_KEPT:
                self._groups.popitem(last=False)
        self._groups.move_to_end(key)
        return self._groups[key]

    def _damaged(self, number: int, error: Exception) -> RowError:
        text = f"the parquet file is cut short or damaged: {str(error).splitlines()[0][:200]}"
        return RowError("truncated", text, self.names[number])


class _Group:
    """A row group of a parquet file that is decoded when a row of it is asked for."""

    def __init__(self, files: ParquetFiles, number: int, group: int):
        self.files, self.number, self.group = files, number, group

    @cached_property
    def table(self) -> pa.Table:
        return self.files.decode(self.number, self.group)

    def row(self, i: int) -> Any:
        return _record(self.table, i)


class SavedDataset:
    """The rows of a `datasets.Dataset`, taken as Arrow so that the library decodes no image."""

    def __init__(self, dataset: Any, name: str):
        self.dataset, self.name = dataset.with_format("arrow"), name

    @property
    def files(self) -> list[str]:
        return [file["filename"] for file in self.dataset.cache_files]

    def scan(self, whole: bool = False) -> Iterator[tuple[At, Any]]:
        names, lazy = _chosen(self.dataset.features.arrow_schema, whole)
        rows = self.dataset.select_columns(names)
        for start in range(0, len(rows), _BATCH):
            for i, record in enumerate(_records(rows[start : start + _BATCH], lazy), start):
                yield (0, 0, 0, i), record

    def stream(self, first: int) -> Generator[tuple[At, Callable[[], Any]], None, int]:
        """Each row from number `first` on: its place, and a call that gives its value.

        Returns the number of rows.
        """
        for i in range(first, len(self.dataset)):
            at = 0, 0, 0, i
            yield at, partial(self.read, at)
        return len(self.dataset)

    def read(self, at: At) -> Any:
        return _records(self.dataset[at[3] : at[3] + 1])[0]

    def place(self, at: At) -> tuple[str, int, int | None]:
        return self.name, at[3], None


class HubStream:
    """The rows of a hub's data set, read over the network as they are needed, from the start on.

    load: gives a `datasets.IterableDataset`; every reading loads anew, as none survives a fork.
    """

    def __init__(self, load: Callable[[], Any], name: str):
        self.load, self.name = load, name

    @property
    def files(self) -> list[str]:
        return []  # none of this machine

    def stream(self, first: int) -> Generator[tuple[At, Callable[[], Any]], None, int]:
        """Each row from number `first` on, as `ParquetFiles.stream`; those before are read too.

        Raises VireoError when the network fails.
        """
        # Not `iter(dataset)`: in a loader's worker that gives the worker's share of the files.
        tables = self.load().with_format("arrow").iter(_BATCH)
        rows = 0
        while True:
            try:
                table = next(tables)
            except StopIteration:
                return rows
            except Exception as error:  # the library raises all kinds
                raise VireoError(
                    f"{self.name}: rows from {rows} on cannot be read from the hub: "
                    f"{type(error).__name__}: {str(error)[:300]}"
                ) from error
            for i in range(min(max(first - rows, 0), len(table)), len(table)):
                yield (0, 0, 0, rows + i), partial(_record, table, i)
            rows += len(table)

    def place(self, at: At) -> tuple[str, int, int | None]:
        return self.name, at[3], None


def _has_bytes(field: pa.Field) -> bool:
    """Whether a column holds images as {bytes, path}, or lists of them."""
    kind = field.type
    while pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    return pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0


def _chosen(schema: pa.Schema, whole: bool) -> tuple[list[str], set[str]]:
    """The columns that structure needs, and those of them that hold images as bytes."""
    names = [name for name in schema.names if whole or name in KNOWN_KEYS]
    images = names if whole else [name for name in names if name in IMAGE_KEYS]
    return names, {name for name in images if _has_bytes(schema.field(name))}


def _columns_to_check(file: pq.ParquetFile, whole: bool) -> tuple[list[str], set[str]]:
    """The leaf columns that structure needs, and which image columns lack their bytes there."""
    names, lazy = _chosen(file.schema_arrow, whole)
    leaves = [file.schema.column(i).path for i in range(len(file.schema))]
    leaves = [leaf for leaf in leaves if whole or leaf.split(".")[0] in names]
    heavy = {leaf for leaf in leaves if leaf.split(".")[0] in lazy and leaf.endswith(".bytes")}
    light = [leaf for leaf in leaves if leaf not in heavy]
    for key in lazy:  # a column of bytes alone has no lighter leaf
        if not any(leaf.split(".")[0] == key for leaf in light):
            light += [leaf for leaf in leaves if leaf.split(".")[0] == key]
    return light, lazy


def _record(table: pa.Table, i: int) -> Any:
    return _records(table.slice(i, 1))[0]


def _records(table: Any, lazy: set[str] | frozenset[str] = frozenset()) -> list[Any]:
    """The rows of a table or batch as dicts; a null is absent, as in a JSON row.

    Images in `lazy` columns are only counted. A row that cannot be read is a RowError.
    """
    try:
        columns = {
            name: _counted(table[name]) if name in lazy else table[name].to_pylist()
            for name in table.schema.names
        }
    except (UnicodeDecodeError, ValueError, ArithmeticError, pa.ArrowException) as error:
        if len(table) > 1:
            return [row for i in range(len(table)) for row in _records(table.slice(i, 1), lazy)]
        reason = "encoding" if isinstance(error, UnicodeDecodeError) else "row_type"
        return [RowError(reason, f"the row's columns cannot be read: {str(error)[:200]}")]
    names = list(columns)
    return [
        {name: _without_nulls(columns[name][i]) for name in names if columns[name][i] is not None}
        for i in range(len(table))
    ]


def _counted(column: Any) -> list[Any]:
    """As many stand-ins as there are images; none of their bytes is touched."""
    image = {"bytes": b""}
    if pa.types.is_struct(column.type):
        return [image if there else None for there in pc.is_valid(column).to_pylist()]
    counts = pc.list_value_length(column).to_pylist()
    return [None if count is None else [image] * count for count in counts]


def _without_nulls(value: Any) -> Any:
    """Arrow fills absent keys of objects with null; nulls in lists stay, as they hold a place."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
