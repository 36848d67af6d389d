"""Rewards by name: functions of a finished Sample, plain or async, that return a number.

One small file each. They run in the event loop, so a slow one should be async.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence

from vireo.errors import InputError
from vireo.named import named
from vireo.rollout.sample import Sample

REWARDS = {"exact_match": "vireo.rewards.exact_match:exact_match"}


class Rewards:
    """`await rewards(sample)` fills in `sample.rewards` and `sample.reward`, their weighted sum.

    `names`: of REWARDS, or MODULE:FUNCTION. InputError: there is none of a name.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[float] | None = None):
        self.functions = {name: named("reward", name, REWARDS) for name in names}
        if weights is not None and len(weights) != len(names):
            raise InputError(f"{len(weights)} weight(s) for {len(names)} reward(s): give one each")
        self.weights = dict(zip(names, weights or [1.0] * len(names)))

    async def __call__(self, sample: Sample) -> None:
        """InputError: a reward is no finite number. An error inside one keeps its traceback."""
        for name, function in self.functions.items():
            try:
                value = function(sample)
                if inspect.isawaitable(value):
                    value = await value
            except Exception as error:
                error.add_note(f"in reward {name!r} of {sample.name}")
                raise
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise InputError(
                    f"{sample.name}: reward {name!r} returned {value!r:.80}, expected a finite "
                    "number"
                )
            sample.rewards[name] = float(value)
        sample.reward = sum(self.weights[name] * sample.rewards[name] for name in self.functions)
