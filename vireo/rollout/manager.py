"""Prompts become groups of samples in a buffer: rendered ahead, generated, rewarded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from vireo.data.conversation import Conversation
from vireo.data.prompt import Prompt
from vireo.data.references import fetched
from vireo.errors import RowError
from vireo.rewards import Rewards
from vireo.rollout.bridge import VLMRolloutEngine
from vireo.rollout.buffer import DataBuffer, Work
from vireo.rollout.engine import EngineError
from vireo.rollout.sample import Sample, Sampling

_AHEAD = 8  # groups that are rendered before their turn
_THREADS = 4  # that render
_MOST_ABORTS = 100  # of one sample, by nobody's wish here
_AGAIN_S = 0.2  # between aborts, for requests that were on their way to the engine


class Prompts(Protocol):
    """The prompt source: number i is always the same row."""

    def __getitem__(self, i: int, /) -> Conversation: ...


class RolloutManager:
    """Fills `buffer` with groups of `n` samples each.

    `at_once`: groups that are generated at a time. `rewards` are given to finished groups.
    `longest`: most tokens of a prompt. `fetch`: get images by URL. `told` is called after each
    group that was put. `refused` is told of a prompt that cannot be rendered, which is then left
    out (None: that is an error). `keep`: how many prompts, of the groups that came last, `prompt`
    has.

    The first error in rendering, generation or a reward ends `fill` with its own traceback.
    """

    def __init__(
        self,
        rollouts: VLMRolloutEngine,
        buffer: DataBuffer,
        prompts: Prompts,
        sampling: Sampling,
        n: int = 1,
        *,
        at_once: int = 64,
        rewards: Rewards | None = None,
        longest: int | None = None,
        fetch: bool = False,
        told: Callable[[], None] | None = None,
        refused: Callable[[RowError], None] | None = None,
        keep: int = 0,
    ):
        self.rollouts, self.buffer, self.prompts = rollouts, buffer, prompts
        self.sampling, self.n, self.at_once = sampling, n, at_once
        self.rewards, self.fetch, self.told, self.refused = rewards, fetch, told, refused
        self.longest = longest
        self.keep, self._kept = keep, dict[str, Prompt]()
        self._reading = threading.Lock()
        self._stopping = False

    async def fill(self, groups: int | None = None, *, room: int | None = None) -> None:
        """Generate until `groups` wait in the buffer, or no prompt is left (None: only then).

        `room`: groups that wait or are generated at most (None: any number). More than `groups`
        are more than a step needs (over-sampling): those that finish too stay for the next step,
        the others are aborted and come back to the buffer as partial. Without `groups`, and beside
        a trainer that takes groups out, `room` says how far generation runs ahead.
        """
        self._rendering, self._generating = (
            asyncio.Semaphore(_THREADS),
            asyncio.Semaphore(self.at_once),
        )
        self._stopping, first = False, None
        with self.buffer.filling():
            try:
                async with asyncio.TaskGroup() as self._tasks:
                    await self._pump(groups, room)
            except BaseExceptionGroup as several:
                first = several.exceptions[0]
            if first is not None:
                raise first

    async def _pump(self, groups: int | None, room: int | None) -> None:
        running: set[asyncio.Task[None]] = set()
        exhausted = False
        while groups is None or self.buffer.waiting < groups:
            changed = self.buffer.changed()
            while len(running) < self.at_once + _AHEAD and (
                room is None or self.buffer.waiting + len(running) < room
            ):
                work = self.buffer.next()
                exhausted = work is None
                if work is None:
                    break
                running.add(self._tasks.create_task(self._group(work)))
            if exhausted and not running:
                return
            await asyncio.wait({changed, *running}, return_when=asyncio.FIRST_COMPLETED)
            running = {task for task in running if not task.done()}
        self._stopping = True
        while running:
            await self.rollouts.engine.abort()
            _, running = await asyncio.wait(running, timeout=_AGAIN_S)

    async def _group(self, work: Work) -> None:
        try:
            async with self._rendering:
                prompt = None if self._stopping else await asyncio.to_thread(self._render, work)
        except RowError as error:
            if self.refused is None:
                raise
            self.buffer.refuse(work)
            self.refused(error)
            return
        async with self._generating:
            if prompt is None or self._stopping:
                self.buffer.put_back(work)
                return
            samples = work.samples or [
                self.rollouts.new(prompt, self.sampling, work.group, i) for i in range(self.n)
            ]
            tasks = [self._tasks.create_task(self._sample(prompt, sample)) for sample in samples]
            group = await asyncio.gather(*tasks)
            if self.rewards is not None and all(sample.status == "done" for sample in group):
                await self.rewards(group)
            self._kept[work.group] = prompt
            while len(self._kept) > self.keep:
                del self._kept[next(iter(self._kept))]
            self.buffer.put(group)
        if self.told is not None:
            self.told()

    def prompt(self, group: str) -> Prompt | None:
        """What a group of the last ones was made from; the caller's from here on."""
        return self._kept.pop(group, None)

    def _render(self, work: Work) -> Prompt:
        if work.samples:
            row = work.samples[0].conversation
        else:
            assert work.number is not None  # else it has samples
            with self._reading:  # one file, one place in it
                row = self.prompts[work.number]
        if self.fetch:
            row = replace(row, images=tuple(fetched(ref) for ref in row.images))
        prompt = self.rollouts.renderer.rollout(row)
        if self.longest is not None and len(prompt.example) > self.longest:
            raise RowError(
                "too_long",
                f"the prompt has {len(prompt.example)} tokens, and at most {self.longest} leave "
                "room for a response: raise --max_prompt_len or --max_length, or lower "
                "--rollout_max_response_len",
                row.where,
            )
        return prompt

    async def _sample(self, prompt: Prompt, sample: Sample) -> Sample:
        aborts = 0
        while sample.status != "done" and not self._stopping:
            sample = await self.rollouts.fill(prompt, sample)
            aborts += sample.status != "done" and not self._stopping
            if aborts > _MOST_ABORTS:
                raise EngineError(f"{sample.name}: the engine aborted it {aborts} times by itself")
        return sample
