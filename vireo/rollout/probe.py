"""Whether an engine forgets image embeddings when weights change: tried, not believed.

Stock servers keep the embedding of an image by its pixels. After an update that changes the vision
tower or the projector, an image seen before can so go on being seen with old weights, silently.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image as Pil
from torch import Tensor

from vireo.data.conversation import Conversation, Image, ImageRef, Text, Turn
from vireo.families import Family
from vireo.models.names import part_of
from vireo.rollout.bridge import VLMRolloutEngine
from vireo.rollout.engine import EngineError, EngineRefused
from vireo.rollout.sample import Sample, Sampling

CLEAR = 4.0  # times the noise of two equal questions that new weights must move an answer
_GREEDY = Sampling(max_new_tokens=16, temperature=0.0)


@dataclass(frozen=True)
class Probed:
    """Mean |difference| of log-probabilities, in nats, of two answers under new weights: about the
    picture seen before and one never seen (`stale`), about two never seen (`noise`); and of the
    answers before and after (`moved`)."""

    stale: float
    noise: float
    moved: float


async def probe_images(
    rollouts: VLMRolloutEngine, send: Callable[[bool], Awaitable[None]]
) -> Probed:
    """Asks about one picture, changes the projector, asks again, and asks about the same picture
    with one grey level of one pixel changed, which no cache has.

    `send(True)` sends all weights with the projector turned round (`turned_projector`),
    `send(False)` sends the real ones, which the engine has at the end. EngineRefused: the engine
    answers for the old weights. EngineError: the change cannot be told from noise.
    """
    before = await _ask(rollouts, 0)
    await send(True)
    try:
        again, fresh, other = [await _ask(rollouts, shade) for shade in (0, 1, 2)]
    finally:
        await send(False)
    found = Probed(distance(again, fresh), distance(other, fresh), distance(before, fresh))
    if found.moved <= CLEAR * found.noise:
        raise EngineError(
            f"new weights of the projector moved log-probabilities by {found.moved:.3g}, noise by "
            f"{found.noise:.3g}, so whether the engine forgets old images cannot be seen: do the "
            "weights arrive at all?"
        )
    if found.stale > max(found.moved / 2, CLEAR * found.noise):
        raise EngineRefused(
            f"the engine keeps image embeddings of old weights ({found.stale:.3g} nats from the "
            f"right ones, noise is {found.noise:.3g}): start SGLang with "
            "SGLANG_VLM_CACHE_SIZE_MB=0 in its environment, or freeze vision tower and projector"
        )
    return found


def turned_projector(
    named: Iterable[tuple[str, Tensor]], family: Family
) -> Iterator[tuple[str, Tensor]]:
    """Weights by their names in memory, those of the projector twice as large, with the other
    sign: enough for any picture to look quite different."""
    for name, tensor in named:
        yield name, -2 * tensor if part_of(name, family) == "projector" else tensor


def distance(one: Sample, other: Sample) -> float:
    """Mean |difference| of log-probabilities, up to the first token that differs and with it."""
    pairs = list(zip(one.response_ids, other.response_ids))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs) - 1)
    gaps = [abs(a - b) for a, b in zip(one.logprobs, other.logprobs)][: same + 1]
    return sum(gaps) / max(1, len(gaps))


async def _ask(rollouts: VLMRolloutEngine, shade: int) -> Sample:
    pixels = np.random.default_rng(0).integers(0, 256, (112, 112, 3), dtype=np.uint8)
    pixels[0, 0, 0] = shade
    picture = Pil.fromarray(pixels)
    turn = Turn("user", (Image(0), Text("What is this?")))
    return await rollouts.generate(
        None, Conversation((turn,), (ImageRef(picture),)), sampling=_GREEDY
    )
