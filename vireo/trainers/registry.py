"""Trainers by name: the built-in ones, and those that other packages add.

A trainer is a function `run(settings: Settings)`. Another package adds one with an entry point in
the group `vireo.trainers`, written `name = "module:function"`. A trainer that generates samples
with a rollout engine says so by `run.has_rollout = True`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from vireo.errors import InputError
from vireo.nearest import nearest

GROUP = "vireo.trainers"
BUILT_IN = {
    "fsdp_vlm": "vireo.trainers.fsdp_vlm:run",
    "fsdp": "vireo.trainers.fsdp:run",
    "grpo": "vireo.trainers.grpo:run",
}


def locate(name: str) -> EntryPoint:
    """Where the trainer is, without importing it. InputError: there is none of that name."""
    table = {entry.name: entry for entry in entry_points(group=GROUP)}
    table |= {key: EntryPoint(key, value, GROUP) for key, value in BUILT_IN.items()}
    if name in table:
        return table[name]
    near = nearest(name, table)
    hint = f"did you mean {near}? " if near else ""
    raise InputError(f"unknown trainer {name!r}; {hint}Trainers: {', '.join(sorted(table))}")


def find(name: str) -> Callable[..., Any]:
    """The trainer's function, imported now. InputError: there is none of that name."""
    return locate(name).load()
