"""What `vireo preview` and `vireo doctor` open: files with their bad rows."""

from __future__ import annotations

import sys

from vireo.data.mixture import Mixture, short_names
from vireo.data.readers import check_rows
from vireo.errors import RowError
from vireo.settings import Settings


def open_files(settings: Settings) -> Mixture:
    """The rows of `--train_file`, as the trainer has them with `--on_bad_row skip`.

    Unlike there, a file of which every row is refused is no error. InputError: a file that cannot
    be read, or that has no rows.
    """
    paths, parts = settings.data.train_file or [], []
    for path, name in zip(paths, short_names(paths)):
        rows = check_rows(
            path,
            image_root=settings.data.image_root,
            on_bad_row="skip",
            progress=sys.stderr.isatty(),
            name=name,
        )
        if not rows.total:
            raise RowError("no_rows", "there are no rows in it", path)
        parts.append(rows)
    return Mixture(parts, [1.0] * len(parts))
