"""What `vireo preview` and `vireo doctor` open: files with their bad rows, and a model."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from vireo.data.mixture import Mixture, short_names
from vireo.data.readers import Rows, open_source
from vireo.data.rows import check_row, is_plain, row_place
from vireo.errors import RowError
from vireo.settings import Settings

if TYPE_CHECKING:
    from vireo.data.render import Renderer


def open_files(settings: Settings) -> Mixture:
    """The rows of `--train_file`, as the trainer has them with `--on_bad_row skip`.

    Unlike there, a file of which every row is refused is no error. InputError: a file that cannot
    be read, or that has no rows.
    """
    paths, parts = settings.data.train_file or [], []
    for path, name in zip(paths, short_names(paths)):
        source, root = open_source(path, settings.data.image_root, name)
        places, skipped = array("q"), []
        for at, row in tqdm(source.scan(), "checking rows", unit=" rows", delay=2, disable=None):
            try:
                if isinstance(row, RowError):
                    raise row
                if not is_plain(row):
                    check_row(row, root)
                places.extend(at)
            except RowError as error:
                where = row_place(*source.place(at), row)
                skipped.append(RowError(error.reason, error.message, where))
        if not places and not skipped:
            raise RowError("no_rows", "there are no rows in it", path)
        found = np.frombuffer(places, dtype=np.int64).reshape(-1, 4)
        parts.append(Rows(source, root, found, skipped))
    return Mixture(parts, [1.0] * len(parts))


def open_renderer(settings: Settings) -> Renderer:
    """The trainer's own renderer. InputError: no such model."""
    from vireo.data.render import Renderer
    from vireo.hub import local_folder

    model, data = settings.model, settings.data
    processor = model.processor_name_or_path
    return Renderer(
        local_folder(model.vlm_model_name_or_path),
        local_folder(processor) if processor else None,
        chat_template=model.chat_template,
        image_size=data.image_size,
        image_strategy=data.image_strategy,
        max_length=data.max_length,
        budget=settings.batch.max_tokens_per_gpu,
    )
