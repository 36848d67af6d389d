"""Several engines as one: requests are spread over them, control calls go to each."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from vireo.rollout.engine import (
    EngineError,
    EngineGone,
    Health,
    PauseMode,
    RolloutEngine,
    Tag,
)
from vireo.rollout.sample import Generation, Request
from vireo.weights.source import Weights

_GROUPS = 10_000  # whose engine is remembered
_AGAIN_S = 1.0  # between two looks whether an engine has come back


class SeveralEngines(RolloutEngine):
    """Requests of one group stay on one engine, the one with the fewest when the group began.

    An engine that is gone gets no more of them until all are started anew; what it had not answered
    is sent to another one, once. EngineGone: none is left.

    `patience`: seconds that one which is gone may take to answer again, restarted by somebody. It
    gets the last weights and joins the others; requests wait for it where none is left.
    """

    def __init__(self, engines: Sequence[RolloutEngine], patience: float = 0.0):
        super().__init__()
        self.engines, self.patience = list(engines), patience
        self.form = self.engines[0].form
        self._last: tuple[Weights, str] | None = None  # that were sent
        self._asleep = self._paused = False
        self._turn = asyncio.Lock()  # of calls that change what all of them do
        self._changed = asyncio.Event()
        self._coming: dict[RolloutEngine, asyncio.Task[None]] = {}
        self._gone: dict[RolloutEngine, str] = {}  # and why
        self._homes: dict[str, RolloutEngine] = {}
        self._load: Counter[RolloutEngine] = Counter()

    @property
    def seeds(self) -> bool:
        """All of them honour seeds."""
        return all(getattr(engine, "seeds", True) for engine in self.engines)

    async def start(self) -> None:
        self._gone.clear()
        try:
            await asyncio.gather(*(engine.start() for engine in self.engines))
        except BaseException:
            await self.close()
            raise
        self._follow()

    async def close(self) -> None:
        for task in self._coming.values():
            task.cancel()
        self._coming.clear()
        await asyncio.gather(*(engine.close() for engine in self.engines))

    async def generate(self, request: Request) -> Generation:
        for last in (False, True):
            while self._coming and len(self._gone) == len(self.engines):
                self._changed.clear()
                await self._changed.wait()
            engine = self._engine(request.group or request.rid)
            self._load[engine] += 1
            try:
                return await engine.generate(request)
            except EngineGone as error:
                self._lose(engine, error)
                if last:
                    raise
            finally:
                self._load[engine] -= 1
        raise AssertionError("not reached")

    async def update_weights(self, weights: Weights, version: str) -> None:
        # One after the other: tensors may come out of collective calls, which must keep an order.
        async with self._turn:
            self._last = weights, version
            for engine in self._alive():
                try:
                    await engine.update_weights(weights, version)
                except EngineGone as error:
                    self._lose(engine, error)
                finally:
                    self._follow()
            self._alive()

    async def sleep(self, tags: Sequence[Tag] = ("kv_cache", "weights")) -> None:
        self._asleep = True
        await self._each(lambda engine: engine.sleep(tags))

    async def wake(self, tags: Sequence[Tag] = ("kv_cache", "weights")) -> None:
        await self._each(lambda engine: engine.wake(tags))
        self._asleep = "kv_cache" not in tags

    async def pause(self, mode: PauseMode = "abort") -> None:
        self._paused = True
        await self._each(lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        await self._each(lambda engine: engine.resume())
        self._paused = False
        self._changed.set()

    async def abort(self, rids: Sequence[str] | None = None) -> None:
        await self._each(lambda engine: engine.abort(rids))

    async def health(self) -> Health:
        """Ready if all that are left are; `why` also tells of those that are gone."""
        left = [engine for engine in self.engines if engine not in self._gone]
        found = await asyncio.gather(*(engine.health() for engine in left))
        why = [*self._gone.values(), *(one.why for one in found if one.why)]
        ready = bool(found) and all(one.ready for one in found)
        weights = ", ".join(dict.fromkeys(one.weights for one in found))
        server = ", ".join(dict.fromkeys(one.server for one in found))
        return Health(ready, self.state.name, weights, server, "; ".join(why))

    async def look(self, request: Request) -> dict[str, Any]:
        return await self._engine(request.group or request.rid).look(request)

    async def checksums(self) -> dict[str, str]:
        found = [await engine.checksums() for engine in self._alive()]
        if any(sums != found[0] for sums in found):
            raise EngineError("the servers have different weights, by their checksums")
        return found[0]

    def _engine(self, group: str) -> RolloutEngine:
        alive = self._alive()
        if len({engine.weights for engine in alive}) > 1:
            raise EngineError("the servers have different weights; send all of them new ones first")
        if self._homes.get(group) not in alive:
            self._homes[group] = min(alive, key=lambda engine: self._load[engine])
            if len(self._homes) > _GROUPS:
                del self._homes[next(iter(self._homes))]
        return self._homes[group]

    def _alive(self) -> list[RolloutEngine]:
        """EngineGone: none is left, and none is waited for."""
        alive = [engine for engine in self.engines if engine not in self._gone]
        if not alive and not self._coming:
            raise EngineGone(f"no server is left: {'; '.join(self._gone.values())}")
        return alive

    def _lose(self, engine: RolloutEngine, error: EngineGone) -> None:
        self._gone.setdefault(engine, str(error))
        if self.patience and engine not in self._coming:
            self._coming[engine] = asyncio.create_task(self._come_back(engine))
        if len(self._gone) < len(self.engines):
            self._follow()

    async def _come_back(self, engine: RolloutEngine) -> None:
        """Until it answers and has the weights and the state of the others, or patience ends."""
        until = time.monotonic() + self.patience
        while time.monotonic() < until:
            await asyncio.sleep(_AGAIN_S)
            if self._paused or self._asleep:  # it would take memory that is somebody else's
                continue
            try:
                await engine.start()
                async with self._turn:
                    if self._paused or self._asleep:
                        continue
                    if self._last is not None:
                        await engine.update_weights(*self._last)
                    del self._gone[engine]
                    self._follow()
                break
            except EngineError as error:
                self._gone[engine] = str(error)
        del self._coming[engine]
        self._changed.set()

    def _follow(self) -> None:
        """All that are left are in one state, which is this engine's."""
        first = next(iter(self._alive()), None)
        if first is None:
            return
        self.state, self.weights, self.form = first.state, first.weights, first.form

    async def _each(self, call: Callable[[RolloutEngine], Awaitable[None]]) -> None:
        alive = self._alive()
        results = await asyncio.gather(*map(call, alive), return_exceptions=True)
        for engine, result in zip(alive, results):
            if isinstance(result, EngineGone):
                self._lose(engine, result)
            elif isinstance(result, BaseException):
                raise result
        self._alive()
