"""Small pictures and image files for tests."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from vireo.data.images import ImageError, load_image

FINE = {"quality": 98, "subsampling": 0}


def scene(width: int = 24, height: int = 16) -> Image.Image:
    """Smooth and without symmetry, so that every turn shows and JPEG stays close."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    pixels = np.stack([200 * x + 30, 180 * y + 40, 120 * x * y + 60], axis=-1)
    return Image.fromarray(pixels.astype(np.uint8))


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def near(got: Image.Image, wanted: Image.Image | np.ndarray, tolerance: int = 0) -> bool:
    wanted = np.asarray(wanted).astype(int)
    return got.size == wanted.shape[1::-1] and abs(wanted - np.asarray(got)).max() <= tolerance


def refused(ref, **options) -> ImageError:
    with pytest.raises(ImageError) as caught:
        load_image(ref, **options)
    return caught.value


def raw_png(
    depth: int, colour: int, rows: list[bytes], width: int, *chunks, height: int | None = None
) -> bytes:
    def chunk(name: bytes, body: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(name + body))
        return struct.pack(">I", len(body)) + name + body + crc

    head = struct.pack(">IIBBBBB", width, height or len(rows), depth, colour, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    parts = [chunk(b"IHDR", head), *[chunk(*c) for c in chunks]]
    parts += [chunk(b"IDAT", data), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def tiff(bits: tuple[int, ...], pixels: bytes, width: int, height: int, **tags: int) -> bytes:
    """An uncompressed little-endian TIFF of one strip; tags by number (`t262=1`)."""
    body = struct.pack(f"<{len(bits)}H", *bits) if len(bits) > 2 else b""
    values = {256: width, 257: height, 259: 1, 277: len(bits), 278: height, 279: len(pixels)}
    values |= {int(name[1:]): value for name, value in tags.items()}
    count = len(values) + 2
    after = 8 + 2 + 12 * count + 4
    packed = struct.unpack("<I", struct.pack("<2H", *(bits * 2)[:2]))[0]
    values |= {258: after if body else packed, 273: after + len(body)}
    entries = b"".join(
        struct.pack("<HHII", tag, 3 if tag == 258 else 4, len(bits) if tag == 258 else 1, value)
        for tag, value in sorted(values.items())
    )
    return b"II*\0" + struct.pack("<IH", 8, count) + entries + bytes(4) + body + pixels
