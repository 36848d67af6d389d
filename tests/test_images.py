"""The image decoder: pixels that must come out right, and files that must be refused by class."""

from __future__ import annotations

import io
import re
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.pictures import FINE, encoded, near, raw_png, refused, scene, tiff
from vireo.data.images import (
    fit_image,
    image_size_from_header,
    load_image,
)
from vireo.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def exif(orientation, kind: int | None = None) -> bytes:
    """An EXIF block with one entry: the orientation, as a short unless `kind` says otherwise."""
    head = b"Exif\0\0MM\0*" + struct.pack(">IH", 8, 1)
    return head + struct.pack(">HHIHH", 274, kind or 3, 1, orientation, 0) + bytes(4)


# -- orientation ---------------------------------------------------------------------------------

TURN = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: a[::-1].transpose(1, 0, 2),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: a[:, ::-1].transpose(1, 0, 2),
}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "PNG late"])
def test_exif_orientation_is_baked_in(kind, orientation):
    if kind == "TIFF":
        data = encoded(scene(), kind, tiffinfo={274: orientation})
    elif kind == "PNG late":
        plain = encoded(scene(), "PNG")
        block = b"eXIf" + exif(orientation)[6:]
        chunk = struct.pack(">I", len(block) - 4) + block + struct.pack(">I", zlib.crc32(block))
        data = plain[:-12] + chunk + plain[-12:]
    else:
        options = {"WEBP": {"lossless": True}, "AVIF": {"quality": 95}, "JPEG": FINE}
        data = encoded(scene(), kind, exif=exif(orientation), **options.get(kind, {}))
    wanted = TURN[orientation](np.asarray(scene()))
    assert near(load_image(data), wanted, 8)
    assert image_size_from_header(data) == wanted.shape[1::-1]


@pytest.mark.parametrize(
    "block",
    [exif(0), exif(9), exif(65535), exif(6, kind=77), exif(6)[:14], b"Exif\0\0" + b"\xff" * 40],
    ids=["0", "9", "65535", "odd type", "cut", "garbage"],
)
def test_an_illegal_orientation_counts_as_upright(block):
    plain = encoded(scene(), "JPEG", **FINE)
    segment = b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block
    data = plain[:2] + segment + plain[2:]
    assert near(load_image(data), scene(), 8)
    assert image_size_from_header(data) == scene().size


def test_a_pil_image_is_turned_and_left_as_it_was():
    image = Image.open(io.BytesIO(encoded(scene(), "JPEG", exif=exif(6))))
    image.load()
    assert load_image(image).size == image_size_from_header(image) == (16, 24)
    assert image.size == (24, 16)


# -- pixel types ---------------------------------------------------------------------------------


def ramp(top: int, kind=np.uint16) -> np.ndarray:
    return np.linspace(0, top, 64).astype(kind)[None].repeat(4, 0)


def gray(values) -> np.ndarray:
    return np.stack([np.asarray(values)] * 3, axis=-1)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM", "JPEG2000", "PIL"])
def test_16_bit_gray_is_scaled_not_clipped(kind):
    image = Image.fromarray(ramp(65535))
    data = image if kind == "PIL" else encoded(image, kind)
    assert near(load_image(data), gray(ramp(65535) / 257), 1)


@pytest.mark.parametrize(
    "data",
    [
        tiff((16,), ramp(65535).tobytes(), 64, 4, t262=1),
        tiff((16,), (65535 - ramp(65535)).tobytes(), 64, 4, t262=0),
        encoded(Image.fromarray(ramp(65535, np.int32)), "TIFF"),
        b"P5 64 4 65535\n" + ramp(65535).astype(">u2").tobytes(),
        b"P5 64 4 1000\n" + ramp(1000).astype(">u2").tobytes(),
        raw_png(16, 2, [ramp(65535)[0].repeat(3).astype(">u2").tobytes()] * 4, 64),
    ],
    ids=["tiff", "white is zero", "32-bit tiff", "pgm", "pgm of 1000", "rgb png"],
)
def test_wide_samples_reach_white(data):
    assert near(load_image(data), gray(ramp(65535) / 257), 1)


def test_big_endian_16_bit_image():
    image = Image.frombytes("I;16B", (64, 4), ramp(65535).astype(">u2").tobytes())
    assert near(load_image(image), gray(ramp(65535) / 257), 1)


def test_pil_images_of_32_bits_need_a_white():
    """Of the numbers 0 to 255 in 32 bits no one knows whether they are dark or 8-bit gray."""
    assert near(load_image(Image.fromarray(ramp(65535, np.int32))), gray(ramp(65535) / 257), 1)
    assert refused(Image.fromarray(ramp(255, np.int32))).reason == "unsupported_mode"
    dark = b"P5 64 4 65535\n" + ramp(255).astype(">u2").tobytes()
    assert near(load_image(dark), gray(ramp(255) / 257), 1)


def test_12_bit_tiff_reaches_white():
    pairs = [(0, 4095), (2048, 1024)]
    row = b"".join(bytes([a >> 4, (a & 15) << 4 | b >> 8, b & 255]) for a, b in pairs)
    got = load_image(tiff((12,), row, 4, 1, t262=1))
    assert near(got, gray([[0, 255, 128, 64]]), 1)


@pytest.mark.parametrize(
    "data",
    [
        encoded(Image.fromarray(ramp(1, np.float32)), "TIFF"),
        encoded(Image.fromarray(ramp(255, np.int32)), "TIFF"),
        encoded(Image.fromarray(ramp(2_000_000, np.int32)), "TIFF"),
        encoded(Image.fromarray(ramp(1000, np.int32) - 500), "TIFF"),
        tiff((16,), ramp(4095).tobytes(), 64, 4, t262=1, t339=2),
        tiff((8,), bytes(256), 64, 4, t262=1, t339=2),
        tiff((16, 16), ramp(4095).repeat(2).tobytes(), 64, 4, t262=1),
        b"Pf\n64 4\n-1.0\n" + ramp(1, np.float32).tobytes(),
    ],
    ids=[
        "float",
        "32 bits of 255",
        "beyond 16 bits",
        "negative",
        "signed 16",
        "signed 8",
        "2 samples",
        "pfm",
    ],
)
def test_pixels_of_unknown_white_are_refused(data):
    assert refused(data).reason == "unsupported_mode"


@pytest.mark.parametrize("mode", ["LA", "RGBA", "La", "RGBa", "PA"])
def test_alpha_lies_on_white(mode):
    alpha = Image.fromarray(np.linspace(0, 255, 24).astype(np.uint8)[None].repeat(16, 0))
    image = scene().convert("RGBA")
    image.putalpha(alpha)
    image = image.convert("LA") if mode in ("LA", "La") else image
    base = np.asarray(image.convert("RGBA")).astype(float)
    wanted = base[..., :3] * base[..., 3:] / 255 + 255 - base[..., 3:]
    tolerance = 40 if mode == "PA" else 3  # 256 colours
    if mode != image.mode:
        image = image.convert(mode)
    assert near(load_image(image), np.round(wanted), tolerance)


def test_16_bit_alpha_lies_on_white():
    v, a = np.array([[0, 65535, 30000, 65535]]), np.array([[0, 0, 65535, 32768]])
    la = raw_png(16, 4, [np.stack([v, a], -1).astype(">u2").tobytes()], 4)
    rgba = raw_png(16, 6, [np.stack([v, v, v, a], -1).astype(">u2").tobytes()], 4)
    assert near(load_image(la), gray([[255, 255, 117, 255]]), 1)
    assert near(load_image(rgba), gray([[255, 255, 117, 255]]), 1)


@pytest.mark.parametrize(
    ("depth", "colour", "row", "key", "wanted"),
    [
        (1, 0, b"\x50", b"\0\0", [255, 255, 255, 255]),
        (1, 0, b"\x50", b"\0\1", [0, 255, 0, 255]),
        (2, 0, b"\x1b", b"\0\1", [0, 255, 170, 255]),
        (4, 0, b"\x05\xaf", b"\0\5", [0, 255, 170, 255]),
        (8, 0, b"\0\7\x08\xff", b"\0\7", [0, 255, 8, 255]),
        (16, 0, b"\x20\x00\x20\x01\x20\x02\xff\xff", b"\x20\x01", [32, 255, 32, 255]),
        (8, 2, b"\1\1\1\7\7\7\7\7\x08\0\0\0", b"\0\7\0\7\0\7", [1, 255, None, 0]),
        (16, 2, b"\1\1" * 3 + b"\7\7" * 3 + b"\0\0" * 6, b"\7\7" * 3, [1, 255, 0, 0]),
    ],
    ids=["1 bit, 0", "1 bit, 1", "2 bits", "4 bits", "8 bits", "16 bits", "rgb", "rgb 16"],
)
def test_a_colour_key_is_white(depth, colour, row, key, wanted):
    got = np.asarray(load_image(raw_png(depth, colour, [row], 4, (b"tRNS", key))))[0]
    for pixel, value in zip(got.tolist(), wanted):
        assert pixel == ([7, 7, 8] if value is None else [value] * 3)


@pytest.mark.parametrize("alphas", [b"\xff\0", b"\xff\x80\0"], ids=["one index", "table"])
def test_palette_transparency_is_white(alphas):
    palette = b"\x0a\x0a\x0a\x14\x14\x14\x1e\x1e\x1e"
    chunks = (b"PLTE", palette), (b"tRNS", alphas)
    got = load_image(raw_png(8, 3, [b"\0\1\2"], 3, *chunks))
    middle = 255 if alphas[1] == 0 else 137
    assert near(got, gray([[10, middle, 30 if len(alphas) == 2 else 255]]), 1)


def test_a_palette_picture_without_a_palette_is_corrupt():
    """Its indices say nothing; Pillow would draw it black."""
    assert refused(raw_png(8, 3, [b"\0\1"], 2)).reason == "corrupt"
    assert refused(Image.new("P", (2, 1))).reason == "corrupt"


def test_palette_with_alpha_of_its_own():
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 255, 40, 50, 60, 0], "RGBA")
    image.putdata([0, 1])
    assert near(load_image(image), [[[10, 20, 30], [255, 255, 255]]])


def cmyk() -> tuple[Image.Image, np.ndarray]:
    inks = np.asarray(scene().convert("RGBA")).copy()
    inks[..., 3] = np.linspace(0, 200, 24)
    c = inks.astype(float)
    return Image.fromarray(inks, "CMYK"), (255 - c[..., :3]) * (255 - c[..., 3:]) / 255


def test_cmyk_of_adobe_and_of_others():
    image, wanted = cmyk()
    adobe = encoded(image, "JPEG", **FINE)
    assert near(load_image(adobe), np.round(wanted), 10)
    marker = re.search(rb"\xff\xee\0\x0eAdobe.{7}", adobe, re.DOTALL)
    plain = adobe[: marker.start()] + adobe[marker.end() :]  # now the stored values are the inks
    inks = 255 - np.asarray(image).astype(float)
    stored = (255 - inks[..., :3]) * (255 - inks[..., 3:]) / 255
    assert near(load_image(plain), np.round(stored), 10)
    assert near(load_image(encoded(image, "TIFF")), np.round(wanted), 2)


def test_ycck_of_adobe():
    """As CMYK, but its first three planes are the YCbCr of 255 - ink, turned over."""
    image, wanted = cmyk()
    inks = np.asarray(image)
    planes = Image.fromarray(inks[..., :3]).convert("YCbCr")
    stored = np.concatenate([np.asarray(planes), 255 - inks[..., 3:]], axis=-1)
    data = bytearray(encoded(Image.fromarray(255 - stored, "CMYK"), "JPEG", **FINE))
    data[data.index(b"Adobe") + 11] = 2  # the colour transform
    assert near(load_image(bytes(data)), np.round(wanted), 12)


def test_other_colour_spaces():
    ycc = np.asarray(scene().convert("YCbCr"))
    assert near(load_image(tiff((8, 8, 8), ycc.tobytes(), 24, 16, t262=6)), scene(), 3)
    assert near(load_image(scene().convert("HSV")), scene(), 8)
    lab = load_image(Image.new("LAB", (2, 2), (255, 128, 128)))
    assert near(lab, np.full((2, 2, 3), 255), 4)
    assert near(load_image(Image.new("1", (2, 1), 1)), np.full((1, 2, 3), 255))


# -- frames --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF", "AVIF", "MPO"])
def test_the_first_frame_counts(kind):
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert near(load_image(data), frames[0], 4)


def animated_webp(frame: Image.Image, x: int, y: int) -> bytes:
    """One frame at a place on a transparent canvas of 16 x 16, whose background is said blue."""
    still = encoded(frame, "WEBP", lossless=True)
    start = still.index(b"VP8L")
    pixels = still[start : start + 8 + int.from_bytes(still[start + 4 : start + 8], "little")]
    numbers = (x // 2, y // 2, frame.width - 1, frame.height - 1, 100)
    shown = b"".join(n.to_bytes(3, "little") for n in numbers) + b"\0" + pixels
    shown += b"\0" * (len(shown) % 2)
    body = b"WEBPVP8X" + struct.pack("<IB", 10, 0x12) + bytes(3) + (15).to_bytes(3, "little") * 2
    body += b"ANIM" + struct.pack("<IIH", 6, 0xFFFF0000, 0)
    body += (b"ANMF" + struct.pack("<I", len(shown)) + shown) * 2
    return b"RIFF" + struct.pack("<I", len(body)) + body


def test_a_webp_frame_smaller_than_its_canvas_lies_on_white():
    wanted = np.full((16, 16, 3), 255)
    wanted[4:8, 2:6] = [255, 0, 0]
    assert near(load_image(animated_webp(Image.new("RGBA", (4, 4), "red"), 2, 4)), wanted)


@pytest.mark.parametrize("kind", ["GIF", "PNG"])
@pytest.mark.parametrize("disposal", [0, 1, 2])
def test_a_transparent_first_frame_lies_on_white(kind, disposal):
    first = Image.new("RGBA", (8, 8))
    first.paste((255, 0, 0, 255), (2, 2, 4, 4))
    later = [Image.new("RGBA", (8, 8), "lime")]
    data = encoded(first, kind, save_all=True, append_images=later, disposal=disposal)
    wanted = np.full((8, 8, 3), 255)
    wanted[2:4, 2:4] = [255, 0, 0]
    assert near(load_image(data), wanted)


def test_a_gif_frame_smaller_than_its_canvas_lies_on_white():
    patch = Image.new("P", (4, 4), 1)
    patch.putpalette([0, 0, 0, 255, 0, 0])
    data = bytearray(encoded(patch, "GIF"))
    data[6:10] = struct.pack("<HH", 8, 6)  # the canvas
    at = data.index(b",\0\0\0\0")
    data[at + 1 : at + 5] = struct.pack("<HH", 2, 1)  # where the frame lies in it
    wanted = np.full((6, 8, 3), 255)
    wanted[1:5, 2:6] = [255, 0, 0]
    assert near(load_image(bytes(data)), wanted)


def test_the_largest_picture_of_an_icon():
    big, small = Image.new("RGBA", (48, 48), "red"), Image.new("RGBA", (16, 16), "blue")
    data = encoded(small, "ICO", append_images=[big], sizes=[(16, 16), (48, 48)])
    data = encoded(big, "ICO", append_images=[small], sizes=[(16, 16), (48, 48)])
    assert near(load_image(data), big.convert("RGB"))


def test_colour_profiles_and_gamma_are_ignored():
    assert near(load_image(encoded(scene(), "PNG", icc_profile=b"broken")), scene())
    assert near(load_image(encoded(scene(), "JPEG", icc_profile=b"broken", **FINE)), scene(), 8)


# -- resizing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "target", "wanted"),
    [
        ((30, 10), 15, (15, 5)),
        ((10, 30), 60, (20, 60)),
        ((2000, 3), 10, (10, 1)),
        ((8, 8), 4, (4, 4)),
    ],
)
def test_the_longest_side_gets_the_size(size, target, wanted):
    assert fit_image(Image.new("RGB", size), "longest", target).size == wanted


def test_padding_to_a_square_is_centred():
    got = fit_image(Image.new("RGB", (4, 2), "red"), "pad_square", None, (1, 2, 3))
    wanted = np.full((4, 4, 3), [1, 2, 3])
    wanted[1:3] = [255, 0, 0]
    assert near(got, wanted)
    assert fit_image(Image.new("RGB", (4, 2)), "pad_square", 7, (1, 2, 3)).size == (7, 7)


def test_no_size_leaves_the_picture_alone():
    image = scene()
    assert fit_image(image, "longest", None) is image
    for arguments in (("longest", 0), ("stretch", 5)):
        with pytest.raises(InputError):
            fit_image(image, *arguments)
