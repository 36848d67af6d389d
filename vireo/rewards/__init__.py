"""Rewards by name: functions of finished samples, plain or async, that return numbers.

One small file each. A function of one `Sample` returns a number; one whose first parameter is
called `samples` gets a whole group and returns a number for each.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from vireo.errors import InputError
from vireo.named import named
from vireo.rollout.sample import Sample
from vireo.threads import in_thread

REWARDS = {
    name: f"vireo.rewards.{module}:{name}"
    for name, module in {
        "exact_match": "exact_match",
        "alnum_match": "text",
        "last_integer": "text",
        "boxed": "text",
        "choice": "text",
        "format_tags": "text",
        "box_iou": "boxes",
        "box_giou": "boxes",
        "remote": "remote",
    }.items()
}


class Rewards:
    """`await rewards(group)` fills in `rewards` and `reward`, their weighted sum, of its samples.

    `names`: of REWARDS, or MODULE:FUNCTION. Plain functions run in threads, async ones in the event
    loop; each has `timeout` seconds. `url`: where the reward `remote` asks. InputError: there is
    none of a name.
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float] | None = None,
        *,
        timeout: float = 60.0,
        url: str | None = None,
    ):
        self.functions = {name: named("reward", name, REWARDS) for name in names}
        if weights is not None and len(weights) != len(names):
            raise InputError(f"{len(weights)} weight(s) for {len(names)} reward(s): give one each")
        self.weights = dict(zip(names, weights or [1.0] * len(names)))
        self.timeout = timeout
        if "remote" in self.functions:
            if url is None:
                raise InputError("the reward remote needs --reward_url, the address that it asks")
            self.functions["remote"] = partial(self.functions["remote"], url=url)

    async def __call__(self, group: Sequence[Sample]) -> None:
        """InputError: a reward is no finite number, hangs, or gives the wrong number of scores. An
        error inside one keeps its traceback."""
        for name, function in self.functions.items():
            if next(iter(inspect.signature(function).parameters), "") == "samples":
                values = await self._of(name, function, list(group), f"group {group[0].group}")
                if not isinstance(values, Sequence) or len(values) != len(group):
                    found = f"{len(values)}" if isinstance(values, Sequence) else f"{values!r:.80}"
                    raise InputError(
                        f"group {group[0].group}: reward {name!r} returned {found} scores for "
                        f"{len(group)} samples: return one number for each"
                    )
            else:
                each = (self._of(name, function, sample, sample.name) for sample in group)
                values = await asyncio.gather(*each)
            for sample, value in zip(group, values):
                if not isinstance(value, int | float) or not math.isfinite(value):
                    raise InputError(
                        f"{sample.name}: reward {name!r} returned {value!r:.80}, expected a finite "
                        "number"
                    )
                sample.rewards[name] = float(value)
        for sample in group:
            sample.reward = sum(self.weights[name] * sample.rewards[name] for name in self.weights)

    async def _of(self, name: str, function: Callable[..., Any], given: Any, whose: str) -> Any:
        work = (
            function(given)
            if inspect.iscoroutinefunction(function)
            else in_thread(lambda: function(given))
        )
        try:
            value = await asyncio.wait_for(work, self.timeout)
            if inspect.isawaitable(value):
                value = await asyncio.wait_for(value, self.timeout)
            return value
        except TimeoutError as error:
            raise InputError(
                f"{whose}: reward {name!r} has no result after {self.timeout:g} s: mend it, or "
                "give it longer with --reward_timeout"
            ) from error
        except Exception as error:
            error.add_note(f"in reward {name!r} of {whose}")
            raise


def expected_answer(sample: Sample, who: str) -> Any:
    """The answer that ends the row, or its label. InputError: the row has neither."""
    expected = sample.answer
    if expected is None:
        expected = sample.conversation.extra.get("answer")
    if expected is None:
        raise InputError(
            f"{sample.name}: {who} has nothing to compare with; let the row end with the "
            "expected assistant turn, or give it a column 'answer' (see --label_key)"
        )
    return expected
