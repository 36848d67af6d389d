"""One server over HTTP: keys, how many calls at once, what is sent again, when it is given up."""

from __future__ import annotations

import asyncio
import io
import json
import math
import random
import re
from collections.abc import Awaitable, Callable, Collection
from contextlib import nullcontext
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from vireo.errors import first_line
from vireo.rollout.engine import EngineError, EngineGone, EngineRefused

# What is sent, or a function that is asked for it before each sending, with whether an earlier one
# may have arrived. None: GET.
Body = dict[str, Any] | Callable[[bool], Awaitable[dict[str, Any]]] | None

_QUOTED = 200  # characters of an answer in a message
_PROBE_S = 10.0  # a living server answers the cheapest question within this time
_IDLE_S = 2.0  # servers close connections that idle for 5 s; none of ours is used again as late
_SLACK = 0.05  # of a limit: as much shorter a server's silence may be
_KINDS = {429: "busy", 503: "busy", 500: "failed"}


class Aborted(EngineError):
    """The server ended the request before it had begun it (status 499)."""


class Http:
    """Calls to the server at `url`. Nothing else is asked: no proxy, no redirect.

    `api_key` opens the server, `admin_key` its control endpoints (default: the same).
    `concurrency`: requests on their way at most; control calls and GETs never wait for one.
    `timeout`: seconds without an answer to any request after which the server hangs; for control
    calls and GETs the limit of each. `alive`: a path that a living server answers in any state.

    Sent again, up to `retries` times, are: what the server had no room for (429, 503), a request
    that failed (500; once only) and one whose connection broke, if the server is still alive; after
    `backoff` seconds, then twice as long. Control calls are not, where they may have taken effect.
    `failures` counts the answers 500.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        concurrency: int = 256,
        timeout: float = 600.0,
        retries: int = 3,
        backoff: float = 0.5,
        alive: str = "/model_info",
    ):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise EngineRefused("the URL of a server: expected http://HOST:PORT, without keys")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self.timeout, self.retries, self.backoff, self.alive = timeout, retries, backoff, alive
        self.failures = 0
        self.note: Callable[[], str] = str  # what EngineGone says of the server at the end
        self._api_key, self._admin_key = api_key, admin_key or api_key
        self._slots = asyncio.Semaphore(concurrency)
        self._session: aiohttp.ClientSession | None = None
        self._clocks: set[asyncio.Timeout] = set()  # of the requests on their way
        self._held = False
        self._begun = -math.inf  # when the limits last began anew

    async def open(self) -> None:
        self._session = self._session or aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def close(self) -> None:
        """Calls on their way end with EngineGone."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def hold(self, held: bool) -> None:
        """While a server is paused its silence says nothing: requests have no time limit then."""
        self._held = held
        self._heard()

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        """As `post`, with its options."""
        return await self.post(path, None, **options)

    async def post(
        self,
        path: str,
        body: Body,
        *,
        control: bool = False,
        timeout: float | None = None,
        also: Collection[int] = (),
    ) -> tuple[int, Any]:
        """(status, answer): 200 or one of `also`; the answer is text where it is no JSON.

        Aborted; EngineGone: the server is dead, or did not answer in time; EngineError: any other
        status. `timeout`: of this call alone, in the place of the usual one.
        """
        left = {"busy": self.retries, "failed": min(1, self.retries), "lost": self.retries}
        arrived = False
        async with nullcontext() if control or body is None else self._slots:
            for turn in count():
                sent = await body(arrived) if callable(body) else body
                name = self.url + path + (f" (rid {sent['rid']})" if sent and "rid" in sent else "")
                kind, wait, arrived = "lost", None, True
                try:
                    status, answer, wait = await self._once(path, sent, control, timeout)
                except TimeoutError as error:
                    said = f"the server hangs: silent for {timeout or self.timeout:g} s"
                    raise EngineGone(f"{name}: {said}{self.note()}") from error
                except (aiohttp.ClientError, ConnectionError) as error:
                    arrived = not isinstance(error, aiohttp.ClientConnectorError)
                    said = f"the connection broke ({first_line(error)})"
                else:
                    if status == 200 or status in also:
                        return status, answer
                    kind, said = _KINDS.get(status, ""), f"status {status}: {self.quote(answer)}"
                    if status == 499:
                        raise Aborted(f"{name}: {said}")
                    arrived = kind != "busy"
                    self.failures += kind == "failed"
                    if status in (401, 403):
                        said += "; check --engine_api_key and --engine_admin_key"
                if kind in ("lost", "failed"):
                    await self._check_alive(f"{name}: {said}")
                if not left.get(kind) or (control and arrived and body is not None):
                    raise EngineError(f"{name}: {said}")
                left[kind] -= 1
                pause = self.backoff * 2 ** min(turn, 6) * random.uniform(0.5, 1.0)
                await asyncio.sleep(pause if wait is None else wait)
        raise AssertionError("not reached")

    def quote(self, answer: Any) -> str:
        """The server's own words, cut short, without keys."""
        error = answer.get("error", answer) if isinstance(answer, dict) else answer
        said = error.get("message", error) if isinstance(error, dict) else error
        text = said if isinstance(said, str) else json.dumps(said)
        for key in filter(None, (self._api_key, self._admin_key)):
            text = text.replace(key, "***")
        text = re.sub(r'(key"\s*:\s*)"[^"]*"', r'\1"***"', text)  # a server shows its own
        return repr(text[:_QUOTED])

    def fields(self, path: str, answer: Any, *names: str) -> dict[str, Any]:
        """The answer, which must be an object with these fields. EngineError quotes it if not."""
        if isinstance(answer, dict) and all(name in answer for name in names):
            return answer
        wanted = ", ".join(names) or "any fields"
        raise EngineError(f"{self.url}{path}: no object of {wanted}, but {self.quote(answer)}")

    async def _once(
        self, path: str, body: dict[str, Any] | None, control: bool, timeout: float | None
    ) -> tuple[int, Any, float | None]:
        if self._session is None:
            raise EngineGone(f"{self.url}{path}: the engine is closed")
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if key := self._admin_key if control else self._api_key:
            headers["Authorization"] = f"Bearer {key}"
        # As a file, which is sent piece by piece: bodies with images are large.
        data = None if body is None else io.BytesIO(encoded(body))
        send = self._session.get if body is None else self._session.post
        shared = not (control or body is None or timeout)  # the limit begins anew with each answer
        limit = None if shared and self._held else timeout or self.timeout
        async with asyncio.timeout(limit) as clock:
            if shared:
                self._clocks.add(clock)
            try:
                async with send(
                    self.url + path, data=data, headers=headers, allow_redirects=False
                ) as response:
                    raw = await response.read()
            finally:
                self._clocks.discard(clock)
        if shared:
            self._heard()
        after = response.headers.get("Retry-After", "")  # seconds; dates are passed over
        wait = min(float(after), self.timeout) if after.isdecimal() else None
        try:
            return response.status, json.loads(raw), wait
        except ValueError:
            return response.status, raw.decode(errors="replace"), wait

    def _heard(self) -> None:
        """Begins all limits anew; not for each of many answers that come at once."""
        now = asyncio.get_running_loop().time()
        if not self._held and now - self._begun < _SLACK * self.timeout:
            return
        self._begun = -math.inf if self._held else now
        when = None if self._held else now + self.timeout
        for clock in self._clocks:
            if not clock.expired():
                clock.reschedule(when)

    async def _check_alive(self, why: str) -> None:
        """EngineGone: the server does not answer at all."""
        try:
            status, _, _ = await self._once(self.alive, None, False, min(self.timeout, _PROBE_S))
            found = f"is going down ({self.alive}: status {status})" if status != 200 else ""
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            found = f"is dead ({first_line(error)})"
        if found:
            raise EngineGone(f"{why}; the server {found}{self.note()}")


def encoded(body: dict[str, Any]) -> bytes:
    """JSON. Values that are bytes are JSON already: images, which are large, and the same in every
    request of a group."""
    made = json.dumps({n: v for n, v in body.items() if not isinstance(v, bytes)}).encode()
    ready = [(n, v) for n, v in body.items() if isinstance(v, bytes)]
    parts = [part for n, v in ready for part in (b", ", json.dumps(n).encode(), b": ", v)]
    return b"".join([made[:-1], *parts, b"}"]) if ready else made
