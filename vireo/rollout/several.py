"""Several engines as one: requests are spread over them, control calls go to each."""

from __future__ import annotations

import asyncio
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


class SeveralEngines(RolloutEngine):
    """Requests of one group stay on one engine, the one with the fewest when the group began.

    An engine that is gone gets no more of them until all are started anew; what it had not answered
    is sent to another one, once. EngineGone: none is left.
    """

    def __init__(self, engines: Sequence[RolloutEngine]):
        super().__init__()
        self.engines = list(engines)
        self.form = self.engines[0].form
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
        await asyncio.gather(*(engine.close() for engine in self.engines))

    async def generate(self, request: Request) -> Generation:
        for last in (False, True):
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
        for engine in self._alive():
            try:
                await engine.update_weights(weights, version)
            except EngineGone as error:
                self._lose(engine, error)
            finally:
                self._follow()
        self._alive()

    async def sleep(self, tags: Sequence[Tag] = ("kv_cache", "weights")) -> None:
        await self._each(lambda engine: engine.sleep(tags))

    async def wake(self, tags: Sequence[Tag] = ("kv_cache", "weights")) -> None:
        await self._each(lambda engine: engine.wake(tags))

    async def pause(self, mode: PauseMode = "abort") -> None:
        await self._each(lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        await self._each(lambda engine: engine.resume())

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
        alive = [engine for engine in self.engines if engine not in self._gone]
        if not alive:
            raise EngineGone(f"no server is left: {'; '.join(self._gone.values())}")
        return alive

    def _lose(self, engine: RolloutEngine, error: EngineGone) -> None:
        self._gone.setdefault(engine, str(error))
        if len(self._gone) < len(self.engines):
            self._follow()

    def _follow(self) -> None:
        """All that are left are in one state, which is this engine's."""
        first = self._alive()[0]
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
