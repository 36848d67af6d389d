"""A model folder is written beside its place and renamed when complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from vireo.errors import VireoError, first_line


@contextmanager
def written_aside(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write into, which becomes `out` when all is written.

    `out` may be there if it is empty. VireoError: it cannot be written; nothing is left then.
    """
    aside = out.with_name(f".writing-{out.name}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        yield aside
        if out.exists():
            out.rmdir()
        os.replace(aside, out)
    except (OSError, SafetensorError) as error:
        what = getattr(error, "strerror", None) or first_line(error)
        raise VireoError(f"{out} cannot be written: {what}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
