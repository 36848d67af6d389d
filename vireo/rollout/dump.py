"""Samples as files, complete: to look at, to resume from, and to train on without an engine.

`.jsonl`: one line a sample, its pictures in `images/` beside it. `.parquet`: pictures inside. A
picture is kept as the bytes that it came as, one that was a PIL image as PNG. What is read back is
equal, but for a path whose file is gone: then the picture kept here takes its place.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from PIL import Image as Pil

from vireo.data.conversation import Conversation, Image, ImageRef, Text, Turn
from vireo.data.formats import sniff
from vireo.data.images import load_image
from vireo.data.references import is_data_url, local_path, open_reference
from vireo.errors import InputError
from vireo.rollout.sample import Sample, Sampling

Keep = Callable[[bytes], Any]  # puts the bytes of a picture away; the record has what it returns
Fetch = Callable[[Any], bytes]  # the way back

_JSON_COLUMNS = ("conversation", "sampling", "spans", "rewards", "metadata")  # of parquet


def as_record(sample: Sample, keep: Keep | None = None) -> dict[str, Any]:
    """The sample as JSON has it. Without `keep`, pictures that are no files go into it as base64,
    and those that are stay where they are."""
    row = sample.conversation
    changed = {
        "turns": [asdict(turn) for turn in row.turns],
        "images": [_image(ref, keep) for ref in row.images],
        # A row's other columns are for people and rewards: what JSON lacks becomes text.
        "extra": json.loads(json.dumps(row.extra, default=str)),
    }
    record = _fields(sample) | {"conversation": _fields(row) | changed}
    return record | {"sampling": asdict(sample.sampling)}


def from_record(record: dict[str, Any], fetch: Fetch = base64.b64decode) -> Sample:
    """The sample that `as_record` wrote; `fetch` gives the bytes that its `keep` put away."""
    row = dict(record["conversation"])
    row["turns"] = tuple(_read_turn(turn) for turn in row["turns"])
    row["images"] = tuple(_read_image(image, fetch) for image in row["images"])
    row["tools"] = tuple(row["tools"])
    changed = {
        "conversation": Conversation(**row),
        "sampling": Sampling(**record["sampling"]),
        "spans": [(version, count) for version, count in record["spans"]],
    }
    return Sample(**record | changed)


def write(path: str | Path, samples: Iterable[Sample]) -> None:
    """A new file in the place of what is there. InputError: a name of neither kind."""
    path = Path(path)
    if path.suffix not in (".jsonl", ".parquet"):
        raise InputError(f"{path}: samples are written to .jsonl or .parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".writing-{path.name}")
    aside.unlink(missing_ok=True)
    (append if path.suffix == ".jsonl" else _write_parquet)(aside, samples)
    os.replace(aside, path)


def append(path: Path, samples: Iterable[Sample]) -> None:
    """More lines of a .jsonl, in one piece, behind their pictures."""
    records = [as_record(sample, lambda data: _keep(data, path.parent)) for sample in samples]
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    with path.open("ab") as file:
        file.write(lines.encode())


def read(path: str | Path) -> list[Sample]:
    """The samples of a file, in its order. InputError: it cannot be read, or holds others."""
    path, samples = Path(path), []
    try:
        if path.suffix == ".parquet":
            return _read_parquet(path)
        for line in path.read_bytes().splitlines():
            record = json.loads(line)
            samples.append(from_record(record, lambda name: (path.parent / name).read_bytes()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{path}: sample {len(samples)} cannot be read: {type(error).__name__}: {error}"
        raise InputError(text) from error
    return samples


def _keep(data: bytes, folder: Path) -> str:
    kind = (sniff(data[:4096], data[-32:]) or "bin").lower()
    name = f"images/{hashlib.sha256(data).hexdigest()[:24]}.{kind}"
    if not (folder / name).exists():
        (folder / "images").mkdir(exist_ok=True)
        aside = folder / f"{name}.writing"
        aside.write_bytes(data)
        os.replace(aside, folder / name)
    return name


def _write_parquet(path: Path, samples: Iterable[Sample]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [as_record(sample, _base64) for sample in samples]
    for row in rows:
        row |= {name: json.dumps(row[name]) for name in _JSON_COLUMNS}
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100, compression="zstd")


def _read_parquet(path: Path) -> list[Sample]:
    import pyarrow.parquet as pq

    rows = pq.read_table(path).to_pylist()
    return [from_record(row | {n: json.loads(row[n]) for n in _JSON_COLUMNS}) for row in rows]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _read_turn(turn: dict[str, Any]) -> Turn:
    parts = tuple(Text(**part) if "text" in part else Image(**part) for part in turn["parts"])
    return Turn(**turn | {"parts": parts, "tool_calls": tuple(turn["tool_calls"])})


def _image(ref: ImageRef, keep: Keep | None) -> dict[str, Any]:
    value, store = ref.value, keep or _base64
    if isinstance(value, Pil.Image):
        out = io.BytesIO()
        load_image(value).save(out, "PNG")
        return {"root": ref.root, "pil": store(out.getvalue())}
    if isinstance(value, dict) and value.get("bytes") is not None:
        others = {name: item for name, item in value.items() if name != "bytes"}
        return {"root": ref.root, "bytes": store(value["bytes"]), "with": others}
    if isinstance(value, bytes):
        return {"root": ref.root, "bytes": store(value)}
    copy = {"copy": keep(open_reference(ref).read())} if keep else {}
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    return {"root": ref.root, "value": value, **copy}


def _read_image(image: dict[str, Any], fetch: Fetch) -> ImageRef:
    value: Any = image.get("value")
    root = image["root"]
    if "pil" in image:
        value = load_image(fetch(image["pil"]))
    elif "bytes" in image:
        value = fetch(image["bytes"])
        value = {"bytes": value, **image["with"]} if "with" in image else value
    elif "copy" in image and not is_data_url(value):
        path = value["path"] if isinstance(value, dict) else value
        value = value if os.path.exists(local_path(path, root)) else fetch(image["copy"])
    return ImageRef(value, root)
