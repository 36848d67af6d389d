"""Prompts of reasoning-gym's tasks: what `vireo data reasoning-gym` writes."""

from __future__ import annotations

import json
from ast import literal_eval
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vireo.errors import InputError, first_line
from vireo.nearest import nearest

COLUMN = "reasoning_gym"  # of a row: {"task", "metadata"}, all that scoring needs besides `answer`


def write_reasoning_gym(
    out: str | Path, *, task: str | None = None, rows: int = 1000, seed: int = 0
) -> Path:
    """Write `rows` prompts of `task` to OUT/TASK.jsonl, and return that. The same seed and version
    of the library give the same rows. InputError: it is not installed, or lacks the task."""
    needs_library()
    from reasoning_gym.factory import DATASETS, create_dataset

    if task is None or task not in DATASETS:
        near = nearest(task, DATASETS) if task else None
        raise InputError(
            (f"--task: found {task!r}, expected" if task else "--task is missing:")
            + " a task of reasoning-gym; "
            + (f"did you mean {near}? " if near else "")
            + f"There are {', '.join(sorted(DATASETS))}"
        )
    if rows < 1:
        raise InputError(f"--rows: found {rows}, expected 1 or more")
    try:
        dataset = create_dataset(task, size=rows, seed=seed)
    except (AssertionError, ValueError, TypeError) as error:
        raise InputError(f"--task {task}: its settings fail: {first_line(error)}") from error
    lines = (json.dumps(_row(task, i, dataset[i])) for i in range(rows))
    path = Path(out) / f"{task}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def needs_library() -> None:
    """InputError: reasoning-gym is not installed."""
    if find_spec("reasoning_gym") is None:
        raise InputError("reasoning-gym is not installed here: pip install 'vireo-vl[reasoning]'")


def _row(task: str, i: int, entry: dict[str, Any]) -> dict[str, Any]:
    # Scorers compare tuples and look up numbers, which JSON has not: a literal of Python has.
    metadata = repr(_plain(entry["metadata"]))
    literal_eval(metadata)  # it can be read again
    about = {"task": task, "metadata": metadata}
    return {
        "id": f"{task}-{i}",
        "prompt": entry["question"],
        "answer": entry["answer"],
        COLUMN: about,
    }


def _plain(value: Any) -> Any:
    """Without numpy's scalars."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(map(_plain, value))
    return value.item() if hasattr(value, "dtype") else value
