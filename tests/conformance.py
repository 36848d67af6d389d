"""What every rollout engine must do, run against each of them.

`tests/test_conformance.py` runs it for the embedded engine and for `vireo serve`. Stock servers:

    python -m tests.conformance --engine sglang --model MODEL [--sglang_url URL] [--sglang-NAME V]
    python -m tests.conformance --engine vllm --model MODEL --vllm_url URL

`--limit`: largest mean |difference| of log-probabilities between engine and trainer, in nats.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import PIL.Image
import torch

from vireo.data.conversation import Conversation, Image, ImageRef, Text, Turn
from vireo.data.prompt import Prompt
from vireo.data.ragged import Batch
from vireo.data.render import Renderer
from vireo.data.response import with_response
from vireo.errors import InputError
from vireo.models.build import whole_model
from vireo.models.heads import Softmax
from vireo.models.names import named_parameters
from vireo.models.policy import Policy
from vireo.rollout.bridge import VLMRolloutEngine
from vireo.rollout.engine import RolloutEngine, WrongOrder
from vireo.rollout.probe import probe_images, turned_projector
from vireo.rollout.sample import Request, Sample, Sampling
from vireo.weights.named import published
from vireo.weights.source import Folder, Tensors

GREEDY = Sampling(max_new_tokens=8, temperature=0.0)


def row(number: int, images: int, text: str = "What is it?", size: int = 56) -> Conversation:
    draw = np.random.default_rng(number)
    pictures = [
        PIL.Image.fromarray(draw.integers(0, 256, (size, size + 28 * i, 3), dtype=np.uint8))
        for i in range(images)
    ]
    parts = (*(Image(i) for i in range(images)), Text(text))
    return Conversation(
        (Turn("user", parts),), tuple(map(ImageRef, pictures)), where=f"row {number}"
    )


@dataclass
class Suite:
    """`policy` is the trainer's model; `limit` the largest mean |difference| of log-probs.

    `other`: a model folder of the same shapes with other weights, and `other_policy` that model.
    `seeds`: whether the engine honours seeds. `sleeps`: whether it can give memory back.
    `other_tensors`: whether it takes tensors over shared memory.
    """

    engine: RolloutEngine
    renderer: Renderer
    policy: Policy
    limit: float
    model: str
    other: str
    other_policy: Policy
    seeds: bool = True
    sleeps: bool = True
    tensors: bool = True
    images: int = 1
    rollouts: VLMRolloutEngine = field(init=False)

    def __post_init__(self) -> None:
        self.rollouts = VLMRolloutEngine(self.engine, self.renderer)

    # -- helpers ------------------------------------------------------------------------------

    def prompt(self, number: int, images: int | None = None) -> Prompt:
        return self.renderer.rollout(row(number, self.images if images is None else images))

    def request(self, prompt: Prompt, sampling: Sampling, **changes: object) -> Request:
        made = Request(prompt, sampling, self.renderer.stop_ids, self.renderer.banned_ids)
        return replace(made, **changes)  # type: ignore[arg-type]

    def scored(self, prompt: Prompt, sample: Sample, policy: Policy | None = None) -> torch.Tensor:
        example = with_response(prompt.example, sample.response_ids, self.renderer.positions)
        softmax = Softmax(sample.sampling.softmax_temperature, self.renderer.banned_ids)
        policy = policy or self.policy
        device = next(policy.parameters()).device
        with torch.no_grad():
            inputs = Batch.of([example]).to(device).pad(self.renderer.pad_id)
            return policy(inputs, softmax).float().cpu()

    def agree(self, prompt: Prompt, sample: Sample, policy: Policy | None = None) -> None:
        gap = (torch.tensor(sample.logprobs) - self.scored(prompt, sample, policy)).abs()
        assert gap.mean() <= self.limit, f"log-probs differ by {gap.mean():.2e}: {gap.tolist()}"

    async def asked(self, prompt: Prompt, sampling: Sampling, name: str) -> Sample:
        return (await self.rollouts.samples(prompt, sampling, group=name))[0]

    # -- what must hold -----------------------------------------------------------------------

    async def greedy_is_the_trainers(self) -> None:
        prompts = [self.prompt(n) for n in range(3)] + [self.prompt(9, 0)]
        got = await asyncio.gather(*(self.asked(p, GREEDY, f"g{i}") for i, p in enumerate(prompts)))
        for prompt, sample in zip(prompts, got):
            self.agree(prompt, sample)

    async def several_images(self) -> None:
        if self.images == 0:
            return
        prompt = self.prompt(5, 2)
        self.agree(prompt, await self.asked(prompt, GREEDY, "two"))

    async def sampled_logprobs_are_of_the_tempered_softmax(self) -> None:
        for temperature in (0.5, 1.0, 1.7):
            sampling = Sampling(12, temperature, seed=3)
            prompt = self.prompt(1)
            self.agree(prompt, await self.asked(prompt, sampling, f"t{temperature}"))

    async def seeds_repeat_and_differ(self) -> None:
        if not self.seeds:
            return
        prompt, sampling = self.prompt(1), Sampling(16, seed=11)
        first = await self.rollouts.samples(prompt, sampling, 4, group="seeded")
        again = await self.rollouts.samples(prompt, sampling, 4, group="seeded")
        assert [s.response_ids for s in first] == [s.response_ids for s in again]
        assert len({tuple(s.response_ids) for s in first}) > 1

    async def banned_tokens_never_come(self) -> None:
        banned = set(self.renderer.banned_ids)
        prompt, sampling = self.prompt(2), Sampling(32, temperature=2.0, seed=1)
        for sample in await self.rollouts.samples(prompt, sampling, 4, group="hot"):
            assert not banned & set(sample.response_ids)

    async def limits_and_stops(self) -> None:
        prompt = self.prompt(3)
        request = self.request(prompt, Sampling(5, 0.0), stop_ids=())
        got = await self.engine.generate(request)
        wanted = got.ids[0]
        assert got.finish == "length" or got.ids[-1] in self.renderer.stop_ids
        stopped = await self.engine.generate(
            self.request(prompt, Sampling(5, 0.0), stop_ids=(wanted,))
        )
        assert (stopped.ids, stopped.finish) == ([wanted], "stop")

    async def abort_returns_what_there_is(self) -> None:
        request = self.request(self.prompt(4), Sampling(400, seed=5), stop_ids=())
        waiting = asyncio.create_task(self.engine.generate(request))
        await asyncio.sleep(0.05)
        await self.engine.abort([request.rid])
        got = await asyncio.wait_for(waiting, 60)
        assert got.finish in ("abort", "length", "stop")
        assert len(got.ids) == len(got.logprobs)

    async def a_pause_holds_requests(self) -> None:
        await self.engine.pause()
        await self.engine.pause()
        waiting = asyncio.create_task(self.asked(self.prompt(4), GREEDY, "paused"))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await self.engine.resume()
        self.agree(self.prompt(4), await asyncio.wait_for(waiting, 60))

    async def new_weights_are_used(self) -> None:
        """Over a folder, and an image seen before is seen with the new weights."""
        prompt = self.prompt(6)
        before = await self.asked(prompt, GREEDY, "old")
        await self._updated(Folder(self.other), "two")
        after = await self.asked(prompt, GREEDY, "new")
        self.agree(prompt, after, self.other_policy)
        assert after.version == "two" != before.version
        await self._updated(Folder(self.model), "three")
        self.agree(prompt, await self.asked(prompt, GREEDY, "back"))

    async def tensors_are_used(self) -> None:
        if not self.tensors:
            return
        from safetensors.torch import load_file

        def named(folder: str) -> Callable:
            files = sorted(Path(folder).glob("*.safetensors"))
            return lambda: (item for file in files for item in load_file(file).items())

        prompt = self.prompt(6)
        await self._updated(Tensors(named(self.other)), "four")
        sample = await self.asked(prompt, GREEDY, "tensors")
        self.agree(prompt, sample, self.other_policy)
        await self._updated(Tensors(named(self.model)), "five")

        def wrong() -> Sequence[tuple[str, torch.Tensor]]:
            return [*named(self.model)(), ("model.layers.0.no_such.weight", torch.zeros(2))]

        with contextlib.suppress(InputError):
            await self._updated(Tensors(lambda: iter(wrong())), "six")
            raise AssertionError("a wrong name was not refused")
        self.agree(prompt, await self.asked(prompt, GREEDY, "kept"))

    async def images_follow_weights(self) -> None:
        """The repeated-image probe: a stock server keeps old embeddings unless told not to."""
        if not self.tensors or self.images == 0:
            return
        family, hf = self.renderer.family, self.policy.hf

        async def send(turn: bool) -> None:
            def named() -> Iterator[tuple[str, torch.Tensor]]:
                own: Iterable[tuple[str, torch.Tensor]] = named_parameters(hf)
                return published(hf, family, turned_projector(own, family) if turn else own)

            await self._updated(Tensors(named), f"probe-{turn}")

        print(f"  {await probe_images(self.rollouts, send)}")

    async def _updated(self, weights: Folder | Tensors, version: str) -> None:
        await self.engine.pause()
        try:
            await self.engine.update_weights(weights, version)
        finally:
            if self.engine.state.name == "paused":
                await self.engine.resume()

    async def sleep_and_wake_keep_their_order(self) -> None:
        if not self.sleeps:
            return
        await self._refused(self.engine.sleep())
        await self.engine.pause()
        await self.engine.sleep()
        await self.engine.sleep()
        await self._refused(self.engine.generate(self.request(self.prompt(1), GREEDY)))
        await self.engine.wake(["weights"])
        await self._refused(self.engine.resume())
        await self.engine.update_weights(Folder(self.model), "seven")
        await self.engine.wake(["kv_cache"])
        await self.engine.resume()
        self.agree(self.prompt(1), await self.asked(self.prompt(1), GREEDY, "awake"))

    async def _refused(self, call: Awaitable) -> None:
        try:
            await call
        except WrongOrder:
            return
        raise AssertionError("a call in the wrong order was not refused")

    async def health_says_how_it_is(self) -> None:
        health = await self.engine.health()
        assert (health.ready, health.state) == (True, "running"), health


CHECKS = [
    name
    for name, value in vars(Suite).items()
    if asyncio.iscoroutinefunction(value) and name[0] != "_" and name != "asked"
]


async def run(suite: Suite, engine: RolloutEngine, checks: Sequence[str]) -> int:
    failed = 0
    async with engine:
        suite.seeds = getattr(engine, "seeds", True)
        for name in checks:
            started = time.perf_counter()
            try:
                await getattr(suite, name)()
                verdict = "ok"
            except (AssertionError, Exception) as error:
                verdict, failed = f"FAILED {type(error).__name__}: {error}", failed + 1
            print(f"{name:<48} {time.perf_counter() - started:6.1f} s  {verdict}", flush=True)
    return failed


def main() -> int:
    from vireo.families.tiny import build
    from vireo.rollout.open import open_engine
    from vireo.settings.rollout import EngineSettings

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", required=True, choices=("embedded", "sglang", "vllm"))
    parser.add_argument("--model", help="default: a tiny Qwen2.5-VL is written")
    parser.add_argument("--other", help="the same shapes, other weights; default: shuffled signs")
    parser.add_argument("--sglang_url")
    parser.add_argument("--vllm_url")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--limit", type=float, default=1e-4)
    parser.add_argument("--only", choices=CHECKS, action="append", help="this one alone")
    parser.add_argument("--no_sleep", action="store_true")
    parser.add_argument("--no_tensors", action="store_true")
    given, rest = parser.parse_known_args()
    args = {a.removeprefix("--"): b for a, b in zip(rest[::2], rest[1::2])}
    with tempfile.TemporaryDirectory() as name:
        model = given.model or str(build("qwen2_5_vl", Path(name) / "model"))
        other = given.other or turned(model, Path(name) / "other")
        renderer = Renderer(model)
        dtype = torch.bfloat16 if given.dtype == "bf16" else torch.float32
        device = "cuda" if torch.cuda.is_available() else "cpu"
        policies = [trainer(renderer, folder, dtype, device) for folder in (model, other)]
        settings = EngineSettings(
            engine=given.engine,
            sglang_url=[given.sglang_url] if given.sglang_url else None,
            vllm_url=[given.vllm_url] if given.vllm_url else None,
            server_args=args,
        )
        engine = open_engine(settings, model, renderer, dtype=dtype)
        suite = Suite(
            *(engine, renderer, policies[0], given.limit, model, other, policies[1]),
            sleeps=not given.no_sleep,
            tensors=not given.no_tensors,
        )
        checks = given.only or CHECKS
        failed = asyncio.run(run(suite, engine, checks))
    print(f"{len(checks) - failed} of {len(checks)} hold")
    return 1 if failed else 0


def trainer(
    renderer: Renderer, folder: str, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Policy:
    """The trainer's model of a folder, to score with."""
    hf = whole_model(renderer.config, renderer.family, folder, dtype)
    return Policy(hf, renderer.family, None).to(device).eval()


def turned(model: str, out: Path) -> str:
    """A copy of a model whose projector and first decoder layer have the other sign."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(model, out)
    for file in out.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if "merger" in name or "layers.0.mlp" in name:
                tensors[name] = -tensor
        save_file(tensors, file, {"format": "pt"})
    return str(out)


if __name__ == "__main__":
    sys.exit(main())
