"""Image files and references: what is refused by which class, and what nothing may touch."""

from __future__ import annotations

import base64
import errno
import io
import os
import pickle
import socket
import struct
import unicodedata
import urllib.parse

import numpy as np
import pytest
from PIL import Image, ImageFile, PngImagePlugin

from tests.pictures import FINE, encoded, near, raw_png, refused, scene, tiff
from vireo.data.conversation import ImageRef
from vireo.data.images import ImageError, as_row_error, image_size_from_header, load_image
from vireo.errors import InputError, RowError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


# -- what is refused -----------------------------------------------------------------------------

WHOLE = {
    "JPEG": {"quality": 95},
    "JPEG progressive": {"progressive": True},
    "PNG": {},
    "GIF": {},
    "WEBP": {},
    "WEBP lossless": {"lossless": True},
    "TIFF": {},
    "TIFF lzw": {"compression": "tiff_lzw"},
    "BMP": {},
    "PPM": {},
    "AVIF": {},
    "JPEG2000": {},
    "QOI": {},
    "ICO": {"sizes": [(32, 32)]},
    "ICO bmp": {"sizes": [(32, 32)], "bitmap_format": "bmp"},
    "TIFF big": {"big_tiff": True},
}


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("part", [0.95, 0.5, 0.2])
def test_a_file_cut_short_is_truncated(kind, part):
    noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), kind.split()[0], **WHOLE[kind])
    assert load_image(data).size in ((40, 40), (32, 32))
    assert refused(data[: int(len(data) * part)]).reason == "truncated"


@pytest.mark.parametrize("kind", WHOLE)
def test_a_file_cut_anywhere_is_refused(kind):
    """Cut in a header, it may be no image; behind that, it ends early."""
    data = encoded(scene(40, 36), kind.split()[0], **WHOLE[kind])
    end = len(data) - (kind == "GIF")  # its end mark alone may be missing
    for size in range(1, end, 1 + len(data) // 150):
        reason = refused(data[:size]).reason
        assert reason == "truncated" or (reason == "not_an_image" and size < 12), size


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "BMP", "AVIF", "QOI", "ICO"])
def test_a_missing_last_byte_is_truncated(kind):
    assert refused(encoded(scene(), kind)[:-1]).reason == "truncated"


def test_png_without_its_end_is_truncated():
    assert refused(encoded(scene(), "PNG")[:-12]).reason == "truncated"


def test_an_animation_cut_in_a_later_frame_is_truncated():
    frames = [Image.effect_noise((32, 32), 80) for _ in range(3)]
    for kind in ("GIF", "PNG", "WEBP", "TIFF"):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
        assert refused(data[: len(data) * 3 // 4]).reason == "truncated"


def test_truncated_files_are_refused_even_where_another_library_allows_them(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    data = encoded(scene(), "JPEG")
    assert refused(data[: len(data) // 2]).reason == "truncated"


@pytest.mark.parametrize(
    "data",
    [
        b"\x89PNG\r\n\x1a\n" + b"\xff" * 40,
        b"\x89PNG\n\x1a\n" + encoded(scene(), "PNG")[8:],
        encoded(scene(), "PNG")[:60] + bytes(30) + encoded(scene(), "PNG")[90:],
        raw_png(8, 5, [b"\0\0"], 2),
    ],
    ids=["chunks", "line ends changed", "zeros inside", "colour type"],
)
def test_damaged_data_is_corrupt(data):
    assert refused(data).reason in ("corrupt", "truncated")


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP", "QOI", "PPM"])
def test_a_picture_without_pixels_is_corrupt(kind):
    bmp = encoded(scene(), "BMP")
    data = {
        "PNG": raw_png(8, 2, [], 5),
        "TIFF": tiff((8,), b"", 0, 3, t262=1),
        "BMP": bmp[:18] + bytes(4) + bmp[22:],
        "QOI": b"qoif" + bytes(8) + b"\3\0" + bytes(7) + b"\1",
        "PPM": b"P6 0 4 255\n",
    }[kind]
    error = refused(data)
    assert error.reason == "corrupt"
    assert "no pixels" in str(error)


def test_a_pil_image_without_pixels_is_corrupt():
    for size in ((0, 5), (5, 0), (0, 0)):
        error = refused(Image.new("RGB", size))
        assert error.reason == "corrupt"
        assert f"{size[0]} x {size[1]}" in str(error)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
        (b'<?xml version="1.0"?>\n<!-- drawn -->\n<svg width="1"/>', "SVG"),
        (b"%PDF-1.7\n%\xe2\xe3", "PDF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n", "EPS"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(40), "HEIC"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic" + bytes(40), "HEI"),
        (b"8BPS\0\1" + bytes(40), "Photoshop"),
        (b"\xff\x0a" + bytes(20), "JPEG XL"),
        (encoded(scene(), "TGA"), "TGA"),
        (encoded(scene(), "TGA")[:-26], "TGA"),
        (encoded(scene(), "DDS"), "DDS"),
        (encoded(scene(), "PCX"), "PCX"),
        (b"\0\0\2\0" + encoded(scene(), "ICO")[4:], "CUR"),
        (b"P7\nWIDTH 1\nHEIGHT 1\nDEPTH 1\nMAXVAL 255\nENDHDR\n\0", "PAM"),
        (b"PF\n4 1\n-1.0\n" + bytes(48), "PFM"),
        (b"gimp xcf v011\0" + bytes(20), "XCF"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_known_but_unsupported_formats_are_named(data, name):
    error = refused(data)
    assert error.reason == "unsupported_format"
    assert name in str(error)


@pytest.mark.parametrize(
    "data",
    [
        b"BMW makes cars, and this is text of some length, longer than a header",
        b"P5 is a file format, they say, and this is text",
        b"GIVEN",
        b"<!DOCTYPE html><html><svg></svg></html>",
        b"<?xml version='1.0'?><rss></rss>",
        b"id,image\n1,a.png\n",
        bytes(3000),
        bytes.fromhex("a31f0c7be2558d04") + b"noise",
        b"RIFF\x10\0\0\0WAVEfmt ",
        b"\0\0\0\x18ftypisom" + bytes(40),
        b"x",
    ],
)
def test_other_data_is_not_an_image(data):
    assert refused(data).reason == "not_an_image"


def bomb(kind: str) -> bytes:
    """A small file whose header claims 60000 x 60000 pixels (WebP: its most, 16383 squared)."""
    huge = 60000
    if kind == "PNG":
        return raw_png(8, 2, [b"\0\0\0"], huge, height=huge)
    data = bytearray(encoded(scene(), kind))
    if kind == "GIF":
        data[6:10] = struct.pack("<HH", huge, huge)
    elif kind == "BMP":
        data[18:26] = struct.pack("<ii", huge, huge)
    elif kind == "JPEG":
        at = data.index(b"\xff\xc0")
        data[at + 5 : at + 9] = struct.pack(">HH", huge, huge)
    elif kind == "PPM":
        return b"P6 60000 60000 255\n" + bytes(30)
    elif kind == "TIFF":
        return tiff((8, 8, 8), bytes(30), huge, huge, t262=2)
    elif kind == "JPEG2000":
        at = data.index(b"ihdr")
        data[at + 4 : at + 12] = struct.pack(">II", huge, huge)
    elif kind == "AVIF":
        at = data.index(b"ispe")
        data[at + 8 : at + 16] = struct.pack(">II", huge, huge)
    elif kind == "ICO":
        inner = bomb("PNG")
        entry = struct.pack("<BBBBHHII", 0, 0, 0, 0, 1, 32, len(inner), 22)
        return b"\0\0\1\0\1\0" + entry + inner
    elif kind == "WEBP":
        head = b"VP8X" + struct.pack("<II", 10, 0) + (16382).to_bytes(3, "little") * 2
        body = b"WEBP" + head + bytes(data[12:])
        return b"RIFF" + struct.pack("<I", len(body)) + body
    return bytes(data)


@pytest.mark.parametrize(
    "kind",
    [*("PNG", "GIF", "BMP", "JPEG", "PPM", "TIFF", "JPEG2000"), *("AVIF", "ICO", "WEBP")],
)
def test_bombs_are_refused_by_their_header(kind):
    data = bomb(kind)
    error = refused(data)
    assert error.reason == "too_large"
    with pytest.raises(ImageError):
        image_size_from_header(data)


def test_the_pixel_limit_is_a_setting():
    data = encoded(scene(), "PNG")
    assert load_image(data, max_pixels=24 * 16).size == (24, 16)
    assert refused(data, max_pixels=24 * 16 - 1).reason == "too_large"
    assert refused(scene(), max_pixels=10).reason == "too_large"


# -- references ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    scene().save(root / "a.png")
    scene().save(tmp_path / "outside.png")
    return root


def test_every_form_of_reference(folder):
    data = (folder / "a.png").read_bytes()
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    forms = [
        str(folder / "a.png"),
        folder / "a.png",
        f"file://{folder}/a.png",
        f"file://localhost{folder}/a.png",
        data,
        bytearray(data),
        {"bytes": data, "path": "anything"},
        {"bytes": None, "path": str(folder / "a.png")},
        {"path": str(folder / "a.png")},
        url,
        url.replace("data:", "DATA:").rstrip("="),
        "\n " + url + "\r\n",
        url.replace("+", "-").replace("/", "_").replace("image_", "image/"),
        url.replace(";base64,", "; Base64 , "),
        url.replace(";base64", ";base64;name=a.png"),
        url.replace("image/png;", ""),
        url.replace("data:image/png;base64", "data:base64"),
        "data:image/png," + urllib.parse.quote_from_bytes(data),
        "data:," + "".join(f"%{byte:02x}" for byte in data),
        f" file://{folder}/a.png\n",
        f"file:{folder}/a.png",
        f"file:///{folder}/a.png",
        memoryview(data),
        url.replace("+", "%2B").replace("/", "%2F").replace("data:image%2F", "data:image/"),
        "data:image/jpeg;charset=x;base64,\n" + base64.encodebytes(data).decode(),
        scene(),
        ImageRef("a.png", str(folder)),
        ImageRef({"path": "a.png", "bytes": None}, str(folder)),
        ImageRef("./x/../a.png", str(folder)),
        ImageRef(str(folder / "a.png"), str(folder) + "/"),
        ImageRef("//" + str(folder / "a.png"), str(folder)),
        ImageRef("a.png", os.path.relpath(folder)),
    ]
    for form in forms:
        assert near(load_image(form), scene()), form
        assert image_size_from_header(form) == (24, 16)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 17, 3.5, [], ["a.png"], ("a.png",), {}, {"bytes": None}, {"url": "x"}),
        *({"bytes": "iVBORw0KGgo="}, {"bytes": [137, 80]}, {"path": 7}, io.BytesIO(b"x"), object()),
        *(np.zeros((4, 4, 3), np.uint8), np.zeros((4, 4), np.float32), np.float64(3)),
        *([[[0, 0, 0]]], [b"x"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_no_image(value):
    assert refused(value).reason == "bad_image_value"


@pytest.mark.parametrize(
    "url", ["data:image/png;base64", "data:image/png;base64,*!*", "data:;base64,A", "data:x,text"]
)
def test_broken_data_urls(url):
    assert refused(url).reason in ("corrupt", "not_an_image")
    assert refused("data:image/png;base64,").reason == "empty_file"


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1:9/a.png", "HTTPS://127.0.0.1:9/a.png", "ftp://127.0.0.1:9/a.png"),
        *("s3://bucket/a.png", "file://127.0.0.1/a.png", "hf://datasets/a/b.png"),
        *(" http://127.0.0.1:9/a.png", "\thttp://127.0.0.1:9/\n", "file://a.png"),
    ],
)
def test_nothing_is_fetched(url, monkeypatch, folder):
    def never(*args, **kwargs):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", never)
    monkeypatch.setattr(socket, "getaddrinfo", never)
    assert refused(url).reason == "remote_image"
    assert refused(ImageRef(url, str(folder))).reason == "remote_image"


@pytest.mark.parametrize(
    "value",
    [
        *("../outside.png", "x/../../outside.png", "/etc/hostname", "file:///etc/hostname"),
        *("//a.png", "..", "./../outside.png", "file:///%2e%2e/outside.png", "file:/etc/hostname"),
    ],
)
def test_paths_that_leave_the_root(folder, value):
    for form in (value, {"path": value}):
        error = refused(ImageRef(form, str(folder)))
        assert error.reason == "outside_root"
        assert value in str(error)


def test_a_sibling_with_the_roots_name_as_prefix_is_outside(folder):
    (folder.parent / "root2").mkdir()
    scene().save(folder.parent / "root2" / "a.png")
    assert refused(ImageRef("../root2/a.png", str(folder))).reason == "outside_root"
    assert near(load_image(ImageRef(str(folder / "a.png"), "/")), scene())


def test_a_link_counts_where_it_lies(folder):
    (folder / "link.png").symlink_to(folder.parent / "outside.png")
    (folder / "pictures").symlink_to(folder.parent)
    (folder.parent / "root link").symlink_to(folder)
    assert near(load_image(ImageRef("link.png", str(folder))), scene())
    assert near(load_image(ImageRef("pictures/outside.png", str(folder))), scene())
    # What was checked is what is opened: `..` is taken from the text, not from the link's target.
    assert near(load_image(ImageRef("pictures/../a.png", str(folder))), scene())
    linked_root = str(folder.parent / "root link")
    assert near(load_image(ImageRef(str(folder / "a.png"), linked_root)), scene())


def test_files_that_cannot_be_read(folder, monkeypatch):
    def reason(name: str) -> str:
        error = refused(ImageRef(name, str(folder)))
        assert name[:40] in str(error)
        assert len(str(error)) < 1000
        return error.reason

    (folder / "dangling.png").symlink_to("nowhere.png")
    (folder / "loop.png").symlink_to("loop.png")
    (folder / "empty.png").touch()
    (folder / "dir.png").mkdir()
    os.mkfifo(folder / "pipe.png")
    assert reason("gone.png") == "not_found"
    assert reason("a.png/b.png") == "not_found"
    assert reason("dangling.png") == "not_found"
    assert reason("loop.png") == "not_found"
    assert reason("x" * 300 + ".png") == "not_found"
    assert reason("x/" * 4000 + ".png") == "not_found"
    assert reason("dir.png") == "is_directory"
    assert reason("empty.png") == "empty_file"
    assert reason("pipe.png") == "unreadable"
    with socket.socket(socket.AF_UNIX) as listener, monkeypatch.context() as patch:
        patch.chdir(folder)  # a socket's path must be short
        listener.bind("socket.png")
        assert reason("socket.png") == "unreadable"
    for odd in ("a.png ", " a.png", "a.png\n", "A.PNG", "%2e%2e/outside.png", "..\\outside.png"):
        assert refused(ImageRef(odd, str(folder))).reason == "not_found"
    for odd in ("\uff0e\uff0e/outside.png", "\u2025/outside.png", "~/a.png", "$HOME/a.png"):
        assert refused(ImageRef(odd, str(folder))).reason == "not_found"
    assert refused(ImageRef("", str(folder))).reason == "not_found"
    assert refused("/dev/zero").reason == "unreadable"
    assert refused("").reason == "not_found"
    assert refused("nul\0.png").reason == "not_found"
    assert refused("half\ud800.png").reason == "not_found"

    def no(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("builtins.open", no)
    assert reason("a.png") == "unreadable"


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_names_are_taken_byte_for_byte(tmp_path, form):
    names = [
        "é ü 雪🐱.png",
        "100%25.png",
        "#?&.png",
        "a\tb\nc.png",
        "star[1]*.png",
        "back\\slash.png",
    ]
    for name in [unicodedata.normalize(form, name) for name in names]:
        scene().save(tmp_path / name, "PNG")
        assert near(load_image(ImageRef(name, str(tmp_path))), scene())
    scene().save(tmp_path / "a b%.png")
    assert near(load_image(f"file://{tmp_path}/a%20b%25.png"), scene())
    scene().save(os.fsencode(tmp_path) + b"/no utf-8 \xff.png", "PNG")
    assert near(load_image(f"file://{tmp_path}/no%20utf-8%20%ff.png"), scene())


def test_the_content_decides_not_the_name(folder):
    (folder / "b.png").write_bytes(encoded(scene(), "JPEG", **FINE) + b"more data behind it")
    (folder / "c.txt").write_bytes(encoded(scene(), "WEBP", lossless=True))
    assert near(load_image(folder / "b.png"), scene(), 8)
    assert near(load_image(folder / "c.txt"), scene())


def test_the_header_is_enough_for_the_size(monkeypatch):
    def never(self):
        raise AssertionError("pixels were decoded")

    for kind in ("PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP", "AVIF"):
        data = encoded(scene(), kind)
        with monkeypatch.context() as patch:
            for plugin in (ImageFile.ImageFile, PngImagePlugin.PngImageFile):
                patch.setattr(plugin, "load", never)
            assert image_size_from_header(data) == (24, 16)


# -- errors of rows --------------------------------------------------------------------------------


def test_errors_cross_processes_and_speak_a_rows_words(folder):
    error = pickle.loads(pickle.dumps(refused(ImageRef("gone.png", str(folder)))))
    assert isinstance(error, ImageError)
    assert isinstance(error, InputError)
    row = as_row_error(error, "train.json row 3")
    assert type(row) is RowError
    assert str(row).startswith("train.json row 3: image 'gone.png' is not found")
    words = {
        "not_found": "missing_image",
        "outside_root": "outside_root",
        "remote_image": "remote_image",
        "truncated": "bad_image",
        "too_large": "bad_image",
        "bad_image_value": "bad_image_value",
    }
    for reason, word in words.items():
        assert as_row_error(ImageError(reason, "x")).reason == word


def test_messages_stay_short():
    assert len(str(refused({"bytes": os.urandom(100_000)[:0] + b"x" * 100_000}))) < 300
    assert len(str(refused("data:image/png;base64," + "A" * 100_000))) < 300
