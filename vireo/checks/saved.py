"""Whether a model that is written to a folder and read back is the same model."""

from __future__ import annotations

import shutil
import tempfile

import torch

from vireo.checks.report import Cannot, Finding
from vireo.checks.subject import GIB, Subject
from vireo.models.layout import save_as_published
from vireo.models.load import fill_from_checkpoint
from vireo.parallel import Parallel


def saved_is_loaded(subject: Subject) -> Finding:
    """`save_pretrained`, then the loader of a run on what it wrote, gives equal log-probabilities.

    The model's own tensors are filled with NaN before they are read back: one that is not in the
    folder shows. Needs as much disk as the weights take in float32.
    """
    hf = subject.policy.hf
    rows = [max(subject.drawn, key=lambda row: len(row.images)), subject.drawn[0]]
    before = [subject.alone(row) for row in rows]
    needed = 4 * subject.parameters
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if needed > free:
        raise Cannot(
            f"it takes {needed / GIB:.0f} GiB in {tempfile.gettempdir()}, which has "
            f"{free / GIB:.0f} GiB left (TMPDIR names another folder)"
        )
    with tempfile.TemporaryDirectory(prefix="vireo-check-") as folder:
        save_as_published(hf)
        hf.save_pretrained(folder)
        with torch.no_grad():
            for parameter in hf.parameters():
                parameter.fill_(float("nan"))
        fill_from_checkpoint(hf, folder, Parallel(0, 1, subject.device, None))
    pairs = [
        (subject.example(row), old, subject.logprobs(subject.example(row)))
        for row, old in zip(rows, before)
    ]
    worst, first = subject.furthest(pairs, 0.0)
    return Finding(worst, 0.0, wrong=first)
