"""Any decoded picture to upright 8-bit RGB. Colour profiles and gamma are ignored."""

from __future__ import annotations

import re

import numpy as np
from PIL import Image, ImageChops

from vireo.data.references import ImageError

_EXIF_ORIENTATION = 0x0112
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def orientation(image: Image.Image) -> int:
    """The EXIF orientation still to be applied: 1 (none) to 8; an illegal one counts as 1."""
    if image.format == "TIFF":
        return 1  # Pillow turns a TIFF while it loads, and swaps its size when it opens
    try:
        # The base class's: PNG's own would decode the pixels to look for a late chunk.
        value = Image.Image.getexif(image).get(_EXIF_ORIENTATION)
    except Exception:  # garbage in the EXIF block says nothing about the pixels
        return 1
    return value if isinstance(value, int) and value in TURNS else 1


def upright_rgb(image: Image.Image) -> Image.Image:
    """A new RGB picture: the current frame, on white where transparent, turned by EXIF.

    16-bit gray is scaled (65535 becomes 255), CMYK is (255-C)(255-K)/255.
    Raises ImageError `unsupported_mode` where the value of white is unknown (floats, 32 bits), and
    what Pillow raises for damaged data.
    """
    first = next(iter(getattr(image, "tile", ())), None)
    image.load()
    rgb = _rgb(image, _sample_bits(first))
    if image.format == "GIF" and first and first.extents not in (None, (0, 0, *image.size)):
        # A first frame that covers a part of the canvas: the rest is transparent.
        canvas = Image.new("RGB", image.size, "white")
        canvas.paste(rgb.crop(first.extents), first.extents[:2])
        rgb = canvas
    turn = TURNS.get(orientation(image))
    if turn is not None:
        rgb = rgb.transpose(turn)
    elif rgb is image:
        rgb = image.copy()
    rgb.info = {}
    return rgb


def _rgb(image: Image.Image, bits: int) -> Image.Image:
    mode = image.mode
    if mode == "P" and not image.getpalette():
        raise ImageError("corrupt", "pixels are places in a palette, and there is none")
    tags = getattr(image, "tag_v2", {})  # a TIFF's
    if 2 in tags.get(339, ()) and tags.get(258, (8,))[0] <= 16:
        raise ImageError("unsupported_mode", "samples are signed: save it with unsigned ones")
    if mode == "F":
        raise ImageError("unsupported_mode", "pixels are floats: save it with 8 or 16 bits")
    if mode.startswith("I"):
        return _wide_gray(image).convert("RGB")
    key = image.info.get("transparency")
    palette_alpha = mode == "P" and (
        key is not None or (image.palette is not None and image.palette.mode == "RGBA")
    )
    if mode == "La":
        image, mode = image.convert("LA"), "LA"
    if palette_alpha or mode in ("LA", "PA", "RGBa", "RGBA"):
        return _on_white(image.convert("RGBA"))
    if key is not None and mode in ("1", "L", "RGB"):
        return _clear_key(image, key, bits)
    if mode == "CMYK" and image.format in ("JPEG", "MPO") and "adobe" not in image.info:
        image = ImageChops.invert(image)  # Pillow takes every CMYK JPEG for Adobe's negative
    return image.convert("RGB") if mode != "RGB" else image


def _on_white(image: Image.Image) -> Image.Image:
    canvas = Image.new("RGB", image.size, "white")
    canvas.paste(image.convert("RGB"), mask=image.getchannel("A"))
    return canvas


def _sample_bits(tile: tuple | None) -> int:
    """Bits per sample in the file, from the raw mode ("L;2", "RGB;16B"); 8 when it has none."""
    found = re.search(r";(\d+)", tile[3]) if tile and isinstance(tile[3], str) else None
    return int(found[1]) if found else 8


def _clear_key(image: Image.Image, key: int | tuple, bits: int) -> Image.Image:
    """White where the pixel has the colour that stands for "transparent" (PNG's tRNS).

    The key has the file's bit depth, the pixels have 8 bits.
    """
    keys = np.array(key if isinstance(key, tuple) else (key,) * 3, dtype=np.int64)
    if image.mode != "1":  # Pillow gives the key of a 1-bit picture in 8 bits
        keys = keys >> 8 if bits == 16 else (keys & (1 << bits) - 1) * 255 // ((1 << bits) - 1)
    plain = image.copy()
    plain.info = {}  # or Pillow converts the key as well
    pixels = np.array(plain.convert("RGB"))
    pixels[(pixels == keys).all(axis=-1)] = 255
    return Image.fromarray(pixels)


def _wide_gray(image: Image.Image) -> Image.Image:
    """Gray of more than 8 bits, scaled so that white stays white."""
    values = np.asarray(image).astype(np.int32)
    tags = getattr(image, "tag_v2", {})  # a TIFF's
    in_16 = image.mode != "I" or image.format == "PPM"  # where Pillow scales to 16 bits itself
    bits = tags.get(258, (16 if in_16 else 32,))[0]
    top = int(values.max())
    if values.min() < 0 or top > 65535 or (bits > 16 and 0 < top < 256):
        raise ImageError(
            "unsupported_mode", "pixels are integers whose white is unknown: save it with 16 bits"
        )
    white = (1 << min(bits, 16)) - 1
    gray = values if tags.get(262) != 0 else white - values  # 0: white is zero
    gray = (gray * 255 + white // 2) // white
    if isinstance(key := image.info.get("transparency"), int):
        gray[values == key] = 255
    return Image.fromarray(gray.astype(np.uint8))
