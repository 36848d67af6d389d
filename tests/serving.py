"""`vireo serve` inside a test: an engine behind its endpoints, on a real socket."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from vireo.data.render import Renderer
from vireo.rollout.engine import EngineGone, Health, PauseMode, RolloutEngine, WrongOrder
from vireo.rollout.sample import Generation, Request
from vireo.rollout.server import Server, bound, listen
from vireo.weights.source import Weights


@asynccontextmanager
async def serving(
    engine: RolloutEngine, renderer: Renderer, receiver: Any = None, **options: Any
) -> AsyncIterator[str]:
    """The URL of a server over `engine`; `options` are Server's."""
    with bound("127.0.0.1", 0) as sock:
        runner = await listen(Server(engine, renderer, receiver, **options), sock)
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            await runner.cleanup()


class Calls:
    """A session that posts JSON: answers are (status, JSON or text)."""

    def __init__(self, url: str, session: aiohttp.ClientSession):
        self.url, self.session = url, session

    async def post(self, path: str, body: Any = None, key: str = "") -> tuple[int, Any]:
        return await self._call("POST", path, key, json={} if body is None else body)

    async def get(self, path: str, key: str = "") -> tuple[int, Any]:
        return await self._call("GET", path, key)

    async def _call(self, method: str, path: str, key: str, **options: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        call = self.session.request(method, self.url + path, headers=headers, **options)
        async with call as response:
            is_json = response.content_type == "application/json"
            return response.status, await (response.json() if is_json else response.text())


@asynccontextmanager
async def calling(url: str) -> AsyncIterator[Calls]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield Calls(url, session)


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs a test that is a coroutine, for half a minute at most."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 10))

    return run


class Scripted(RolloutEngine):
    """An engine without a model: response token i is `script[i]`, then 5 for ever.

    A step takes `step` seconds. Between two steps it obeys aborts and pauses, as engines do.
    """

    form = "embedded"

    def __init__(self, script: tuple[int, ...] = (), step: float = 0.002):
        super().__init__()
        self.script, self.step = script, step
        self.asked: list[Request] = []
        self.done: list[str] = []  # rids in the order in which they ended
        self.error: Exception | None = None
        self._aborted: set[str] = set()
        self._frozen = self.closed = False

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        self.closed = True

    async def generate(self, request: Request) -> Generation:
        await self.state.for_request()
        self.asked.append(request)
        ids: list[int] = []
        spans: list[tuple[str, int]] = []
        finish: Any = "length"
        while len(ids) < request.left:
            await asyncio.sleep(self.step)
            if self.closed:
                raise EngineGone("closed")
            if request.rid in self._aborted:
                finish = "abort"
                break
            if self._frozen:
                continue
            if self.error is not None:
                raise self.error
            ids.append(self.script[len(ids)] if len(ids) < len(self.script) else 5)
            if not spans or spans[-1][0] != self.weights:
                spans.append((self.weights, 0))
            spans[-1] = (self.weights, spans[-1][1] + 1)
            if ids[-1] in request.stop_ids:
                finish = "stop"
                break
        self.done.append(request.rid)
        matched = ids[-1] if finish == "stop" else None
        logprobs = [-0.5 - i for i in range(len(ids))]
        return Generation(ids, logprobs, finish, spans, request.prompt.expanded, matched)

    async def pause(self, mode: PauseMode = "abort") -> None:
        self.state.pause()
        self._frozen = mode != "abort"
        if mode == "abort":
            await self.abort()

    async def resume(self) -> None:
        self.state.resume()
        self._frozen = False

    async def abort(self, rids: Any = None) -> None:
        self._aborted |= {request.rid for request in self.asked} if rids is None else {*rids}

    async def sleep(self, tags: Any = ("kv_cache", "weights")) -> None:
        self.state.sleep(tags)

    async def wake(self, tags: Any = ("kv_cache", "weights")) -> None:
        self.state.wake(tags)

    async def update_weights(self, weights: Weights, version: str) -> None:
        raise WrongOrder("the server writes weights by its receiver")

    async def health(self) -> Health:
        return Health(self.state.name == "running", self.state.name, self.weights)
