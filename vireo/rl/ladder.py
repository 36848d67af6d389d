"""The ladder: from the ids of a prompt up to log-probabilities, where do engine and trainer part?

Each rung compares one thing that both have, and the climb ends at the first that differs. What an
engine does not show is unseen, never passed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from PIL import Image as Pil
from torch import Tensor

from vireo.data.conversation import Conversation
from vireo.data.prompt import Prompt
from vireo.rl.attribution import MOST, Tried, attribute, explain, gap, noise_floor, scored
from vireo.rl.mismatch import NEAR
from vireo.rl.swaps import Pair, Trainer, in_format, with_pictures
from vireo.rollout.bridge import own_seed
from vireo.rollout.contract import ContractError, check
from vireo.rollout.embedded import EmbeddedEngine
from vireo.rollout.engine import RolloutEngine
from vireo.rollout.sample import Generation, Request, Sample, Sampling
from vireo.weights.receive import Receiver

# Largest ||a - b|| / ||b|| of the embeddings of a prompt's pictures. bf16: those of a picture alone
# and beside others are 0.022 apart (Qwen2.5-VL-3B's shape, one H200).
EMBEDDINGS = {torch.float32: 1e-4, torch.bfloat16: 0.1}

State = Literal["equal", "differs", "unseen", "says nothing", "not reached"]
Found = tuple[State, str]


@dataclass(frozen=True)
class Rung:
    """`found`: what was compared, or where the first difference is."""

    name: str
    state: State
    found: str = ""


@dataclass
class Report:
    """`base`: the gap as both score; `tried`: under each swap; `says` and `causes`: see `explain`.
    `tokens`: (kind, place in the response, engine's, trainer's log-prob) of each token."""

    engine: str
    rungs: list[Rung]
    base: Tried
    tried: list[Tried]
    says: str
    causes: list[str]
    tokens: list[tuple[str, int, float, float]]

    @property
    def agrees(self) -> bool:
        return not any(rung.state == "differs" for rung in self.rungs)

    @property
    def verdict(self) -> str:
        parted = [f"parts at {rung.name}" for rung in self.rungs if rung.state == "differs"]
        return f"{(parted or ['nothing differs'])[0]}; {self.says}"


async def climb(
    engine: RolloutEngine,
    trainer: Trainer,
    rows: Sequence[Conversation],
    sampling: Sampling,
    update: Callable[[], Awaitable[None]] | None = None,
) -> Report:
    """Let a started engine answer the rows and compare it with the trainer, rung by rung.

    `update` sends the engine the trainer's weights. It is asked once before that, so that whatever
    it keeps of pictures is of the weights that it had.
    """
    run = _Climb(engine, trainer, sampling, [trainer.renderer.rollout(row) for row in rows])
    before = await run.ask(run.prompts) if update else None
    if update:
        await update()
    await run.compare(before)
    rungs: list[Rung] = []
    for name, step in run.steps():
        parted = any(rung.state == "differs" for rung in rungs)
        rungs.append(Rung(name, "not reached") if parted else Rung(name, *await step()))
    tried = [] if run.base.is_noise else attribute(trainer, run.pairs, run.base.floor)
    health = await engine.health()
    tokens = [
        ("text" if not p.pictures else "image_first" if i < NEAR else "image_later", i, g, t)
        for (p, sample), one in zip(run.pairs, run.logprobs)
        for i, (g, t) in enumerate(zip(sample.logprobs, one.tolist()))
    ]
    says, causes = explain(run.base, tried)
    name = f"{health.server}, weights {health.weights}"
    return Report(name, rungs, run.base, tried, says, causes, tokens)


class _Climb:
    def __init__(
        self, engine: RolloutEngine, trainer: Trainer, sampling: Sampling, prompts: list[Prompt]
    ):
        self.engine, self.trainer, self.sampling = engine, trainer, sampling
        self.prompts, self._looks = prompts, list[dict[str, Any]]()

    def request(self, prompt: Prompt, number: int) -> Request:
        made, seed = self.trainer.renderer, self.sampling.seed
        own = None if seed is None else own_seed(seed, str(number), 0)
        sampling = replace(self.sampling, seed=own)
        return Request(prompt, sampling, made.stop_ids, made.banned_ids, group=str(number))

    async def ask(self, prompts: Sequence[Prompt]) -> list[Generation]:
        requests = [self.request(prompt, i) for i, prompt in enumerate(prompts)]
        return await asyncio.gather(*map(self.engine.generate, requests))

    def pair(self, prompt: Prompt, got: Generation) -> Pair:
        assert prompt.row is not None
        sample = Sample("", 0, prompt.row, prompt.expanded, got.ids, got.logprobs)
        return prompt, replace(sample, mask=[1] * len(got.ids), sampling=self.sampling)

    async def compare(self, before: list[Generation] | None) -> None:
        """What the engine answers, and what the trainer makes of it. `before`: the answers before
        an update."""
        self.got = await self.ask(self.prompts)
        self.pairs = list(map(self.pair, self.prompts, self.got))
        rows = list(map(self.trainer.row, self.pairs))
        self.logprobs = scored(self.trainer, rows)
        floor = noise_floor(self.trainer, self.pairs, rows, self.logprobs)
        self.base = Tried("as in training", "", gap(self.pairs, self.logprobs), floor, 0)
        self.silent = "no weights were sent between (see --update)" if before is None else ""
        if before and [one.logprobs for one in before] == [one.logprobs for one in self.got]:
            self.silent = "the weights that were sent changed nothing"

    def steps(self) -> Iterator[tuple[str, Callable[[], Awaitable[Found]]]]:
        keys = self.trainer.renderer.family.keys
        values = [(n, v) for p in self.prompts for n, v in p.example.fields.items() if n in keys]
        floats = {name for name, value in values if value.is_floating_point()}
        others = {name for name, _ in values} - floats
        yield "ids and response", self.ids
        if floats:
            yield "pixels", partial(self.fields, sorted(floats))
        if others:
            yield "other keys", partial(self.fields, sorted(others))
        yield "positions", partial(self.fields, ["positions"])
        yield "weights", self.weights
        if any(prompt.pictures for prompt in self.prompts):
            yield "repeated image", self.repeated
            yield "embeddings", self.embeddings
        yield "log-probs", self.agree

    async def ids(self) -> Found:
        """The expanded ids of the prompt, and all else that a response must keep."""
        words = self.trainer.renderer.config.get_text_config().vocab_size
        for i, (prompt, got) in enumerate(zip(self.prompts, self.got)):
            try:
                if got.prompt_ids is None:
                    got = replace(got, prompt_ids=prompt.expanded)
                check(self.where(i), self.request(prompt, i), got, words)
            except ContractError as error:
                return "differs", str(error)
        if any(got.prompt_ids is None for got in self.got):
            return "unseen", "the engine does not say which prompt ids it saw"
        return "equal", f"{sum(len(p.expanded) for p in self.prompts)} ids of prompts"

    async def fields(self, names: list[str]) -> Found:
        """Tensors of the model's input, bit for bit."""
        compared: set[str] = set()
        for i, (prompt, look) in enumerate(zip(self.prompts, await self.looks())):
            for name in look.keys() & prompt.example.fields.keys() & set(names):
                compared.add(name)
                if place := _differ(look[name], prompt.example.fields[name]):
                    return "differs", f"{self.where(i)}: {name} {place}"
        if missing := [name for name in names if name not in compared]:
            return "unseen", f"the engine does not show {', '.join(missing)}"
        return "equal", ", ".join(names)

    async def weights(self) -> Found:
        """The version of every token, and checksums in either number format."""
        versions, now = {v for got in self.got for v, _ in got.spans}, self.engine.weights
        if versions - {now}:
            seen = ", ".join(sorted(versions))
            return "differs", f"tokens are of weights {seen}, the engine has {now}"
        theirs = await self.engine.checksums()
        if not theirs:
            return "unseen", f"version {now}; the engine shows no checksums"
        policy = self.trainer.policy
        own = next(policy.parameters()).dtype
        found: list[tuple[int, str]] = []
        for dtype in dict.fromkeys((own, torch.float32, torch.bfloat16)):
            with in_format(policy, dtype):
                ours = await asyncio.to_thread(Receiver(policy.hf, policy.family).checksums)
            if ours.keys().isdisjoint(theirs):
                return "unseen", f"version {now}; the engine's checksums are of tensors of its own"
            apart = sorted(n for n in ours | theirs if ours.get(n) != theirs.get(n))
            if not apart:
                return "equal", f"version {now}, {len(ours)} checksums"
            first = apart[0]
            values = f"{theirs.get(first)} in the engine, {ours.get(first)} in the trainer"
            of = f"{len(apart)} of {len(ours)} tensors"
            found.append((len(apart), f"{of}, the first is {first}: {values}"))
        return "differs", min(found, key=lambda one: one[0])[1]

    async def repeated(self) -> Found:
        """Pictures that the engine has seen before, and the same with one grey level of one pixel
        changed, which nothing can have kept: both must be as near to the trainer."""
        seen = [prompt for prompt in self.prompts if prompt.pictures]
        fresh = [never_seen(self.trainer, prompt) for prompt in seen]
        tried = []
        for prompts in (seen, fresh):
            pairs = list(map(self.pair, prompts, await self.ask(prompts)))
            logprobs = scored(self.trainer, list(map(self.trainer.row, pairs)))
            tried.append(replace(self.base, gap=gap(pairs, logprobs)))
        again, new = tried
        found = f"mult error - 1 is {again.mult:.2e}, with a grey level changed {new.mult:.2e}"
        if not again.is_noise and new.mult <= again.mult / MOST:
            return "differs", f"{found}: the engine keeps embeddings of old weights for pictures"
        return ("says nothing", f"{found}; {self.silent}") if self.silent else ("equal", found)

    async def embeddings(self) -> Found:
        """What the language model gets of pictures."""
        policy, largest, count = self.trainer.policy, 0.0, 0
        parameter = next(policy.parameters())
        limit = EMBEDDINGS[parameter.dtype]
        async with EmbeddedEngine(policy, self.trainer.renderer, parameter.device) as own:
            for i, (prompt, look) in enumerate(zip(self.prompts, await self.looks())):
                if "embeddings" not in look or not prompt.pictures:
                    continue
                theirs = look["embeddings"].float()
                ours = (await own.look(self.request(prompt, i)))["embeddings"].float()
                if theirs.shape != ours.shape:
                    return "differs", f"{self.where(i)}: {_differ(theirs, ours)}"
                apart = float((theirs - ours).norm() / ours.norm())
                largest, count = max(largest, apart), count + 1
                if not apart <= limit:
                    place = _differ(theirs, ours, worst=True)
                    return "differs", f"{self.where(i)}: {apart:.1%} apart; image token {place}"
        if not count:
            return "unseen", "the engine does not show them"
        return "equal", f"of {count} rows, at most {largest:.1e} apart (limit {limit:g})"

    async def agree(self) -> Found:
        base, floor = self.base, self.base.floor
        figures = (
            f"mult error - 1 is {base.mult:.2e}, the largest gap {base.gap['max_abs']:.2e} (the "
            f"trainer's own {floor['token_mult_prob_error'] - 1:.2e} and {floor['max_abs']:.2e})"
        )
        if base.is_noise:
            return "equal", figures
        _, i, place, g, t = max(
            (abs(g - t), i, place, g, t)
            for i, (got, one) in enumerate(zip(self.got, self.logprobs))
            for place, (g, t) in enumerate(zip(got.logprobs, one.tolist()))
        )
        token = self.trainer.renderer.tokenizer.decode([self.got[i].ids[place]])
        values = f"{g:.4f} by the engine, {t:.4f} by the trainer"
        most = f"most in {self.where(i)}, response token {place} {token!r}: {values}"
        return "differs", f"{figures}; {most}"

    async def looks(self) -> list[dict[str, Any]]:
        if not self._looks:
            requests = [self.request(prompt, i) for i, prompt in enumerate(self.prompts)]
            self._looks = [await self.engine.look(request) for request in requests]
        return self._looks

    def where(self, number: int) -> str:
        row = self.prompts[number].row
        return row.where if row and row.where else f"prompt {number}"


def never_seen(trainer: Trainer, prompt: Prompt) -> Prompt:
    """The prompt with one grey level of one pixel of each picture changed; with more of them where
    the processor's resize swallows that."""
    fields = prompt.example.fields
    for levels in (1, 32, 128):
        changed = with_pictures(trainer, prompt, [_shaded(p, levels) for p in prompt.pictures])
        if any(not fields[n].equal(v) for n, v in changed.example.fields.items()):
            break
    return changed


def _shaded(picture: Pil.Image, levels: int) -> Pil.Image:
    changed = picture.copy()
    red, green, blue = picture.getpixel((0, 0))  # type: ignore[misc]
    changed.putpixel((0, 0), (red + levels if red < 128 else red - levels, green, blue))
    return changed


def _differ(theirs: Tensor, ours: Tensor, worst: bool = False) -> str:
    """Where two tensors first (or most) differ, with both values; '' where they are equal."""
    if theirs.shape != ours.shape:
        return f"has shape {list(theirs.shape)} in the engine, {list(ours.shape)} in the trainer"
    ours = ours.to(theirs.dtype)  # which may be a smaller number format
    apart = (theirs != ours).flatten()
    if not apart.any():
        return ""
    order = (theirs - ours).abs().flatten() if worst else apart.int()
    at = tuple(int(i) for i in torch.unravel_index(order.argmax(), theirs.shape))
    values = f"{theirs[at].item():g} in the engine, {ours[at].item():g} in the trainer"
    return f"{list(at)}: {values} ({int(apart.sum())} of {len(apart)} values differ)"
