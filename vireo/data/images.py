"""The only image decoder: every picture that a model sees, in training and rollout, is made here.

The rules (EXIF, alpha, 16 bits, frames, what is refused) are in docs/data.md.
"""

from __future__ import annotations

import os
import struct
from functools import cache
from typing import Any, BinaryIO

from PIL import Image, ImageFile

from vireo.data import formats, pixels
from vireo.data.conversation import ImageRef
from vireo.data.references import ImageError, as_row_error, image_name, open_reference
from vireo.errors import InputError

__all__ = ["MAX_PIXELS", "ImageError", "as_row_error", "fit_image", "image_size_from_header"]
__all__ += ["load_image", "resized"]

MAX_PIXELS = 178_956_970  # where Pillow itself refuses: 0.7 GB as RGB

Reference = ImageRef | str | os.PathLike | bytes | dict[str, Any] | Image.Image


def load_image(ref: Reference, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode one picture to upright RGB on white.

    `ref`: ImageRef, path, data URL, `file://` URL, encoded bytes, `{"bytes", "path"}` or a PIL
    image (its current frame). Raises ImageError whose reason is a class of docs/data.md and whose
    message names the file. Nothing is fetched; nothing is allocated for a picture of more than
    `max_pixels`.
    """
    value, name = _value(ref), image_name(ref)
    if isinstance(value, Image.Image):
        _check_size(value, name, max_pixels)
        return _decode(value, None, name)
    with open_reference(ref) as stream:
        image = _open(stream, name, max_pixels)
        result = _decode(image, stream, name)
        if image.format in formats.CUT_UNNOTICED and formats.ends_early(stream, image.format):
            raise ImageError("truncated", f"image {name} is truncated: it ends early")
    return result


def image_size_from_header(ref: Reference, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """(width, height) after the EXIF orientation; pixels are not decoded (an ICO's are)."""
    value, name = _value(ref), image_name(ref)
    if isinstance(value, Image.Image):
        return _upright_size(value)
    with open_reference(ref) as stream:
        image = _open(stream, name, max_pixels)
        if image.format == "PNG" and "exif" not in image.info:
            for kind, at, length in formats.png_chunks(stream):
                if kind == b"eXIf":  # behind the pixels, where opening does not look
                    stream.seek(at)
                    image.info["exif"] = stream.read(length)
        return _upright_size(image)


def fit_image(
    image: Image.Image,
    strategy: str,
    size: int | None,
    mean_colour: tuple[int, int, int] = (127, 127, 127),
) -> Image.Image:
    """Resize before the processor does, for models trained that way.

    `longest`: the longest side becomes `size`, the ratio stays and no side falls below 1.
    `pad_square`: centred on a square of `mean_colour` (0 to 255), then `size` x `size`.
    Bicubic. With size None, `longest` changes nothing and `pad_square` only pads.
    """
    if size is not None and size < 1:
        raise InputError(f"image size {size} is no size: expected at least 1 pixel")
    width, height = image.size
    longest = max(width, height)
    if strategy == "longest":
        if size is None or size == longest:
            return image
        target = max(1, round(width * size / longest)), max(1, round(height * size / longest))
        return image.resize(target, Image.Resampling.BICUBIC)
    if strategy == "pad_square":
        square = Image.new("RGB", (longest, longest), mean_colour)
        square.paste(image, ((longest - width) // 2, (longest - height) // 2))
        if size is None or size == longest:
            return square
        return square.resize((size, size), Image.Resampling.BICUBIC)
    raise InputError(f"image strategy {strategy!r} is unknown: expected 'longest' or 'pad_square'")


def resized(image: Image.Image, size: tuple[int, int], processor: Any) -> Image.Image:
    """The RGB picture at (width, height) `size`, by the code and the filter with which an image
    processor of transformers resizes: torchvision's on whole numbers, or Pillow's."""
    resample = Image.Resampling(processor.resample)
    if not hasattr(processor, "backend") or processor.backend != "torchvision":
        return image.resize(size, resample)
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional

    mode = InterpolationMode[resample.name]
    pixels = functional.pil_to_tensor(image)
    pixels = functional.resize(pixels, [size[1], size[0]], interpolation=mode, antialias=True)
    return functional.to_pil_image(pixels)


def _value(ref: Any) -> Any:
    return ref.value if isinstance(ref, ImageRef) else ref


@cache
def _plugins() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in formats.SUPPORTED if name in Image.OPEN)


def _open(stream: BinaryIO, name: str, max_pixels: int) -> Image.Image:
    """Read the header; format by content."""
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # other libraries switch it on for the whole process
    try:
        image = Image.open(stream, formats=_plugins())
    except Exception as error:
        raise _refusal(error, stream, name) from error
    _check_size(image, name, max_pixels)
    return image


def _check_size(image: Image.Image, name: str, max_pixels: int) -> None:
    width, height = image.size
    if not width * height:
        raise ImageError("corrupt", f"image {name} has no pixels: it is {width} x {height}")
    if width * height > max_pixels:
        raise ImageError(
            "too_large",
            f"image {name} is too large: {width} x {height} pixels, the limit is {max_pixels}",
        )


def _upright_size(image: Image.Image) -> tuple[int, int]:
    width, height = image.size
    return (height, width) if pixels.orientation(image) >= 5 else (width, height)


def _decode(image: Image.Image, stream: BinaryIO | None, name: str) -> Image.Image:
    try:
        return pixels.upright_rgb(image)
    except ImageError as error:
        raise ImageError(error.reason, f"image {name}: {error.message}") from error
    except Exception as error:
        raise _refusal(error, stream, name, image) from error


def _refusal(
    error: Exception, stream: BinaryIO | None, name: str, image: Image.Image | None = None
) -> ImageError:
    """What went wrong in Pillow, as one of our classes."""
    if isinstance(error, Image.DecompressionBombError | MemoryError):
        return ImageError("too_large", f"image {name} is too large: {error}")
    found = image.format if image else None
    if stream is not None and found is None:
        end = stream.seek(0, 2)
        stream.seek(0)
        head = stream.read(4096)
        stream.seek(max(0, end - 32))
        found = formats.sniff(head, stream.read())
        if found is None:
            text = f"image {name} is not an image: no format known that begins with {head[:24]!r}"
            return ImageError("not_an_image", text)
        if found not in _plugins():
            text = f"image {name} is {found}, an unsupported format: convert it to PNG or JPEG"
            return ImageError("unsupported_format", text)
        if found == "AVIF" and formats.avif_pixels(head) > MAX_PIXELS:
            return ImageError(
                "too_large", f"image {name} is too large: more than {MAX_PIXELS} pixels"
            )
        error = _plugin_error(stream, found) or error
    reason = _reason(error)
    if reason != "truncated" and stream is not None and formats.ends_early(stream, found):
        reason = "truncated"
    text = str(error)[:200]
    if text == "not identified by this driver":  # Pillow's words for it
        text = "its header has no pixels, or pixels of no known kind"
    return ImageError(reason, f"image {name} is {_WORDS[reason]}: {text}")


_WORDS = {
    "truncated": "truncated",
    "corrupt": "corrupt",
    "unsupported_mode": "of an unsupported mode",
}


def _plugin_error(stream: BinaryIO, found: str) -> Exception | None:
    """Why the format's own plugin says no; `Image.open` keeps that to itself."""
    stream.seek(0)
    try:
        Image.OPEN[found][0](stream, "")
    except Exception as error:
        return error
    return None


def _reason(error: Exception) -> str:
    text = str(error).lower()
    if isinstance(error.__cause__ or error, struct.error | EOFError | IndexError):
        return "truncated"
    if any(
        words in text
        for words in ("truncat", "not enough", "not large enough", "only got", "reached eof")
    ):
        return "truncated"
    if any(words in text for words in ("pixel mode", "cannot handle", "unsupported")):
        return "unsupported_mode"
    return "corrupt"
