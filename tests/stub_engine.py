"""An engine without a model, for what stands round engines: its answers follow from the request."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from itertools import groupby
from typing import Any

from vireo.rollout.engine import EngineGone, Health, RolloutEngine
from vireo.rollout.sample import Generation, Request


def number(request: Request) -> int:
    """That of the prompt, from the name of its group."""
    return int(request.group.partition(".")[0])


class StubEngine(RolloutEngine):
    """A response has `length(request)` tokens, made of the seed and the prompt, then a stop token.

    One token a turn of the event loop; a request whose prompt number is in `held` stops after five
    until it is let go or aborted. `fail(request)` may raise; `live` requests are on their way,
    `most` were so at one time.
    """

    form = "embedded"

    def __init__(
        self,
        length: Callable[[Request], int] = lambda request: 3,
        fail: Callable[[Request], None] = lambda request: None,
    ):
        super().__init__()
        self.length, self.fail = length, fail
        self.live: dict[str, Request] = {}
        self.most, self.closed, self.aborts = 0, False, 0
        self.seen: list[Request] = []
        self.held: set[int] = set()
        self.stuck: set[str] = set()  # requests that were ever held
        self._aborted: set[str] = set()

    async def generate(self, request: Request) -> Generation:
        await self.state.for_request()
        self.seen.append(request)
        self.live[request.rid] = request
        self.most = max(self.most, len(self.live))
        try:
            return await self._answer(request)
        finally:
            del self.live[request.rid]
            self._aborted.discard(request.rid)

    async def _answer(self, request: Request) -> Generation:
        self.fail(request)
        said, finish = list(request.response), "stop"
        ids: list[int] = []
        versions: list[str] = []
        limit = min(self.length(request), request.sampling.max_new_tokens)
        while len(said) < limit and not self._gone(request):
            ids.append(self._token(request, len(said)))
            said.append(ids[-1])
            versions.append(self.weights)
            await asyncio.sleep(0)
            while len(said) == 5 and number(request) in self.held and not self._gone(request):
                self.stuck.add(request.rid)
                await asyncio.sleep(0)
        if self._gone(request):
            finish = "abort"
        elif limit == request.sampling.max_new_tokens:
            finish = "length"
        else:
            ids.append(request.stop_ids[0])
            versions.append(self.weights)
        await asyncio.sleep(0)
        return Generation(
            ids,
            [-0.5] * len(ids),
            finish,  # type: ignore[arg-type]
            [(version, len(list(run))) for version, run in groupby(versions)],
            prompt_ids=request.prompt.expanded + request.response,
        )

    def _gone(self, request: Request) -> bool:
        return request.rid in self._aborted

    def _token(self, request: Request, place: int) -> int:
        text = f"{request.prompt.key}/{request.sampling.seed}/{place}"
        banned = {*request.banned, *request.stop_ids}
        usable = [token for token in range(100, 300) if token not in banned]
        return usable[int(hashlib.sha256(text.encode()).hexdigest(), 16) % len(usable)]

    async def start(self) -> None:
        self.closed = False

    async def close(self) -> None:
        self.closed = True
        if self.live:
            raise EngineGone("closed with requests on their way")

    async def abort(self, rids: Any = None) -> None:
        self.aborts += 1
        self._aborted |= set(self.live if rids is None else rids)

    async def update_weights(self, weights: Any, version: str) -> None:
        self.weights = version

    async def sleep(self, tags: Any = ()) -> None:
        self.state.sleep(tags)

    async def wake(self, tags: Any = ()) -> None:
        self.state.wake(tags)

    async def pause(self, mode: str = "abort") -> None:
        self.state.pause()
        if mode == "abort":
            await self.abort()

    async def resume(self) -> None:
        self.state.resume()

    async def health(self) -> Health:
        return Health(True, self.state.name, self.weights, "stub 1")
