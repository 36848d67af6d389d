"""Answers to the tasks of reasoning-gym, scored by the library itself."""

from __future__ import annotations

from vireo.data.reasoning import COLUMN, needs_library
from vireo.errors import InputError
from vireo.rewards.helpers import Helpers
from vireo.rewards.text import said
from vireo.rollout.sample import Sample

_HELPERS = Helpers("reasoning_gym")


def reasoning_gym(sample: Sample) -> float:
    """What the task's own `score_answer` gives, mostly 0 to 1, for rows of `vireo data
    reasoning-gym`. Of a response with one <answer> tag, what is inside; 0 where it takes more than
    5 s. InputError: the row is no such row, or the library is not installed."""
    row = sample.conversation.extra
    given = row.get(COLUMN)
    if not isinstance(given, dict) or not {"task", "metadata"} <= set(given):
        raise InputError(
            f"{sample.name}: reasoning_gym expects a row with the column {COLUMN!r} (task and "
            f"metadata), found {given!r:.80}; `vireo data reasoning-gym` writes such rows"
        )
    needs_library()
    return _HELPERS.score(
        sample,
        response=said(sample),
        task=given["task"],
        answer=row.get("answer"),
        metadata=given["metadata"],
    )
