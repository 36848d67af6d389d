"""What `vireo doctor` foretells of a run: its steps, and how full its micro-batches are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vireo.data.loader import Plan
from vireo.data.packing import share as rank_of
from vireo.data.ragged import Batch
from vireo.report import micro_batches
from vireo.report.doctor_rows import NONE
from vireo.report.figures import share
from vireo.settings import Settings
from vireo.trainers.setup import StepSize, step_size, total_steps

SIMULATED = 200  # steps of the first epoch that are packed to see how full they get


def steps(settings: Settings, world: int, rows: Sequence[int]) -> dict[str, Any]:
    """The section `steps`; `rows` of each file are those that a run opens, refused later or not."""
    size, _ = step_size(settings.batch, world)
    plan = _plan(settings, size, rows)
    return {
        "rows_per_step": size.rows,
        "ranks": world,
        "epochs": settings.optim.num_epochs or 1,
        "per_epoch": plan.steps_per_epoch,
        "total": total_steps(settings.optim, plan.steps_per_epoch),
    }


def _plan(settings: Settings, size: StepSize, rows: Sequence[int]) -> Plan:
    files = [(count, count) for count in rows if count]
    return Plan.mixed(files, size.rows, size.chunk, settings.run.seed, settings.data.shuffle)


def batches(
    settings: Settings,
    world: int,
    rows: Sequence[int],
    lengths: Sequence[int],
    images: Sequence[int],
    *,
    can_pack: bool,
    can_mix: bool,
) -> dict[str, Any] | None:
    """The section `micro_batches`: the first steps' rows, packed and padded; None without rows.

    `rows`: how many of each file; `lengths`: tokens of each row, NONE for a refused one, which
    keeps its place in the order.
    """
    if all(length == NONE for length in lengths):
        return None
    budget = settings.batch.max_tokens_per_gpu
    size, _ = step_size(settings.batch, world)
    plan = _plan(settings, size, rows)
    order = list(map(int, plan.order(0)))
    packs: list[Batch] = []
    pads: list[Batch] = []
    taken = min(SIMULATED, plan.steps_per_epoch)
    for step in range(taken):
        of_step = order[plan.position(step) : plan.position(step + 1)]
        for rank in range(world):
            mine = [
                row
                for i, row in enumerate(of_step)
                if rank_of(i, size.chunk, world) == rank and lengths[row] != NONE
            ]
            light = micro_batches.stand_ins([lengths[i] for i in mine], [images[i] for i in mine])
            if budget is None:
                pads += micro_batches.of_rows(light, size.chunk, can_mix=can_mix)
                continue
            pads += micro_batches.by_budget(light, budget, can_mix=can_mix, padded=True)
            if can_pack:
                packs += micro_batches.by_budget(light, budget, can_mix=can_mix, padded=False)
    return {
        "steps_looked_at": taken,
        "budget": budget,
        "rows": size.chunk if budget is None else None,
        "packed": _filled(packs, budget, taken * world) if packs else None,
        "padded": _filled(pads, budget, taken * world)
        | {"padding": round(micro_batches.padding_share(pads), 4)},
    }


def _filled(batches: list[Batch], budget: int | None, turns: int) -> dict[str, Any]:
    """`per_step`: micro-batches of a rank's step; `filled`: share of the budgets with tokens."""
    filled = None if budget is None else round(micro_batches.filled_share(batches, budget), 4)
    return {"micro_batches": len(batches), "per_step": share(len(batches), turns), "filled": filled}
