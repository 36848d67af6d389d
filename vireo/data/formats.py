"""What a file's bytes say about its image format, and whether the file ends early."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import BinaryIO, Literal

# Pillow's names of the formats that are decoded. Others (EPS starts an interpreter, stubs decode
# nothing) are refused by name.
SUPPORTED = (
    *("AVIF", "BMP", "GIF", "ICO", "JPEG", "JPEG2000"),
    *("PNG", "PPM", "QOI", "TIFF", "WEBP"),
)

_MAGIC = {
    b"\x89PNG": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"GIF8": "GIF",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"II+\0": "TIFF",
    b"MM\0+": "TIFF",
    b"\0\0\1\0": "ICO",
    b"\0\0\0\x0cjP": "JPEG2000",
    b"\xff\x4f\xff\x51": "JPEG2000",
    b"qoif": "QOI",
    b"%PDF": "PDF",
    b"%!PS": "EPS",
    b"\xc5\xd0\xd3\xc6": "EPS",
    b"8BPS": "Photoshop",
    b"\0\0\2\0": "CUR",
    b"icns": "ICNS",
    b"DDS ": "DDS",
    b"\xff\x0a": "JPEG XL",
    b"\0\0\0\x0cJXL": "JPEG XL",
    b"II\xbc\1": "JPEG XR",
    b"\x76\x2f\x31\x01": "OpenEXR",
    b"#?RADIANCE": "Radiance HDR",
    b"#?RGBE": "Radiance HDR",
    b"\x01\xda\x00": "SGI",
    b"\x01\xda\x01": "SGI",
    b"SIMPLE  =": "FITS",
    b"\xd7\xcd\xc6\x9a": "WMF",
    b"AT&TFORM": "DjVu",
    b"/* XPM": "XPM",
}
_FTYP = {
    **dict.fromkeys((b"avif", b"avis"), "AVIF"),
    **dict.fromkeys((b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis"), "HEIC"),
    **dict.fromkeys((b"mif1", b"msf1"), "HEIF"),
}


def sniff(head: bytes, tail: bytes = b"") -> str | None:
    """The name of the image format of which these are the first (and last) bytes, or None."""
    if tail.endswith(b"TRUEVISION-XFILE.\0"):
        return "TGA"
    for magic, name in _MAGIC.items():
        if head.startswith(magic):
            return name
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[4:8] == b"ftyp":
        brands = [head[8:12], *(head[i : i + 4] for i in range(16, min(len(head), 64), 4))]
        names = [_FTYP[brand] for brand in brands if brand in _FTYP]
        return "AVIF" if "AVIF" in names else names[0] if names else None
    # Two letters prove little (text may start with them), so look at what must follow.
    if head[:2] == b"BM" and head[14:18] in [struct.pack("<I", n) for n in _BMP_HEADERS]:
        return "BMP"
    if head[:1] == b"P" and head[1:2] in b"1234567fF" and head[2:4].lstrip()[:1].isdigit():
        return "PPM"
    if head[128:132] == b"DICM":
        return "DICOM"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<svg", b"<?xml", b"<!doctype svg", b"<!--")) and b"<svg" in text:
        return "SVG"
    return None


_BMP_HEADERS = (12, 16, 40, 52, 56, 64, 108, 124)


def avif_pixels(head: bytes) -> int:
    """Pixels that an AVIF's header claims; its library calls too many of them invalid data."""
    found = re.search(rb"ispe.{4}(.{4})(.{4})", head, re.DOTALL)
    return int.from_bytes(found[1], "big") * int.from_bytes(found[2], "big") if found else 0


def png_chunks(stream: BinaryIO) -> Iterator[tuple[bytes, int, int]]:
    """(type, offset of the data, length) of each whole chunk, by their headers alone."""
    end = stream.seek(0, 2)
    at = 8
    while at + 12 <= end:
        stream.seek(at)
        length, kind = struct.unpack(">I4s", stream.read(8))
        if at + 12 + length > end:
            return
        yield kind, at + 8, length
        if kind == b"IEND":
            return
        at += 12 + length


def ends_early(stream: BinaryIO, name: str | None) -> bool:
    """Whether the container says that more bytes should follow than there are.

    For the formats of which Pillow accepts a file cut after the pixels of its first frame, or does
    not tell "cut short" from "damaged".
    """
    if name == "PNG":
        stream.seek(0)
        if stream.read(8) != b"\x89PNG\r\n\x1a\n":
            return False  # damaged from its first bytes on
        return all(kind != b"IEND" for kind, _, _ in png_chunks(stream))
    if name == "GIF":
        return _gif_ends_early(stream)
    size = stream.seek(0, 2)
    stream.seek(0)
    if name == "WEBP":
        return int.from_bytes(stream.read(8)[4:], "little") + 8 > size
    if name == "AVIF":
        at = 0
        while at < size:
            stream.seek(at)
            length, _ = struct.unpack(">I4s", stream.read(8).ljust(8, b"\0"))
            if length == 1:  # a 64-bit length follows
                length = int.from_bytes(stream.read(8), "big")
            if length == 0:  # to the end of the file
                return False
            if length < 8:
                return at + 8 > size
            at += length
        return at > size
    if name == "TIFF":  # its first table may lie anywhere, usually at the end
        head = stream.read(16).ljust(16, b"\0")
        order: Literal["little", "big"] = "little" if head[:1] == b"I" else "big"
        start = head[8:16] if b"+" in head[:4] else head[4:8]
        return int.from_bytes(start, order) >= size
    if name in ("JPEG", "JPEG2000"):
        return b"\xff\xd9" not in stream.read()  # end of image, end of codestream
    return False


def _gif_ends_early(stream: BinaryIO) -> bool:
    """True when the file ends inside a block; a file that only lacks the end mark is whole."""
    end = stream.seek(0, 2)
    stream.seek(10)
    flags = (stream.read(3) or b"\0")[0]
    stream.seek(3 << (flags & 7) + 1 if flags & 128 else 0, 1)
    while stream.tell() < end:
        kind = stream.read(1)
        if kind == b"!":
            stream.seek(1, 1)
        elif kind == b",":
            flags = stream.read(9).ljust(9, b"\0")[8]
            stream.seek((3 << (flags & 7) + 1 if flags & 128 else 0) + 1, 1)
        else:
            return False  # the end mark, or other data after the last block
        while length := (stream.read(1) or b"\0")[0]:
            stream.seek(length, 1)
    return stream.tell() > end
