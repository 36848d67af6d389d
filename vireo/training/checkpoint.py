"""Checkpoints: written aside, renamed when complete, checked when read, loaded on any rank count.

A checkpoint folder `step-N` holds
    state/         model and optimizer (torch.distributed.checkpoint)
    hf/            config, processor, tokenizer, chat template: what an export needs besides weights
    rng.pt         random-number state of each rank
    progress.json  step, position in the data, global batch, skipped rows, settings
    manifest.json  size and CRC-32 of every file above, written last
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from vireo.errors import InputError
from vireo.models.policy import Policy
from vireo.parallel import Parallel

MANIFEST = "manifest.json"


def save(
    folder: Path,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    parallel: Parallel,
    progress: dict[str, Any],
    write_hf: Any,
    full: bool = False,
) -> Path:
    """Write `folder`/step-N (N from `progress["step"]`) and return it; collective on all ranks.

    `write_hf(path)` writes the small Hugging Face files. `full` gathers everything on rank 0, which
    then writes alone; else every rank writes its shards, into a folder that all ranks share.
    """
    final = folder / f"step-{progress['step']}"
    aside = folder / f".writing-step-{progress['step']}"
    if parallel.main:
        folder.mkdir(parents=True, exist_ok=True)
        for left in [*folder.glob(".writing-step-*"), *folder.glob(".deleting-step-*")]:
            shutil.rmtree(left)  # of a run that was killed
        (aside / "hf").mkdir(parents=True)
    parallel.barrier()
    options = StateDictOptions(full_state_dict=full, cpu_offload=full)
    model, optim = get_state_dict(policy, optimizer, options=options)
    state = {"model": model, "optim": optim}
    alone = full or parallel.world == 1
    if not alone or parallel.main:
        with _expected_alone():
            dcp.save(state, checkpoint_id=aside / "state", no_dist=alone)
    states = parallel.gather(_rng_state())
    if parallel.main:
        torch.save(states, aside / "rng.pt")
        write_hf(aside / "hf")
        _write_json(aside / "progress.json", progress | {"world": parallel.world})
    parallel.barrier()
    sums = _checksums(aside, parallel, alone=full)
    if parallel.main:
        _write_json(aside / MANIFEST, sums)
        _remove(final)
        os.replace(aside, final)
        _sync(folder)
    parallel.barrier()
    return final


def load(
    path: Path, policy: Policy, optimizer: torch.optim.Optimizer, parallel: Parallel
) -> dict[str, Any]:
    """Fill model, optimizer and random state from a checkpoint; returns its progress.

    Raises InputError on every rank if any file is missing or damaged. Random state is restored
    where this rank existed when the checkpoint was written.
    """
    progress = verify(path, parallel)
    model, optim = get_state_dict(policy, optimizer)
    state: dict[str, Any] = {"model": model, "optim": optim}
    read_state(path, state, alone=parallel.world == 1)
    mine = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    set_state_dict(
        policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    for group, settings in zip(optimizer.param_groups, mine):
        group.update(settings)  # betas, decay and the like are this run's, not the checkpoint's
    if progress["world"] == parallel.world:
        states = torch.load(path / "rng.pt", weights_only=True)
        _set_rng_state(states[parallel.rank])
    return progress


def read_state(path: Path, state: dict[str, Any], alone: bool) -> None:
    """Fill `state` from a checkpoint; InputError if it belongs to another model."""
    try:
        with _expected_alone():
            dcp.load(state, checkpoint_id=path / "state", no_dist=alone)
    except (Exception, CheckpointException) as error:
        first = next(iter(str(error).strip().splitlines()), repr(error))
        raise InputError(f"{path} cannot be read into this model: {first}") from error


@contextlib.contextmanager
def _expected_alone() -> Iterator[None]:
    """Without torch's warning that one process reads or writes alone: here that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def read_progress(path: Path) -> dict[str, Any]:
    """The progress record of a checkpoint (no tensors are read)."""
    try:
        return json.loads((path / "progress.json").read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no readable checkpoint: {error}") from error


def verify(path: Path, parallel: Parallel | None = None) -> dict[str, Any]:
    """Compare every file with the manifest (each rank takes its share); returns the progress."""
    rank, world = (parallel.rank, parallel.world) if parallel else (0, 1)
    try:
        wanted = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no complete checkpoint: {error}") from error
    problem = ""
    for name in sorted(wanted)[rank::world]:
        size, crc = wanted[name]
        file = path / name
        if not file.exists():
            problem = f"{name} is missing"
        elif (found := file.stat().st_size) != size:
            problem = f"{name} has {found} bytes, expected {size}"
        elif _crc(file) != crc:
            problem = f"{name} is damaged (its checksum differs)"
        if problem:
            break
    problems = [p for p in (parallel.gather(problem) if parallel else [problem]) if p]
    if problems:
        raise InputError(f"{path}: {problems[0]}; resume from another checkpoint")
    return read_progress(path)


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a save folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [p for p in folder.glob("step-*") if p.name[5:].isdigit()]
    return sorted(found, key=lambda p: int(p.name[5:]))


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints (0 keeps all)."""
    for path in checkpoints(folder)[:-keep] if keep else []:
        _remove(path)


def _remove(path: Path) -> None:
    """Delete a checkpoint so that a kill half-way leaves no half one under a good name."""
    if path.exists():
        gone = path.with_name(f".deleting-{path.name}")
        shutil.rmtree(gone, ignore_errors=True)
        os.replace(path, gone)
        if gone.is_symlink():
            gone.unlink()
        else:
            shutil.rmtree(gone)


def _checksums(folder: Path, parallel: Parallel, alone: bool) -> dict[str, list[int]]:
    """Size and CRC of every file, each synced to disk; rank 0's list, shared out over the ranks."""
    listed = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    names = parallel.gather(listed)[0]
    if alone:
        names = names if parallel.main else []
    else:
        names = names[parallel.rank :: parallel.world]
    mine = {name: [(folder / name).stat().st_size, _crc(folder / name)] for name in names}
    for name in names:
        _sync(folder / name)
    if parallel.main:
        for path in (folder / "state", folder / "hf", folder):
            _sync(path)
    return {name: value for part in parallel.gather(mine) for name, value in part.items()}


def _crc(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(8 << 20):
            value = zlib.crc32(block, value)
    return value


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, default=str))
    _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rng_state() -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
