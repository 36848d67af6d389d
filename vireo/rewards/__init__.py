"""Rewards by name: functions of finished samples, plain or async, that return numbers.

One small file each. A function of one `Sample` returns a number; one whose first parameter is
called `samples` gets a whole group and returns a number for each.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vireo.errors import InputError
from vireo.named import named
from vireo.threads import in_thread

if TYPE_CHECKING:  # the helper processes import this package, and must start without torch
    from vireo.rollout.sample import Sample

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
        "math": "mathematics",
        "dapo_math": "dapo",
        "reasoning_gym": "reasoning",
        "remote": "remote",
    }.items()
}
# These end each call themselves; what they wait for besides is a free helper, which is no fault.
_SELF_TIMED = ("math", "reasoning_gym")


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
                if hasattr(values, "tolist"):  # an array or a tensor
                    values = values.tolist()
                if not isinstance(values, Sequence) or len(values) != len(group):
                    found = f"{len(values)}" if isinstance(values, Sequence) else _shown(values)
                    raise InputError(
                        f"group {group[0].group}: reward {name!r} returned {found} scores for "
                        f"{len(group)} samples: return one number for each"
                    )
            else:
                each = (self._of(name, function, sample, sample.name) for sample in group)
                values = await asyncio.gather(*each)
            for sample, value in zip(group, values):
                score = _score(value)
                if score is None:
                    raise InputError(
                        f"{sample.name}: reward {name!r} returned {_shown(value)}, expected a "
                        "finite number"
                    )
                sample.rewards[name] = score
        for sample in group:
            sample.reward = sum(self.weights[name] * sample.rewards[name] for name in self.weights)

    async def _of(self, name: str, function: Callable[..., Any], given: Any, whose: str) -> Any:
        limit = None if name in _SELF_TIMED else self.timeout
        task = asyncio.ensure_future(_value(function, given))
        try:
            # Not `wait_for`: its TimeoutError could as well be the reward's own.
            await asyncio.wait({task}, timeout=limit)
            if not task.done():
                raise InputError(
                    f"{whose}: reward {name!r} has no result after {self.timeout:g} s: mend it, or "
                    "give it longer with --reward_timeout"
                )
        finally:
            task.cancel()
        if task.cancelled():
            raise RuntimeError(f"reward {name!r} of {whose} cancelled itself")
        try:
            return task.result()
        except Exception as error:
            error.add_note(f"in reward {name!r} of {whose}")
            raise


async def _value(function: Callable[..., Any], given: Any) -> Any:
    def call() -> Any:
        try:
            return function(given)
        except StopIteration as error:  # which no future can hold: whoever awaits it would hang
            raise RuntimeError(f"it raised {error!r}") from error

    try:
        value = function(given) if inspect.iscoroutinefunction(function) else await in_thread(call)
        return await value if inspect.isawaitable(value) else value
    except SystemExit as error:  # which would end the run without a word
        raise RuntimeError(f"it raised {error!r}") from error


def _score(value: Any) -> float | None:
    """A number of Python, numpy or torch as a float; None: it is none, or not finite."""
    if getattr(value, "shape", None) == ():
        value = value.item()
    try:
        score = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:
        return None
    return score if math.isfinite(score) else None


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # an integer with more digits than Python writes
        return f"a huge {type(value).__name__}"


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
