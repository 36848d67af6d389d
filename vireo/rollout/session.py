"""An engine at work beside a program that is no coroutine: its event loop has a thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from vireo.data.prompt import Prompt
from vireo.rollout.bridge import VLMRolloutEngine
from vireo.rollout.buffer import DataBuffer, Group
from vireo.rollout.engine import EngineError
from vireo.rollout.manager import RolloutManager
from vireo.weights.source import Weights

T = TypeVar("T")

_LOOK_S = 0.2  # how often a wait looks whether it is to stop
_MOST_DROPPED = 20  # batches of groups that filters may drop in a row


class RolloutSession:
    """Opened by `with`; then `manager` is set, which fills `buffer`.

    `ahead`: updates of the weights that generation may be ahead of training by. 0: it works only
    while `collect` waits. Otherwise it goes on meanwhile, and an update pauses it.
    """

    def __init__(self, rollouts: VLMRolloutEngine, buffer: DataBuffer, *, ahead: int = 0):
        self.rollouts, self.buffer, self.ahead = rollouts, buffer, ahead
        self.manager: RolloutManager | None = None
        self._versions: set[str] = set()  # that responses may come from
        self._loop = asyncio.new_event_loop()
        self._filling: concurrent.futures.Future[Any] | None = None

    def __enter__(self) -> RolloutSession:
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)
        self._thread.start()
        try:
            self._run(self.rollouts.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            if self._filling is not None:
                self._filling.cancel()
                concurrent.futures.wait([self._filling])
            self._run(self.rollouts.__aexit__(*error))
        finally:
            self._stop()

    def collect(
        self, groups: int, more: int = 0, *, stop: Callable[[], object] = lambda: None
    ) -> list[Group] | None:
        """`groups` finished groups, in the order of their prompts; None once `stop` says so.

        `more`: groups beyond these that are generated at the same time, for those that take long.
        Raises what ended generation; EngineError: filters drop nearly everything.
        """
        assert self.manager is not None
        dropped = self._dropped()
        if not self.ahead:
            work = self._filling = self._begin(self.manager.fill(groups, room=groups + more))
        else:
            if self._filling is None:
                room = max(groups + more, groups * self.ahead)
                self._filling = self._begin(self.manager.fill(room=room))
            work = self._begin(self.buffer.wait(groups))
        while not work.done():
            concurrent.futures.wait([work], timeout=_LOOK_S)
            if stop():
                work.cancel()
                return None
            self._check(self._dropped() - dropped, groups)
        work.result()
        return sorted(self._on_loop(lambda: self.buffer.get(groups)), key=lambda g: g[0].group)

    def prompt(self, group: str) -> Prompt | None:
        """What a collected group was made from, if it is still there; then it is the caller's."""
        assert self.manager is not None
        manager = self.manager
        return self._on_loop(lambda: manager.prompt(group))

    def update(self, weights: Weights, version: str) -> None:
        """New weights for the engine; with `ahead`, what is being generated goes on with them. An
        engine that sleeps is woken for them, and stays without its cache: see `rise`."""

        async def send() -> None:
            engine = self.rollouts.engine
            sleeps = engine.state.name == "released"
            if sleeps:
                await engine.wake(("weights",))
            else:
                await engine.pause("retract" if self.ahead else "abort")
            await engine.update_weights(weights, version)
            if not sleeps:
                await engine.resume()
            self.buffer.weights(version)
            self._versions = {*(self._versions if self.ahead else ()), version}
            self.rollouts.weights = self._versions

        self._run(send())

    def rest(self) -> None:
        """The engine gives its memory back: weights and cache."""

        async def rest() -> None:
            await self.rollouts.engine.pause("abort")
            await self.rollouts.engine.sleep()

        self._run(rest())

    def rise(self) -> None:
        """After `rest` and `update`: the engine takes memory for its cache, and answers again."""

        async def rise() -> None:
            await self.rollouts.engine.wake(("kv_cache",))
            await self.rollouts.engine.resume()

        self._run(rise())

    def fill(self, manager: RolloutManager) -> None:
        """All that another manager, of the same engine, has to generate: an evaluation."""
        self._run(manager.fill())

    def state(self) -> dict[str, Any]:
        return self._on_loop(self.buffer.state)

    def metrics(self) -> dict[str, float]:
        return self._on_loop(self.buffer.metrics)

    # -- the loop and its thread ---------------------------------------------------------------

    def _begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._begin(work).result()

    def _on_loop(self, call: Callable[[], T]) -> T:
        async def run() -> T:
            return call()

        return self._run(run())

    def _dropped(self) -> float:
        counts = self._on_loop(self.buffer.metrics)
        return sum(n for name, n in counts.items() if name.startswith("dropped/"))

    def _check(self, dropped: float, groups: int) -> None:
        if dropped >= _MOST_DROPPED * groups and not self.buffer.waiting:
            raise EngineError(
                f"--dynamic_sampling_filter dropped {dropped:.0f} groups in a row and kept none: "
                "the model gets all prompts right, or all wrong (see the metrics reward and "
                "groups/...); take other prompts or rewards, or leave the filter out"
            )

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
