"""The corpus of odd pictures and chat files, unpacked once per test process."""

from __future__ import annotations

import atexit
import json
import shutil
import tarfile
import tempfile
from functools import cache
from pathlib import Path

ARCHIVE = Path(__file__).parent / "data" / "corpus.tar.gz"


@cache
def corpus() -> Path:
    """The folder that holds images.json, chats.json and their files; gone when the process ends.

    An archive, since its odd file names and links do not survive every checkout.
    """
    folder = tempfile.mkdtemp(prefix="corpus-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="fully_trusted")
    root = Path(folder).resolve() / "corpus"
    for case in json.loads((root / "chats.json").read_text())["cases"]:
        if case.get("template"):
            file = root / case["file"]
            file.write_text(file.read_text().replace("@CORPUS@", str(root)))
    return root


def image_cases() -> list[dict]:
    return _cases("images.json")


def chat_cases() -> list[dict]:
    return _cases("chats.json")


def _cases(name: str) -> list[dict]:
    return json.loads((corpus() / name).read_text().replace("@CORPUS@", str(corpus())))["cases"]


def image_file(case: dict) -> str:
    """The case's reference, relative to the image root `images/` unless it is absolute."""
    return case["file"].removeprefix("images/")
