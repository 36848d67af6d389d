"""The ladder: from the ids of a prompt up to log-probabilities, where do engine and trainer part?

Each rung compares one thing that both have, and the climb ends at the first that differs. What an
engine does not show is unseen, never passed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
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

# Largest ||a - b|| / ||a|| of vision embeddings. bf16: those of a picture alone and beside others
# are 0.022 apart; float32: 1e-6.
EMBEDDINGS = {torch.float32: 1e-4, torch.bfloat16: 0.1}

State = Literal["equal", "differs", "unseen", "says nothing", "not reached"]


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
    tokens: list[tuple[str, int, float, float]] = field(default_factory=list)

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

    `update` sends the engine the trainer's weights; it is asked once before that, so that whatever
    it keeps of pictures is of its weights until then.
    """
    prompts = [trainer.renderer.rollout(row) for row in rows]
    ask = _Asking(engine, trainer, sampling)
    before = None if update is None else await ask(prompts)
    if update is not None:
        await update()
    got = await ask(prompts)
    pairs = [ask.pair(prompt, one) for prompt, one in zip(prompts, got)]
    scoring = [trainer.row(pair) for pair in pairs]
    logprobs = scored(trainer, scoring)
    floor = noise_floor(trainer, pairs, scoring, logprobs)
    base = Tried("as in training", "", gap(pairs, logprobs), floor, 0)
    moved = before is not None and [b.logprobs for b in before] != [g.logprobs for g in got]
    steps = _Steps(ask, prompts, got, pairs, logprobs, base, update is not None, moved)
    rungs: list[Rung] = []
    for name, step in steps.all():
        parted = any(rung.state == "differs" for rung in rungs)
        rungs.append(Rung(name, "not reached") if parted else Rung(name, *await step()))
    tried = [] if base.is_noise else attribute(trainer, pairs, floor)
    health = await engine.health()
    return Report(
        f"{health.server}, weights {health.weights}",
        rungs,
        base,
        tried,
        *explain(base, tried),
        [
            ("text" if not p.pictures else "image_first" if i < NEAR else "image_later", i, g, t)
            for (p, s), one in zip(pairs, logprobs)
            for i, (g, t) in enumerate(zip(s.logprobs, one.tolist()))
        ],
    )


@dataclass
class _Asking:
    engine: RolloutEngine
    trainer: Trainer
    sampling: Sampling

    def request(self, prompt: Prompt, number: int) -> Request:
        made, seed = self.trainer.renderer, self.sampling.seed
        own = None if seed is None else own_seed(seed, str(number), 0)
        sampling = replace(self.sampling, seed=own)
        return Request(prompt, sampling, made.stop_ids, made.banned_ids, group=str(number))

    async def __call__(self, prompts: Sequence[Prompt]) -> list[Generation]:
        requests = [self.request(prompt, i) for i, prompt in enumerate(prompts)]
        return await asyncio.gather(*map(self.engine.generate, requests))

    def pair(self, prompt: Prompt, got: Generation) -> Pair:
        assert prompt.row is not None
        mask = [1] * len(got.ids)
        made = Sample("", 0, prompt.row, prompt.expanded, got.ids, got.logprobs, mask)
        return prompt, replace(made, sampling=self.sampling)


Found = tuple[State, str]


@dataclass
class _Steps:
    ask: _Asking
    prompts: list[Prompt]
    got: list[Generation]
    pairs: list[Pair]
    logprobs: list[Tensor]
    base: Tried
    updated: bool
    moved: bool  # the update changed the responses
    looks: list[dict[str, Any]] = field(default_factory=list)

    def all(self) -> Iterator[tuple[str, Callable[[], Awaitable[Found]]]]:
        yield "ids and response", self.ids
        keys = self.ask.trainer.renderer.family.keys
        values = [(n, v) for p in self.prompts for n, v in p.example.fields.items() if n in keys]
        floats = {n for n, v in values if v.is_floating_point()}
        others = {n for n, _ in values} - floats
        if floats:
            yield "pixels", lambda: self.fields(sorted(floats))
        if others:
            yield "other keys", lambda: self.fields(sorted(others))
        yield "positions", lambda: self.fields(["positions"])
        yield "weights", self.weights
        if any(prompt.pictures for prompt in self.prompts):
            yield "repeated image", self.repeated
            yield "embeddings", self.embeddings
        yield "log-probs", self.compared

    async def ids(self) -> Found:
        """The expanded ids of the prompt, and all else that a response must keep."""
        words = self.ask.trainer.renderer.config.get_text_config().vocab_size
        silent = 0
        for i, (prompt, got) in enumerate(zip(self.prompts, self.got)):
            if got.prompt_ids is None:
                silent += 1
                got = replace(got, prompt_ids=prompt.expanded)
            try:
                check(_where(prompt, i), self.ask.request(prompt, i), got, words)
            except ContractError as error:
                return "differs", str(error)
        if silent:
            return "unseen", "the engine does not say which prompt ids it saw"
        return "equal", f"{sum(len(p.expanded) for p in self.prompts)} ids of prompts"

    async def fields(self, names: list[str]) -> Found:
        """Tensors of the model's input, bit for bit."""
        compared: set[str] = set()
        for i, (prompt, look) in enumerate(zip(self.prompts, await self.looked())):
            for name in names:
                ours, theirs = prompt.example.fields.get(name), look.get(name)
                if ours is None or theirs is None:
                    continue
                compared.add(name)
                if place := _differ(theirs, ours):
                    return "differs", f"{_where(prompt, i)}: {name} {place}"
        if missing := [name for name in names if name not in compared]:
            return "unseen", f"the engine does not show {', '.join(missing)}"
        return "equal", ", ".join(names)

    async def weights(self) -> Found:
        """The version of every token, and checksums in either number format."""
        versions = sorted({version for got in self.got for version, _ in got.spans})
        now = self.ask.engine.weights
        if versions not in ([], [now]):
            return "differs", f"tokens are of weights {', '.join(versions)}, the engine has {now}"
        theirs = await self.ask.engine.checksums()
        if not theirs:
            return "unseen", f"version {now}; the engine shows no checksums"
        policy = self.ask.trainer.policy
        worst = None
        own = next(policy.parameters()).dtype
        for dtype in dict.fromkeys((own, torch.float32, torch.bfloat16)):
            with in_format(policy, dtype):
                ours = await asyncio.to_thread(Receiver(policy.hf, policy.family).checksums)
            apart = [n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n)]
            if not apart:
                return "equal", f"version {now}, {len(ours)} checksums"
            if worst is None or len(apart) < len(worst[0]):
                worst = sorted(apart), ours
        assert worst is not None
        first = worst[0][0]
        return "differs", (
            f"{len(worst[0])} of {len(worst[1])} tensors, the first is {first}: "
            f"{theirs.get(first)} in the engine, {worst[1].get(first)} in the trainer"
        )

    async def repeated(self) -> Found:
        """The pictures that the engine has seen before, and the same with one grey level of one
        pixel changed, which nothing can have kept: both must be as near to the trainer."""
        trainer = self.ask.trainer
        seen = [prompt for prompt in self.prompts if prompt.pictures]
        fresh = [with_pictures(trainer, p, list(map(_one_level_off, p.pictures))) for p in seen]
        tried = []
        for prompts in (seen, fresh):
            pairs = [self.ask.pair(p, g) for p, g in zip(prompts, await self.ask(prompts))]
            figures = gap(pairs, scored(trainer, [trainer.row(pair) for pair in pairs]))
            tried.append(replace(self.base, gap=figures))
        again, new = tried
        found = f"mult error - 1 is {again.mult:.2e}, with a grey level changed {new.mult:.2e}"
        if not again.is_noise and new.mult <= again.mult / MOST:
            return "differs", f"{found}: the engine keeps embeddings of old weights for pictures"
        if not self.updated:
            return "says nothing", f"{found}; no weights were sent between (see --update)"
        if not self.moved:
            return "says nothing", f"{found}; the weights that were sent changed nothing"
        return "equal", found

    async def embeddings(self) -> Found:
        """What the language model gets of pictures."""
        trainer, largest, count = self.ask.trainer, 0.0, 0
        dtype = next(trainer.policy.parameters()).dtype
        limit = EMBEDDINGS[dtype]
        device = next(trainer.policy.parameters()).device
        async with EmbeddedEngine(trainer.policy, trainer.renderer, device) as own:
            for i, (prompt, look) in enumerate(zip(self.prompts, await self.looked())):
                if not prompt.pictures or "embeddings" not in look:
                    continue
                theirs = look["embeddings"].float()
                ours = (await own.look(self.ask.request(prompt, i)))["embeddings"].float()
                if theirs.shape != ours.shape:
                    shapes = f"{list(theirs.shape)} in the engine, {list(ours.shape)}"
                    return "differs", f"{_where(prompt, i)}: {shapes} in the trainer"
                apart = float((theirs - ours).norm() / ours.norm())
                largest, count = max(largest, apart), count + 1
                if not apart <= limit:
                    place = _differ(theirs, ours, worst=True)
                    return "differs", f"{_where(prompt, i)}: {apart:.1%} apart; image token {place}"
        if not count:
            return "unseen", "the engine does not show them"
        return "equal", f"of {count} rows, at most {largest:.1e} apart (limit {limit:g})"

    async def compared(self) -> Found:
        floor = self.base.floor
        figures = (
            f"mult error - 1 is {self.base.mult:.2e}, largest {self.base.gap['max_abs']:.2e} (the "
            f"trainer's own {floor['token_mult_prob_error'] - 1:.2e} and {floor['max_abs']:.2e})"
        )
        if self.base.is_noise:
            return "equal", figures
        apart = [
            (abs(g - t), i, place, g, t)
            for i, ((_, sample), one) in enumerate(zip(self.pairs, self.logprobs))
            for place, (g, t) in enumerate(zip(sample.logprobs, one.tolist()))
        ]
        _, i, place, g, t = max(apart)
        token = self.ask.trainer.renderer.tokenizer.decode([self.got[i].ids[place]])
        return "differs", (
            f"{figures}; most in {_where(self.prompts[i], i)}, response token {place} {token!r}: "
            f"{g:.4f} by the engine, {t:.4f} by the trainer"
        )

    async def looked(self) -> list[dict[str, Any]]:
        if not self.looks:
            for i, prompt in enumerate(self.prompts):
                self.looks.append(await self.ask.engine.look(self.ask.request(prompt, i)))
        return self.looks


def _where(prompt: Prompt, number: int) -> str:
    where = prompt.row.where if prompt.row else ""
    return where or f"prompt {number}"


def _one_level_off(picture: Any) -> Any:
    changed = picture.copy()
    red, *rest = changed.getpixel((0, 0))
    changed.putpixel((0, 0), (red + 1 if red < 255 else 254, *rest))
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
    place = torch.unravel_index(order.argmax(), theirs.shape)
    at = tuple(int(i) for i in place)
    values = f"{theirs[at].item():g} in the engine, {ours[at].item():g} in the trainer"
    return f"{list(at)}: {values} ({int(apart.sum())} of {len(apart)} values differ)"
