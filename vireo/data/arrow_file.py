"""Rows in Arrow columns: parquet files, and data sets of the `datasets` library.

Pictures stored as bytes are not read when a file is opened, only when their row is.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vireo.data.row_images import IMAGE_KEYS
from vireo.data.rows import KNOWN_KEYS
from vireo.errors import RowError

At = tuple[int, int, int, int]  # file, row group, row in the group, row in the file (all from 0)

_BATCH = 256
_GROUPS_KEPT = 2  # decoded row groups held in memory


class ParquetFiles:
    """The rows of parquet files, one after the other. Picklable; each process opens its own."""

    def __init__(self, paths: list[str]):
        self.paths = paths
        self._pid = 0
        self._files: dict[int, pq.ParquetFile] = {}
        self._groups: OrderedDict[tuple[int, int], pa.Table] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["paths"])  # type: ignore[misc]

    def scan(self) -> Iterator[tuple[At, Any]]:
        for number, path in enumerate(self.paths):
            row = 0
            file = self._file(number)
            columns, lazy = _columns_to_check(file)
            for group in range(file.num_row_groups):
                done = 0
                for records in self._batches(file, path, group, columns, lazy):
                    for i, record in enumerate(records, done):
                        yield (number, group, i, row), record
                        row += 1
                    done += len(records)

    def read(self, at: At) -> Any:
        table = self._group(at[0], at[1]).slice(at[2], 1)
        return _records(table)[0]

    def place(self, at: At) -> tuple[str, int, int | None]:
        return os.path.basename(self.paths[at[0]]), at[3], None

    def _batches(
        self, file: pq.ParquetFile, path: str, group: int, columns: list[str], lazy: set[str]
    ) -> Iterator[list[Any]]:
        batches = file.iter_batches(_BATCH, row_groups=[group], columns=columns, use_threads=False)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (pa.ArrowException, OSError) as error:
                raise _damaged(path, error) from error
            yield _records(batch, lazy)

    def _file(self, number: int) -> pq.ParquetFile:
        if self._pid != os.getpid():  # a forked process must not share the parent's readers
            self._pid, self._files = os.getpid(), {}
        if number not in self._files:
            path = self.paths[number]
            try:
                self._files[number] = pq.ParquetFile(path)
            except (pa.ArrowException, OSError) as error:
                raise _damaged(path, error) from error
        return self._files[number]

    def _group(self, number: int, group: int) -> pa.Table:
        key = number, group
        if key not in self._groups:
            try:
                table = self._file(number).read_row_group(group, use_threads=False)
            except (pa.ArrowException, OSError) as error:
                raise _damaged(self.paths[number], error) from error
            self._groups[key] = table
            if len(self._groups) > _GROUPS_KEPT:
                self._groups.popitem(last=False)
        self._groups.move_to_end(key)
        return self._groups[key]


class SavedDataset:
    """The rows of a `datasets.Dataset`, taken as Arrow so that the library decodes no image."""

    def __init__(self, dataset: Any, name: str):
        self.dataset, self.name = dataset.with_format("arrow"), name

    def scan(self) -> Iterator[tuple[At, Any]]:
        schema = self.dataset.features.arrow_schema
        lazy = {key for key in IMAGE_KEYS if key in schema.names and _has_bytes(schema.field(key))}
        names = [name for name in self.dataset.column_names if name in KNOWN_KEYS]
        rows = self.dataset.select_columns(names)
        for start in range(0, len(rows), _BATCH):
            for i, record in enumerate(_records(rows[start : start + _BATCH], lazy), start):
                yield (0, 0, 0, i), record

    def read(self, at: At) -> Any:
        return _records(self.dataset[at[3] : at[3] + 1])[0]

    def place(self, at: At) -> tuple[str, int, int | None]:
        return self.name, at[3], None


def _damaged(path: str, error: Exception) -> RowError:
    text = f"the parquet file is cut short or damaged: {str(error).splitlines()[0][:200]}"
    return RowError("truncated", text, os.path.basename(path))


def _has_bytes(field: pa.Field) -> bool:
    """Whether a column holds images as {bytes, path}, or lists of them."""
    kind = field.type
    while pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    return pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0


def _columns_to_check(file: pq.ParquetFile) -> tuple[list[str], set[str]]:
    """The leaf columns that structure needs, and which image columns lack their bytes there."""
    schema = file.schema_arrow
    lazy = {key for key in IMAGE_KEYS if key in schema.names and _has_bytes(schema.field(key))}
    leaves = [file.schema.column(i).path for i in range(len(file.schema))]
    leaves = [leaf for leaf in leaves if leaf.split(".")[0] in KNOWN_KEYS]
    heavy = {leaf for leaf in leaves if leaf.split(".")[0] in lazy and leaf.endswith(".bytes")}
    light = [leaf for leaf in leaves if leaf not in heavy]
    for key in lazy:  # a column of bytes alone has no lighter leaf
        if not any(leaf.split(".")[0] == key for leaf in light):
            light += [leaf for leaf in leaves if leaf.split(".")[0] == key]
    return light, lazy


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
