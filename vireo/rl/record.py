"""Rollouts in a run folder: the samples of each step, with what the trainer made of them.

RUN/rollouts/step-N.jsonl, a line a sample as `vireo.rollout.dump` writes them; `metadata` has
`pieces` (the text of each response token), `trainer_logprobs`, `advantage` (one number where all
tokens have the same) and, with a reference model, `reference_logprobs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from vireo.errors import InputError
from vireo.rl.learn import Learned
from vireo.rollout import dump
from vireo.rollout.sample import Sample

FOLDER = "rollouts"


class Rollouts:
    """Those of one run. `decode`: a token's id to its text."""

    def __init__(self, run: Path, decode: Callable[[int], str]):
        self.folder, self._decode = run / FOLDER, decode
        self._pieces: dict[int, str] = {}

    def write(self, step: int, samples: Sequence[Sample], learned: Learned | None) -> None:
        shown = [replace(sample, metadata=dict(sample.metadata)) for sample in samples]
        for i, sample in enumerate(shown):
            more: dict[str, Any] = {"pieces": [self._piece(t) for t in sample.response_ids]}
            if learned is not None:
                advantage = learned.advantages[i].tolist()
                same = len(set(advantage)) == 1
                more["trainer_logprobs"] = [round(p, 6) for p in learned.logprobs[i]]
                more["advantage"] = advantage[0] if same else advantage
                if learned.reference is not None:
                    more["reference_logprobs"] = [round(p, 6) for p in learned.reference[i]]
            sample.metadata |= more
        dump.write(path_of(self.folder, step), shown)

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self._decode(token)
        return self._pieces[token]


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step}.jsonl"


def replayed(run: str, step: int) -> list[list[Sample]]:
    """The groups of a step of an earlier run, as they were before it was trained on. InputError:
    there are none."""
    folder = Path(run)
    folder = folder if folder.name == FOLDER else folder / FOLDER
    path = path_of(folder, step)
    if not path.exists():
        raise InputError(
            f"--debug_train_only {run}: no {path}; a run writes one each step, for as many steps "
            "as --num_rollout says"
        )
    samples = dump.read(path)
    for sample in samples:
        for name in ("pieces", "trainer_logprobs", "advantage", "reference_logprobs"):
            sample.metadata.pop(name, None)
    return [list(group) for _, group in groupby(samples, key=lambda sample: sample.group)]
