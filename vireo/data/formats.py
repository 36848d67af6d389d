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
# Those of which it accepts a file that is cut behind the pixels of its first frame, or even in it.
CUT_UNNOTICED = ("GIF", "ICO", "JPEG2000", "PNG", "QOI", "TIFF")

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
    b"PF\n": "PFM",
    b"P7\n": "PAM",
    b"%PDF": "PDF",
    b"%!PS": "EPS",
    b"\xc5\xd0\xd3\xc6": "EPS",
    b"8BPS": "Photoshop",
    b"gimp xcf": "XCF",
    b"\x0a\5\1\x08": "PCX",
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
    if head[:4] == b"\0\0\2\0" and any(head[4:6]):
        return "CUR"
    if head[:3] in _TGA and not any(head[3:8]) and head[16:17] in (b"\x08", b"\x18", b" "):
        return "TGA"
    if head[128:132] == b"DICM":
        return "DICOM"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<svg", b"<?xml", b"<!doctype svg", b"<!--")) and b"<svg" in text:
        return "SVG"
    return None


_TGA = (b"\0\0\2", b"\0\0\3", b"\0\0\x0a", b"\0\0\x0b")  # colours or gray, plain or packed
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
    """Whether the container says that more bytes should follow than there are."""
    stream.seek(0)
    if name == "PNG":
        signature = b"\x89PNG\r\n\x1a\n"
        if not signature.startswith(stream.read(8)):
            return False  # damaged from its first bytes on
        return all(kind != b"IEND" for kind, _, _ in png_chunks(stream))
    if name in ("JPEG", "JPEG2000"):
        return b"\xff\xd9" not in stream.read()  # end of image, end of codestream
    if name == "QOI":
        return bytes(7) + b"\1" not in stream.read()
    check = _ENDS.get(name or "")
    size = stream.seek(0, 2)
    stream.seek(0)
    return check is not None and check(stream, size)


def _webp_ends_early(stream: BinaryIO, size: int) -> bool:
    stream.seek(4)
    return int.from_bytes(stream.read(4), "little") + 8 > size


def _avif_ends_early(stream: BinaryIO, size: int) -> bool:
    at = 0
    while at + 8 <= size:
        stream.seek(at)
        length, _ = struct.unpack(">I4s", stream.read(8))
        if length == 1:  # a 64-bit length follows
            length = int.from_bytes(stream.read(8), "big")
        if length < 8:  # 0: to the end of the file
            return False
        at += length
    return at != size


def _ico_ends_early(stream: BinaryIO, size: int) -> bool:
    stream.seek(4)
    count = int.from_bytes(stream.read(2), "little")
    table = stream.read(16 * count)
    if len(table) < 16 * count:
        return True
    places = [struct.unpack_from("<II", table, 16 * i + 8) for i in range(count)]
    return any(length + start > size for length, start in places)


def _tiff_ends_early(stream: BinaryIO, size: int) -> bool:
    for table in _tables(stream, size):
        if table is None:
            return True
        for starts, lengths in ((273, 279), (324, 325)):  # strips, tiles
            places = zip(table.get(starts, ()), table.get(lengths, ()))
            if any(start + length > size for start, length in places):
                return True
    return False


_SIZES = {3: 2, 4: 4, 13: 4, 16: 8, 18: 8}  # bytes of a whole number, by its type
_WANTED = (258, 273, 279, 324, 325)  # bits a sample; places and lengths of strips, of tiles


def _tables(stream: BinaryIO, size: int) -> Iterator[dict[int, list[int]] | None]:
    """What each page's table says of its data, by tag; None, last, for one behind the end."""
    head = stream.read(16).ljust(16, b"\0")
    order: Literal["little", "big"] = "little" if head[:1] == b"I" else "big"
    wide, short = (8, 8) if b"+" in head[2:4] else (4, 2)  # bytes of a place, of a table's length
    each = 4 + 2 * wide  # bytes of an entry
    at = int.from_bytes(head[8:16] if wide == 8 else head[4:8], order)
    seen = set()
    while at and at not in seen:
        seen.add(at)
        stream.seek(min(at, size))
        count = int.from_bytes(stream.read(short), order)
        if at + short + each * count + wide > size:
            yield None
            return
        entries, after = stream.read(each * count), stream.read(wide)
        found: dict[int, list[int]] = {}
        for i in range(0, len(entries), each):
            tag, kind = (int.from_bytes(entries[i + k : i + k + 2], order) for k in (0, 2))
            if tag not in _WANTED or kind not in _SIZES:
                continue
            length = _SIZES[kind] * int.from_bytes(entries[i + 4 : i + 4 + wide], order)
            value = entries[i + 4 + wide : i + each]
            if length > wide:
                place = int.from_bytes(value, order)
                if place + length > size:
                    yield None
                    return
                stream.seek(place)
                value = stream.read(length)
            starts = range(0, length, _SIZES[kind])
            found[tag] = [int.from_bytes(value[k : k + _SIZES[kind]], order) for k in starts]
        yield found
        at = int.from_bytes(after, order)


def _gif_ends_early(stream: BinaryIO, end: int) -> bool:
    """True when the file ends inside a block; a file that only lacks the end mark is whole."""
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


_ENDS = {
    "AVIF": _avif_ends_early,
    "GIF": _gif_ends_early,
    "ICO": _ico_ends_early,
    "TIFF": _tiff_ends_early,
    "WEBP": _webp_ends_early,
}
