"""What `vireo doctor` foretells of a run: its steps, and how full its micro-batches are."""

from __future__ import annotations

from typing import Any

import torch

from vireo.data.loader import Plan, StepLoader
from vireo.data.packing import balance, micro_batches, padding_share
from vireo.data.ragged import BASE_KEYS, Batch, Example
from vireo.report.doctor import Look
from vireo.report.figures import share
from vireo.settings import Settings
from vireo.trainers.setup import step_size, total_steps

SIMULATED = 200  # steps of the first epoch that are cut into micro-batches


def foretell(settings: Settings, world: int, look: Look) -> dict[str, Any]:
    """The section `steps` of the report and, with a model, `micro_batches`.

    A bad row keeps its place in the order, as in training.
    """
    size, _ = step_size(settings.batch, world)
    files = [(len(part), len(part)) for part in look.rows.parts if len(part)]
    plan = Plan.mixed(files, size.rows, size.chunk, settings.run.seed, settings.data.shuffle)
    total = total_steps(settings.optim, plan.steps_per_epoch)
    steps = {"rows_per_step": size.rows, "per_epoch": plan.steps_per_epoch, "total": total}
    if look.renderer is None:
        return {"steps": steps}
    family, budget = look.renderer.family, settings.batch.max_tokens_per_gpu
    made: dict[str, list[Batch]] = {"padded": []}
    if budget and family.can_pack:
        made["packed"] = []
    count, zero = min(SIMULATED, plan.steps_per_epoch), torch.zeros(1, dtype=torch.long)
    stop = plan.position(count)
    loaders = [
        StepLoader(look.rows, look.renderer, plan, rank=rank, world=world, stop=stop)
        for rank in range(world)
    ]
    for step in zip(*(loader.steps() for loader in loaders)):
        dealt = [
            [  # as long as the rows, without memory for their tokens
                Example({"input_ids": zero.expand(look.lengths[i])}, BASE_KEYS, look.images[i])
                for i in mine
                if look.lengths[i]
            ]
            for mine, _ in step
        ]
        for rows in _evened(dealt, budget) if budget else dealt:
            for how, batches in made.items():
                batches += micro_batches(
                    rows,
                    rows=size.chunk,
                    budget=budget,
                    can_mix=family.can_mix,
                    packing=how == "packed",
                )
    found: dict[str, Any] = {"steps_looked_at": count}
    for how, batches in made.items():
        found[how] = {"micro_batches": len(batches), "per_step": share(len(batches), count * world)}
        if budget:
            tokens = sum(batch.tokens for batch in batches)
            found[how]["filled_share"] = share(tokens, budget * len(batches))
    found["padded"]["padding_share"] = padding_share(made["padded"])
    return {"steps": steps, "micro_batches": found}


def _evened(dealt: list[list[Example]], budget: int) -> list[list[Example]]:
    """The rows of each rank of a step, as ranks pass them on (see `vireo.data.packing.evened`)."""
    moves = {
        (m.source, m.row): m.target for m in balance([list(map(len, d)) for d in dealt], budget)
    }
    held: list[list[Example]] = [[] for _ in dealt]
    for rank, rows in enumerate(dealt):
        for i, row in enumerate(rows):
            held[moves.get((rank, i), rank)].append(row)
    return held
