"""Where an image reference leads: bytes in memory or a file of this machine. The network is asked
by `fetched` alone, which nothing calls that a person did not allow it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import errno
import io
import os
import re
import stat
from typing import Any, BinaryIO
from urllib.parse import unquote, unquote_to_bytes

from vireo.data.conversation import ImageRef
from vireo.errors import RowError, first_line

# An image's reason, as a row of a data file states it; every other one is `bad_image`.
ROW_REASONS = {
    "not_found": "missing_image",
    "is_directory": "missing_image",
    "remote_image": "remote_image",
    "outside_root": "outside_root",
    "bad_image_value": "bad_image_value",
}
# White space before a URL belongs to nothing; before a file's name it is part of the name.
_SCHEME = re.compile(r"\s*(?:([a-z][a-z0-9+.-]*)://|(file):(?=/))", re.IGNORECASE)
_DATA = re.compile(r"\s*data:", re.IGNORECASE)
_WEB = re.compile(r"\s*https?://", re.IGNORECASE)
_MOST_FETCHED = 64 << 20  # bytes
_FETCH_S = 30.0


class ImageError(RowError):
    """One image is refused; `reason` is its class in docs/data.md, the message names the file."""


def as_row_error(error: ImageError, where: str = "") -> RowError:
    """The error in the words of a data file's row (`not_found` becomes `missing_image`, ...)."""
    reason = ROW_REASONS.get(error.reason, "bad_image")
    return RowError(reason, error.message, error.where or where)


def image_name(value: Any) -> str:
    """How messages call an image: its path as the file has it, never its bytes."""
    if isinstance(value, ImageRef):
        return image_name(value.value)
    if isinstance(value, dict):
        path = value.get("path")
        return image_name(path) if isinstance(path, str) else "<bytes>"
    if isinstance(value, str | os.PathLike):
        name = os.fspath(value)
        return quoted(name, 60 if is_data_url(name) else 300)
    return f"<{type(value).__name__}>"


def quoted(text: str, limit: int) -> str:
    """Text for a message: as it is (`repr` would double a backslash), on one line and cut."""
    cut = text if len(text) <= limit else text[:limit] + "..."
    return "'" + "".join(c if c.isprintable() else repr(c)[1:-1] for c in cut) + "'"


def is_data_url(value: Any) -> bool:
    return isinstance(value, str) and _DATA.match(value) is not None


def web_url(value: Any) -> str | None:
    """The http(s) URL that a value of a row is or has in the place of a path, if it does."""
    if isinstance(value, dict):
        value = value.get("path") if value.get("bytes") is None else None
    return value.strip() if isinstance(value, str) and _WEB.match(value) else None


def fetched(ref: ImageRef) -> ImageRef:
    """A reference to an http(s) URL, with what the server sends; any other reference as it is.

    Called outside an event loop. ImageError: an error, over 64 MiB, or no end in 30 s.
    """
    url = web_url(ref.value)
    if url is None:
        return ref
    import aiohttp

    async def get() -> bytes:
        limit, body = aiohttp.ClientTimeout(total=_FETCH_S), bytearray()
        async with (
            aiohttp.ClientSession(timeout=limit, trust_env=True) as session,
            session.get(url, raise_for_status=True) as answer,
        ):
            async for piece in answer.content.iter_any():
                body += piece
                if len(body) > _MOST_FETCHED:
                    raise ValueError(f"it has more than {_MOST_FETCHED} bytes")
        return bytes(body)

    try:
        return ImageRef({"bytes": asyncio.run(get()), "path": url})
    except (aiohttp.ClientError, OSError, ValueError) as error:
        what = first_line(error) if str(error) else f"no end after {_FETCH_S:g} s"
        text = f"image {image_name(url)} cannot be fetched: {what}"
        raise ImageError("unreadable", text) from error


def local_path(value: str, root: str | None) -> str:
    """The file that a path or `file://` URL means, checked by its text alone: no file is touched.

    With a `root`, relative paths start there and none may leave it. A link counts where it lies,
    not where it points: folders of pictures are often linked into a data set. The path comes back
    without `..`, so that what was checked is what is opened. Percent signs of plain paths stay.

    Raises ImageError `remote_image` or `outside_root`.
    """
    name = image_name(value)
    scheme = _SCHEME.match(value)
    if scheme:
        host, _, rest = value[scheme.end() :].partition("/")
        if (scheme[1] or scheme[2]).lower() != "file" or host.lower() not in ("", "localhost"):
            raise ImageError(
                "remote_image",
                f"image {name} is on another machine, and nothing is fetched: download the images "
                "first and write paths (a file:// URL of this machine goes on with a third slash); "
                "rollouts and evaluations fetch it with --allow_image_urls",
            )
        value = "/" + os.fsdecode(unquote_to_bytes(rest.rstrip()))
    if root is None:
        return value
    base = os.path.abspath(root)
    path = os.path.normpath(os.path.join(base, re.sub("^//+", "/", value)))
    if _is_inside(path, base) or _is_inside(path, os.path.realpath(base)):
        return path
    raise ImageError(
        "outside_root",
        f"image {name} lies outside the image root {quoted(base, 300)}: "
        "move it, or set image_root to a folder that holds all images",
    )


def _is_inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def open_reference(value: Any, root: str | None = None) -> BinaryIO:
    """A readable, seekable stream of the image's encoded bytes (not of a PIL image).

    `value`: path, data URL, `file://` URL, bytes, or a dict with `bytes` or else `path`.
    Raises ImageError when there is nothing to read.
    """
    if isinstance(value, ImageRef):
        return open_reference(value.value, value.root)
    name = image_name(value)
    if isinstance(value, dict):
        content = value.get("bytes")
        value = value.get("path") if content is None else content
        if content is not None and isinstance(content, str):
            raise ImageError("bad_image_value", f"image {name} has text as its 'bytes'")
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if is_data_url(value):
        value = _data_url_bytes(value, name)
    if isinstance(value, bytes | bytearray | memoryview):
        if not len(value):
            raise ImageError("empty_file", f"image {name} is empty: it has no bytes")
        return io.BytesIO(value)
    if isinstance(value, str):
        return _open_file(local_path(value, root) if value else "", name)
    raise ImageError(
        "bad_image_value",
        f"image {name} is no image: expected a path, a data URL, bytes, "
        "a dict with 'bytes' or 'path', or a PIL image",
    )


def _data_url_bytes(url: str, name: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma:
        raise ImageError("corrupt", f"image {name} is a data URL without a comma")
    words = [word.strip().lower() for word in re.split("[:;]", head)]
    if "base64" not in words:
        return unquote_to_bytes(body)
    text = re.sub(r"\s", "", unquote(body)).replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError("corrupt", f"image {name} is a data URL of broken base64") from error


def _open_file(path: str, name: str) -> BinaryIO:
    place = "" if quoted(path, 300) == name else f" (looked for {quoted(path, 300)})"
    try:
        if not path:
            raise FileNotFoundError(errno.ENOENT, "empty path")
        found = os.stat(path)
        if stat.S_ISDIR(found.st_mode):
            raise ImageError("is_directory", f"image {name} is a directory{place}")
        if not stat.S_ISREG(found.st_mode):  # opening a pipe or device could wait for ever
            raise ImageError("unreadable", f"image {name} is not a regular file{place}")
        if not found.st_size:
            raise ImageError("empty_file", f"image {name} is an empty file{place}")
        return open(path, "rb")
    except (FileNotFoundError, NotADirectoryError) as error:
        what = "is a link to nothing" if os.path.islink(path) else "is not found"
        raise ImageError("not_found", f"image {name} {what}{place}") from error
    except ValueError as error:  # a NUL or half a surrogate pair: no file can have that name
        raise ImageError("not_found", f"image {name} is no possible file name") from error
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            text = f"image {name} is not found: {error.strerror}{place}"
            raise ImageError("not_found", text) from error
        text = f"image {name} cannot be opened: {error.strerror}{place}"
        raise ImageError("unreadable", text) from error
