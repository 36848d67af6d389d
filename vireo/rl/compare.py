"""`vireo mismatch`: a model, an engine and a data file in, the report of a climb out."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vireo.data.conversation import read_rows
from vireo.data.references import fetched
from vireo.errors import InputError
from vireo.hub import local_folder
from vireo.models.build import whole_model
from vireo.models.policy import Policy
from vireo.report.page import show, write
from vireo.rl import mismatch_page
from vireo.rl.ladder import Report, climb
from vireo.rl.swaps import Trainer
from vireo.rollout.open import open_engine
from vireo.rollout.run import allowed, open_model
from vireo.rollout.sample import Sampling
from vireo.settings.rollout import EngineSettings, SamplingSettings
from vireo.weights.source import Folder

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def mismatch(
    *,
    model: str,
    data: str,
    engine: EngineSettings,
    sampling: SamplingSettings,
    processor: str | None = None,
    image_root: str | None = None,
    limit: int = 8,
    dtype: str | None = None,
    other_model: str | None = None,
    update: bool = False,
    out: str | None = None,
    **options: Any,
) -> Report:
    """Climb with the first `limit` rows of a file, print the report, and write it into `out` as
    mismatch.json and mismatch.html.

    `dtype`: number format of the trainer, and of an engine started here (default: the model's).
    `other_model`: weights of the same shapes to try in attribution. `update`: the engine is asked
    before and after it is sent the model's weights; one that is started here has those of
    `other_model` before. `options`: the renderer's. InputError: no such model, rows or weights.
    """
    folder, renderer = open_model(model, processor, engine, **options)
    if folder != renderer.model_path:
        raise InputError(f"{model} holds adapters alone: export it with --merge_lora")
    rows = read_rows(data, image_root=image_root, allowed=allowed(engine, prompts=True))
    chosen = [rows[i] for i in range(min(len(rows), limit)) for _ in range(sampling.n)]
    if not chosen:
        raise InputError(f"{data} has no row to compare with")
    if engine.allow_image_urls:
        chosen = [replace(row, images=tuple(map(fetched, row.images))) for row in chosen]
    config, family = renderer.config, renderer.family
    kind = DTYPES[dtype] if dtype else config.dtype or torch.float32
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dummy = renderer.dummy() if family.has_vision and family.can_mix else None
    trainer = Trainer(
        Policy(whole_model(config, family, folder, kind).to(device), family, dummy), renderer
    )
    first = folder
    if other_model is not None:
        other = local_folder(other_model)
        trainer.other = dict(whole_model(config, family, other, kind).named_parameters())
        first = other if update else folder
    asked = Sampling(**sampling.model_dump(include=set(Sampling.__dataclass_fields__)))

    async def run() -> Report:
        opened = open_engine(engine, first, renderer, device=device, dtype=kind)

        async def send() -> None:
            await opened.pause()
            await opened.update_weights(Folder(str(Path(folder).resolve())), "mismatch")
            await opened.resume()

        async with opened:
            return await climb(opened, trainer, chosen, asked, send if update else None)

    report = asyncio.run(run())
    show(mismatch_page.as_text(report))
    if out is not None:
        write(str(Path(out) / "mismatch.json"), mismatch_page.as_json(report))
        write(str(Path(out) / "mismatch.html"), mismatch_page.as_page(report))
    return report
