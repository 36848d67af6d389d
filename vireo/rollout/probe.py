"""Whether an engine forgets image embeddings when weights change: tried, not believed.

Stock servers keep the embedding of an image by its pixels. After an update that changes the vision
tower or the projector, an image seen before can so go on being seen with old weights, silently.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator

from PIL import Image as Pil
from torch import Tensor

from vireo.data.conversation import Conversation, Image, ImageRef, Text, Turn
from vireo.families import Family
from vireo.models.names import part_of
from vireo.rollout.bridge import VLMRolloutEngine
from vireo.rollout.engine import EngineError, EngineRefused
from vireo.rollout.sample import Sample, Sampling

LIMIT = 0.25  # nats; two such answers in bfloat16 differ by 0.03, stale embeddings by whole nats
_GREEDY = Sampling(max_new_tokens=8, temperature=0.0)


async def probe_images(
    rollouts: VLMRolloutEngine, send: Callable[[bool], Awaitable[None]]
) -> tuple[float, float]:
    """Asks about one picture, changes the projector, asks again, and asks about the same picture
    with one grey level of one pixel changed, which no cache has.

    `send(True)` sends all weights with the projector turned round (`turned_projector`),
    `send(False)` sends the real ones, which the engine has at the end. Returns (difference to the
    picture never seen, to the answer before) in nats. EngineRefused: the engine answers for the old
    weights. EngineError: the change is not seen at all.
    """
    before = await _ask(rollouts, 0)
    await send(True)
    try:
        again, fresh = await _ask(rollouts, 0), await _ask(rollouts, 1)
    finally:
        await send(False)
    stale, moved = distance(again, fresh), distance(before, fresh)
    if moved <= LIMIT:
        raise EngineError(
            f"new weights of the projector moved log-probabilities by {moved:.3f} only, so whether "
            "the engine forgets old images cannot be seen: do the weights arrive at all?"
        )
    if stale > LIMIT:
        raise EngineRefused(
            f"the engine keeps image embeddings of old weights ({stale:.2f} nats from the right "
            "ones): start SGLang with SGLANG_VLM_CACHE_SIZE_MB=0 in its environment, or freeze "
            "vision tower and projector"
        )
    return stale, moved


def turned_projector(
    named: Iterable[tuple[str, Tensor]], family: Family
) -> Iterator[tuple[str, Tensor]]:
    """Weights by their names in memory, those of the projector with the other sign."""
    for name, tensor in named:
        yield name, -tensor if part_of(name, family) == "projector" else tensor


def distance(one: Sample, other: Sample) -> float:
    """Mean |difference| of log-probabilities, up to the first token that differs and with it."""
    pairs = list(zip(one.response_ids, other.response_ids))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs) - 1)
    gaps = [abs(a - b) for a, b in zip(one.logprobs, other.logprobs)][: same + 1]
    return sum(gaps) / max(1, len(gaps))


async def _ask(rollouts: VLMRolloutEngine, shade: int) -> Sample:
    picture = Pil.linear_gradient("L").resize((112, 112)).convert("RGB")
    picture.putpixel((0, 0), (shade, 0, 0))
    turn = Turn("user", (Image(0), Text("What is this?")))
    return await rollouts.generate(
        None, Conversation((turn,), (ImageRef(picture),)), sampling=_GREEDY
    )
