"""Saying and writing what a report command was asked for."""

from __future__ import annotations

import sys
from pathlib import Path

from vireo.errors import InputError


def write(path: str, content: str) -> None:
    """Write a page or a report, its folder too; InputError where that cannot be done."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(content, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error


def show(text: str) -> None:
    """Print text; what the terminal's encoding lacks becomes an escape, never an error."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
