"""Filters by name: which finished groups are worth training on."""

from __future__ import annotations

from collections.abc import Callable

from vireo.named import named
from vireo.rollout.sample import Sample

Filter = Callable[[list[Sample]], bool]

FILTERS = {
    "mixed_rewards": "vireo.rollout.filters:mixed_rewards",
    "untruncated": "vireo.rollout.filters:untruncated",
}


def find(name: str) -> Filter:
    """One of FILTERS, or MODULE:FUNCTION. InputError: there is none of that name."""
    return named("filter", name, FILTERS)


def mixed_rewards(group: list[Sample]) -> bool:
    """Keeps groups whose rewards are not all equal: with equal ones every advantage is zero."""
    if any(sample.reward is None for sample in group):
        raise ValueError(f"{group[0].name}: mixed_rewards needs the reward of every sample")
    return len({sample.reward for sample in group}) > 1


def untruncated(group: list[Sample]) -> bool:
    """Keeps groups of which every response ended by itself, not at the length limit."""
    return all(sample.finish == "stop" for sample in group)
