"""What a run settles before it starts: its folders, its step size, where it goes on from."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from vireo.errors import InputError
from vireo.parallel import Parallel
from vireo.settings import Settings
from vireo.settings.schema import BatchSettings, OptimSettings
from vireo.training.checkpoint import checkpoints


def be_deterministic() -> None:
    """Refuse algorithms that give other bits each time; called before anything is computed."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


@dataclass(frozen=True)
class StepSize:
    """`rows` of an optimizer step over all ranks; `chunk` rows of a micro-batch (1: by tokens)."""

    rows: int
    chunk: int


def step_size(batch: BatchSettings, world: int, resumed: int | None = None) -> tuple[StepSize, str]:
    """The step size and a notice ('' for none).

    `resumed`: the global batch of the checkpoint, which wins over --grad_accum_steps, because it
    is what keeps the losses the same on another number of ranks.
    """
    chunk = batch.per_device_train_batch_size or 1
    wanted = batch.global_batch_size
    if batch.max_tokens_per_gpu is not None:
        chunk = 1
    by_accumulation = chunk * (batch.grad_accum_steps or 1) * world
    if wanted is not None and batch.grad_accum_steps is not None:
        if batch.max_tokens_per_gpu is not None:
            raise InputError("--grad_accum_steps has no meaning with --max_tokens_per_gpu")
        if wanted != by_accumulation:
            raise InputError(
                f"--global_batch_size {wanted} is not {chunk} rows x {batch.grad_accum_steps} "
                f"micro-batches x {world} ranks = {by_accumulation}: leave --grad_accum_steps out"
            )
    rows = wanted or by_accumulation
    if resumed is None or resumed == rows:
        return StepSize(rows, chunk), ""
    if wanted is not None:
        raise InputError(
            f"--global_batch_size {wanted} differs from the checkpoint's {resumed}: resume with "
            f"the checkpoint's, or leave the setting out"
        )
    return StepSize(resumed, chunk), (
        f"{resumed} rows a step as in the checkpoint, not {rows} from --grad_accum_steps"
    )


def total_steps(optim: OptimSettings, steps_per_epoch: int) -> int:
    """Optimizer steps of the run: --max_steps or --num_epochs (default 1), whichever is first."""
    if optim.max_steps is not None and optim.num_epochs is None:
        return optim.max_steps
    steps = (optim.num_epochs or 1) * steps_per_epoch
    return min(steps, optim.max_steps or steps)


def run_paths(settings: Settings, parallel: Parallel) -> tuple[Path, Path]:
    """The run folder and the checkpoint folder, the same on every rank."""
    run = settings.run
    name = f"{settings.trainer}-{time.strftime('%Y%m%d-%H%M%S')}"
    output = parallel.gather(run.output_dir or str(Path("runs") / name))[0]
    saves = Path(run.save_dir) if run.save_dir else Path(output) / "checkpoints"
    if run.resume == "auto" and run.output_dir is None and run.save_dir is None:
        raise InputError("--resume auto needs --output_dir or --save_dir, to know where to look")
    for flag, path in (("--output_dir", Path(output)), ("--save_dir", saves)):
        there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            what = "is a file" if there.is_file() else "cannot be written to"
            raise InputError(f"{flag} {path}: {there} {what}; choose another folder")
    return Path(output), saves


def find_checkpoint(settings: Settings, saves: Path, parallel: Parallel) -> Path | None:
    """The checkpoint to go on from, or None for a fresh start; the same on every rank."""
    resume = settings.run.resume
    if resume is not None and Path(resume).absolute() == saves.absolute():
        resume = "auto"  # as published commands have it: load from where it saves to
    found = checkpoints(saves)
    path: Path | None = None
    if resume == "auto":
        path = found[-1] if found else None
    elif resume is not None:
        path = Path(resume)
        if not path.is_dir():
            raise InputError(f"--resume {resume}: no such checkpoint folder")
        if found and found[-1].resolve() != path.resolve():
            raise InputError(
                f"--resume {resume}: {saves} holds {found[-1].name}, which this run would mix with "
                "its own; go on from the newest with --resume auto, or choose another --save_dir"
            )
    elif found:
        raise InputError(
            f"{saves} holds checkpoints of an earlier run (the newest: {found[-1].name}): "
            f"go on with --resume auto, or choose another folder"
        )
    return parallel.gather(path)[0]
