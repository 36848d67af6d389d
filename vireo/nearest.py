"""The "did you mean" of every unknown name: flags, file keys, commands and trainers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name most like `name`, or None where none is alike enough to be a help. One that begins
    with it stands first."""
    all_names = list(names)
    longer = [other for other in all_names if other.startswith(f"{name}_")]
    return next(
        iter(
            difflib.get_close_matches(name, longer or all_names, n=1, cutoff=0.3 if longer else 0.4)
        ),
        None,
    )
