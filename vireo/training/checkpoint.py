"""Checkpoints: written aside, renamed when complete, checked when read, loaded on any rank count.

A checkpoint folder `step-N` holds
    state/         model and optimizer (torch.distributed.checkpoint)
    hf/            config, processor, tokenizer, chat template: what an export needs besides weights
    rng-RANK.pt    random-number state of each rank
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
    then writes alone (for ranks that share no file system with it); else every rank writes shards.
    """
    final = folder / f"step-{progress['step']}"
    aside = folder / f".writing-step-{progress['step']}"
    if parallel.main:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        (aside / "hf").mkdir(parents=True)
    parallel.barrier()
    options = StateDictOptions(full_state_dict=full, cpu_offload=full)
    model, optim = get_state_dict(policy, optimizer, options=options)
    state = {"model": model, "optim": optim}
    alone = full or parallel.world == 1
    if not alone or parallel.main:
        with expected_alone():
            dcp.save(state, checkpoint_id=aside / "state", no_dist=alone)
    torch.save(_rng_state(), aside / f"rng-{parallel.rank}.pt")
    if parallel.main:
        write_hf(aside / "hf")
        _write_json(aside / "progress.json", progress | {"world": parallel.world})
    parallel.barrier()
    sums = _checksums(aside, parallel)
    if parallel.main:
        _write_json(aside / MANIFEST, sums)
        if final.exists():
            shutil.rmtree(final)
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
    try:
        with expected_alone():
            dcp.load(state, checkpoint_id=path / "state", no_dist=parallel.world == 1)
    except Exception as error:
        raise InputError(
            f"{path}: the checkpoint cannot be read into this model: {error}"
        ) from error
    set_state_dict(
        policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    rng = path / f"rng-{parallel.rank}.pt"
    if rng.exists() and progress["world"] == parallel.world:
        _set_rng_state(torch.load(rng, weights_only=False))
    return progress


@contextlib.contextmanager
def expected_alone() -> Iterator[None]:
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
        gone = path.with_name(f".deleting-{path.name}")
        os.replace(path, gone)  # a kill half-way leaves no half checkpoint under a good name
        shutil.rmtree(gone, ignore_errors=True)


def _checksums(folder: Path, parallel: Parallel) -> dict[str, list[int]]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    mine = {
        str(p.relative_to(folder)): [p.stat().st_size, _crc(p)]
        for p in files[parallel.rank :: parallel.world]
    }
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
