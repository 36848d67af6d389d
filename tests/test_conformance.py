"""Every engine does what every engine must: the embedded one, and the SGLang client over
`vireo serve` on a real socket. Stock servers are run by hand (`tests/conformance.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import pytest

from tests.conformance import CHECKS, Suite, row, trainer, turned
from tests.serving import serving
from tests.tiny_models import FAMILIES, renderer, scratch, tiny
from vireo.data.prompt import Prompt
from vireo.models.names import named_parameters
from vireo.models.policy import Policy
from vireo.rollout.bridge import VLMRolloutEngine
from vireo.rollout.embedded import EmbeddedEngine
from vireo.rollout.engine import EngineRefused, RolloutEngine
from vireo.rollout.http import Http
from vireo.rollout.probe import CLEAR, Probed, probe_images, turned_projector
from vireo.rollout.sample import Sampling
from vireo.rollout.server import Fault
from vireo.rollout.sglang import SglangEngine
from vireo.weights.named import published
from vireo.weights.receive import Receiver
from vireo.weights.source import Tensors

KINDS = ("embedded", "serve")
LIMIT_FP32 = 1e-4  # of the largest difference; cache against prefill costs 1e-6


@cache
def other(family: str) -> str:
    return turned(tiny(family), scratch() / f"{family}-turned")


@cache
def trained(family: str, folder: str) -> Policy:
    return trainer(renderer(family), folder)


@asynccontextmanager
async def opened(
    kind: str, family: str, fault: Fault | None = None
) -> AsyncIterator[RolloutEngine]:
    render = renderer(family)
    engine = EmbeddedEngine.of_folder(tiny(family), render)
    if kind == "embedded":
        async with engine:
            yield engine
        return
    receiver = Receiver(engine.policy.hf, render.family)
    async with (
        serving(engine, render, receiver, fault=fault) as url,
        SglangEngine(Http(url, timeout=30.0, backoff=0.01), render) as client,
    ):
        yield client


def suite(engine: RolloutEngine, family: str) -> Suite:
    model, turned_model = tiny(family), other(family)
    policies = (trained(family, model), trained(family, turned_model))
    return Suite(
        *(engine, renderer(family), policies[0], LIMIT_FP32, model, turned_model, policies[1])
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check", CHECKS)
def test_an_engine_keeps_the_interface(kind: str, check: str) -> None:
    async def story() -> None:
        async with opened(kind, "qwen2_5_vl") as engine:
            await getattr(suite(engine, "qwen2_5_vl"), check)()

    asyncio.run(asyncio.wait_for(story(), 60))


@pytest.mark.parametrize("family", FAMILIES)
def test_over_a_socket_as_in_the_process(family: str) -> None:
    """Same seeds and greedy give the same tokens, and the log-probs are the trainer's, for a
    prompt with pictures and one without."""
    render = renderer(family)
    images = 1 if render.family.has_vision else 0
    prompts = [render.rollout(row(1, images)), render.rollout(row(2, 0, "Say something."))]

    async def answers(kind: str) -> list[Any]:
        async with opened(kind, family) as engine:
            rollouts = VLMRolloutEngine(engine, render)
            asked = [
                rollouts.samples(prompt, sampling, 2, group=f"{i}")
                for i, prompt in enumerate(prompts)
                for sampling in (Sampling(10, temperature=0.0), Sampling(10, 0.8, seed=5))
            ]
            return [sample for group in await asyncio.gather(*asked) for sample in group]

    here, there = asyncio.run(answers("embedded")), asyncio.run(answers("serve"))
    policy = trained(family, tiny(family))
    judge = Suite(*(None, render, policy, LIMIT_FP32, "", "", policy))  # type: ignore[arg-type]
    for i, (one, two) in enumerate(zip(here, there)):
        assert one.response_ids == two.response_ids
        assert one.prompt_ids == two.prompt_ids
        for sample in (one, two):
            judge.agree(prompts[i // 4], sample)


@pytest.mark.parametrize("stale", [False, True])
def test_images_seen_before_are_tried_after_new_weights(stale: bool) -> None:
    """The fault of stock servers, planted: the embedding of an image, once made, is kept. From
    outside it looks as if the first answer to a picture were kept."""
    render = renderer("qwen2_5_vl")
    kept: dict[str, Any] = {}
    keys: list[str] = []

    def received(prompt: Prompt) -> Prompt:
        keys.append(prompt.key)
        return prompt

    def answered(answer: dict[str, Any]) -> dict[str, Any]:
        old = kept.setdefault(keys[-1], answer)
        if not stale:
            return answer
        ids, meta = old["output_ids"], answer["meta_info"]
        span = {"version": meta["weight_version"], "start": 0, "end": len(ids)}
        names = ("output_token_logprobs", "finish_reason", "completion_tokens")
        meta |= {name: old["meta_info"][name] for name in names} | {"weight_versions": [span]}
        return {**answer, "output_ids": ids, "meta_info": meta}

    async def story() -> Probed:
        async with opened("serve", "qwen2_5_vl", Fault(received, answered)) as engine:
            rollouts = VLMRolloutEngine(engine, render)
            policy = trained("qwen2_5_vl", tiny("qwen2_5_vl"))
            versions = iter(range(9))

            async def send(turn: bool) -> None:
                def named() -> Any:
                    own = named_parameters(policy.hf)
                    if turn:
                        own = turned_projector(own, render.family)
                    return published(policy.hf, render.family, own)

                await engine.pause()
                await engine.update_weights(Tensors(named), f"probe {next(versions)}")
                await engine.resume()

            return await probe_images(rollouts, send)

    if stale:
        with pytest.raises(EngineRefused, match="keeps image embeddings of old weights"):
            asyncio.run(story())
        return
    found = asyncio.run(story())
    assert max(found.stale, found.noise) * CLEAR < found.moved
