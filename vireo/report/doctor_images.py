"""What `vireo doctor` knows of pictures: sizes and hashes only, each distinct one decoded once."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from PIL import Image

from vireo.data.conversation import Conversation, ImageRef
from vireo.data.images import as_row_error, load_image
from vireo.data.pixels import orientation
from vireo.data.references import ImageError, image_name, is_data_url, local_path, open_reference
from vireo.report.figures import histogram, share, spread

LONG_RATIO = 8  # longer side over shorter side
TINY_SIDE = 28  # pixels of the shorter side
HUGE_PIXELS = 16_000_000
_SHOWN = 5


def digest(*parts: bytes) -> int:
    """64 bits that stand for some bytes."""
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return int.from_bytes(found.digest(), "big")


def pairs(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """One 64-bit number for each pair of two columns of numbers."""
    mixed = first.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # an odd number spreads bits
    return (mixed ^ (mixed >> np.uint64(29))) + second


class Pictures:
    """Every picture that was asked for, known again by its name and by its bytes.

    About 300 bytes of memory a distinct picture and 16 a reference.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # of a name or of bytes
        self._contents = array("Q")
        self._widths, self._heights, self._rows = array("I"), array("I"), array("I")
        self._faults: set[int] = set()  # names
        self._modes: Counter[str] = Counter()
        self._formats: Counter[str] = Counter()
        self._turned = 0
        # Per reference: its row, its picture and its name.
        self._uses = array("I"), array("I"), array("Q")
        self.references = 0

    def look(self, ref: ImageRef, row: int) -> tuple[tuple[int, int], int]:
        """The upright (width, height) of a picture and a hash of its bytes.

        Raises RowError where the trainer would, without the row's place. A refused picture is
        tried again where it is named again, so that no message need be kept.
        """
        self.references += 1
        name = _name(ref)
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self._read(ref, name, row)
        for column, value in zip(self._uses, (row, number, name)):
            column.append(value)
        return (self._widths[number], self._heights[number]), self._contents[number]

    def _read(self, ref: ImageRef, name: int, row: int) -> int:
        try:
            content = _content(ref)
            if content in self._numbers:
                return self._numbers[content]
            size = load_image(ref).size
        except ImageError as error:
            self._faults.add(name)
            raise as_row_error(error) from error
        number = self._numbers[content] = len(self._widths)
        self._contents.append(content)
        self._widths.append(size[0])
        self._heights.append(size[1])
        self._rows.append(row)
        self._count_header(ref, size)
        return number

    def _count_header(self, ref: ImageRef, size: tuple[int, int]) -> None:
        """The file's own mode and format, of a picture that was decoded before."""
        with open_reference(ref) as stream, Image.open(stream) as image:
            self._modes[image.mode] += 1
            self._formats[image.format or "?"] += 1
            self._turned += orientation(image) > 1 or image.size != size

    # -- the report ----------------------------------------------------------------------------

    def report(self, place: Callable[[int], str]) -> dict[str, Any]:
        """The section `images` of the report; `place` says where a row is."""
        wide = np.array(self._widths, dtype=np.int64)
        high = np.array(self._heights, dtype=np.int64)
        short, long = np.minimum(wide, high), np.maximum(wide, high)

        def odd(limit: int, chosen: np.ndarray) -> dict[str, Any]:
            found = np.flatnonzero(chosen)
            listed = [
                {"row": place(self._rows[i]), "size": [self._widths[i], self._heights[i]]}
                for i in found[:_SHOWN].tolist()
            ]
            return {"limit": limit, "count": len(found), "examples": listed}

        return {
            "references": self.references,
            "distinct": len(wide),
            "refused": len(self._faults),
            "modes": dict(self._modes.most_common()),
            "formats": dict(self._formats.most_common()),
            "exif_turned": self._turned,
            "exif_turned_share": share(self._turned, len(wide)),
            "width": spread(wide),
            "height": spread(high),
            "longest_side": histogram(long, doubling=True),
            "long_ratio": odd(LONG_RATIO, long > LONG_RATIO * short),
            "tiny_side": odd(TINY_SIDE, short < TINY_SIDE),
            "huge_pixels": odd(HUGE_PIXELS, wide * high > HUGE_PIXELS),
        }

    def twins(self, read: Callable[[int], Conversation]) -> dict[str, Any]:
        """Pictures whose bytes stand under several names; `read` gives the row of a number."""
        rows, numbers, names = (np.array(column) for column in self._uses)
        first = np.unique(pairs(numbers, names), return_index=True)[1]
        first = first[np.argsort(numbers[first], kind="stable")]
        _, starts, counts = np.unique(numbers[first], return_index=True, return_counts=True)
        listed = []
        for i in np.flatnonzero(counts > 1)[:_SHOWN].tolist():
            uses = first[starts[i] : starts[i] + min(int(counts[i]), _SHOWN)]
            listed.append(
                sorted(_name_in(read(int(rows[use])), int(names[use])) for use in uses.tolist())
            )
        return {"count": int((counts > 1).sum()), "examples": listed}


def _name_in(row: Conversation, name: int) -> str:
    return next((image_name(ref) for ref in row.images if _name(ref) == name), "?")


def _name(ref: ImageRef) -> int:
    """A number for the file that a reference means; for bytes without a name, for the bytes."""
    value = ref.value
    path = value.get("path") if isinstance(value, dict) else value
    if isinstance(path, str) and path and not is_data_url(path):
        if isinstance(value, dict) and value.get("bytes") is not None:
            return digest(b"name of bytes", path.encode(), bytes(value["bytes"]))
        with suppress(ImageError):
            return digest(b"path", local_path(path, ref.root).encode(errors="surrogatepass"))
    inside = value.get("bytes") if isinstance(value, dict) else value
    return digest(b"bytes", inside if isinstance(inside, bytes) else repr(value).encode())


def _content(ref: ImageRef) -> int:
    """A hash of the encoded bytes. Raises ImageError where there are none."""
    found = hashlib.blake2b(digest_size=8)
    with open_reference(ref) as stream:
        while chunk := stream.read(1 << 20):
            found.update(chunk)
    return int.from_bytes(found.digest(), "big")
