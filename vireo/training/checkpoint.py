"""Checkpoints: written aside, renamed when complete, checked when read, loaded on any rank count.

A checkpoint folder `step-N` holds
    state/         model (of one with adapters, these alone) and optimizer, as written by
                   torch.distributed.checkpoint
    hf/            config, processor, tokenizer, chat template: what an export needs besides weights
    rng.pt         random-number state of each rank
    progress.json  step, position in the data, global batch, skipped rows, settings
    manifest.json  size and CRC-32 of every file above, written last
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
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

from vireo.errors import InputError, VireoError, first_line
from vireo.models.names import is_adapter
from vireo.models.policy import Policy
from vireo.parallel import Parallel
from vireo.training.optimizer import fill_state

MANIFEST = "manifest.json"


def save(
    folder: Path,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    parallel: Parallel,
    progress: dict[str, Any],
    write_hf: Callable[[Path], None],
    full: bool = False,
    more: Callable[[Path], None] | None = None,
) -> Path:
    """Write `folder`/step-N (N from `progress["step"]`) and return it; collective on all ranks.

    `write_hf(path)` writes the small Hugging Face files, `more(path)` a trainer's own. `full`
    gathers everything on rank 0, which then writes alone; else every rank writes its shards, into
    a folder that all ranks share.
    """
    final = folder / f"step-{progress['step']}"
    aside = folder / f".writing-step-{progress['step']}"
    alone = full or parallel.world == 1

    def prepare() -> None:
        if parallel.main:
            folder.mkdir(parents=True, exist_ok=True)
            for left in [*folder.glob(".writing-step-*"), *folder.glob(".deleting-step-*")]:
                shutil.rmtree(left)  # of a run that was killed
            (aside / "hf").mkdir(parents=True)

    def write_tensors() -> None:
        model, optim = _state(policy, optimizer, full_state_dict=full, cpu_offload=full)
        if not alone or parallel.main:
            with _expected_alone():
                state = {"model": model, "optim": optim}
                dcp.save(state, checkpoint_id=aside / "state", no_dist=alone)

    def write_rest() -> None:
        if parallel.main:
            torch.save(states, aside / "rng.pt")
            write_hf(aside / "hf")
            if more is not None:
                more(aside)
            _write_json(aside / "progress.json", progress | {"world": parallel.world})

    def finish() -> None:
        if parallel.main:
            for path in (aside / "state", aside / "hf", aside):
                _sync(path)
            _write_json(aside / MANIFEST, sums)
            _remove(final)
            os.replace(aside, final)
            _sync(folder)

    states = parallel.gather(_rng_state())
    for write in (prepare, write_tensors, write_rest):
        _together(parallel, final, write)
    names = parallel.gather(_files(aside) if parallel.main else [])[0]
    mine = names[parallel.rank :: parallel.world] if not full else names * parallel.main
    sums: dict[str, list[int]] = {}
    _together(parallel, final, lambda: sums.update(_checksums(aside, mine)))
    sums = {name: value for part in parallel.gather(sums) for name, value in part.items()}
    _together(parallel, final, finish)
    return final


def _together(parallel: Parallel, final: Path, write: Callable[[], None]) -> None:
    """A part of a save on every rank; if it fails on any, the same VireoError on all of them.

    A full disk, most of the time: what was written aside goes, the last complete one stays.
    """
    failed = None
    try:
        write()
    except (OSError, RuntimeError, CheckpointException) as error:
        failed = _cause(error)
    first = next((text for text in parallel.gather(failed) if text is not None), None)
    if first is None:
        return
    if parallel.main:
        shutil.rmtree(final.with_name(f".writing-{final.name}"), ignore_errors=True)
    kept = checkpoints(final.parent)
    last = f"{kept[-1]} is the last good one: go on from it with --resume auto" if kept else ""
    raise VireoError(
        f"{final} cannot be written: {first}. {last or 'There is no earlier checkpoint.'}"
    )


def _cause(error: BaseException) -> str:
    """The operating system's own words, wherever they are wrapped."""
    if isinstance(error, CheckpointException):
        error = next((e for e, _ in error.failures.values()), error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error)


def load(
    path: Path, policy: Policy, optimizer: torch.optim.Optimizer, parallel: Parallel
) -> dict[str, Any]:
    """Fill model, optimizer and random state from a checkpoint (that `verify` has passed); returns
    its progress.

    Raises InputError if it belongs to another model. Random state is restored where this rank
    existed when the checkpoint was written.
    """
    progress = read_progress(path)
    model, optim = _state(policy, optimizer)
    state: dict[str, Any] = {"model": model, "optim": optim}
    read_state(path, state, alone=parallel.world == 1)
    mine = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    set_state_dict(
        policy,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
        options=StateDictOptions(ignore_frozen_params=_adapted(policy), strict=False),
    )
    for group, settings in zip(optimizer.param_groups, mine):
        group.update(settings)  # betas, decay and the like are this run's, not the checkpoint's
    if progress["world"] == parallel.world:
        states = torch.load(path / "rng.pt", weights_only=True)
        _set_rng_state(states[parallel.rank])
    return progress


def _adapted(policy: Policy) -> bool:
    return any(is_adapter(name) for name, _ in policy.named_parameters())


def _state(policy: Policy, optimizer: torch.optim.Optimizer, **options: Any) -> tuple[dict, dict]:
    """State of model and optimizer. Of a model with adapters these alone: its frozen base stays
    where it is, in its own folder."""
    adapted = _adapted(policy)
    fill_state(optimizer)
    model, optim = get_state_dict(
        policy, optimizer, options=StateDictOptions(ignore_frozen_params=adapted, **options)
    )
    if adapted:  # a head tied to frozen embeddings is listed all the same
        model = {name: value for name, value in model.items() if is_adapter(name)}
    return model, optim


def read_state(path: Path, state: dict[str, Any], alone: bool) -> None:
    """Fill `state` from a checkpoint; InputError if it belongs to another model.

    A weight that only one of the two has (an adapter of a module that is no target any more) is an
    error as well.
    """
    held, wanted = set(model_tensors(path)), set(state["model"])
    if lacking := sorted(wanted - held):
        raise InputError(f"{path} cannot be read into this model: it lacks {lacking[0]}")
    if left := sorted(held - wanted):
        raise InputError(
            f"{path} holds {len(left)} weights that this model has no place for, such as "
            f"{left[0]}: train with the same --lora_* settings, on the same model"
        )
    trained = {key.rpartition(".")[0] for key in _metadata(path) if key.startswith("optim.state.")}
    new = sorted({f"optim.state.{n}" for n in state.get("optim", {}).get("state", {})} - trained)
    if new:
        name = new[0].removeprefix("optim.state.hf.")
        raise InputError(
            f"{path} cannot be gone on from: {name} and {len(new) - 1} more weights train now and "
            "were frozen there; freeze the same parts, or start a new run from its export"
        )
    try:
        with _expected_alone():
            dcp.load(state, checkpoint_id=path / "state", no_dist=alone)
    except (Exception, CheckpointException) as error:
        raise InputError(f"{path} cannot be read into this model: {_cause(error)}") from error


def model_tensors(path: Path) -> dict[str, Any]:
    """Name in the policy -> metadata (`size`) of each weight that a checkpoint holds."""
    found = _metadata(path).items()
    return {key.removeprefix("model."): value for key, value in found if key.startswith("model.")}


def _metadata(path: Path) -> dict[str, Any]:
    try:
        return dcp.FileSystemReader(path / "state").read_metadata().state_dict_metadata
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise InputError(f"{path}/state cannot be read: {error}") from error


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
        raise InputError(
            f"{path} is no complete checkpoint: its {MANIFEST} is missing or cannot be read"
        ) from error
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


def _files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def _checksums(folder: Path, names: list[str]) -> dict[str, list[int]]:
    """Size and CRC of files, each synced to disk."""
    sums = {name: [(folder / name).stat().st_size, _crc(folder / name)] for name in names}
    for name in names:
        _sync(folder / name)
    return sums


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
