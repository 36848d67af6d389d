"""A server that speaks just enough of SGLang's protocol, and fails as it is told to.

Each /generate takes the next word of `script`, then `rule`:

    ok                answers
    slow              answers when it is aborted or the server is paused, with what it has
    400, 429, ...     that status; (status, headers) with headers
    reset, cut        computes; the connection breaks before the answer, or in the middle of it
    die               the whole server is gone
    hang              never answers
    twice             answers two times on one connection
    garbage, shape    no JSON; JSON of another shape
    prompt, short, other, nan, positive, infinite, unfinished, weights, rid
                      a wrong answer: see `_spoiled`

`python -m tests.faulty_server PORT [deaf] [parent] [--NAME VALUE]...` serves in a process of its
own: deaf to SIGTERM, parent of one more process; names are not looked at.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from aiohttp import web

Word = str | int | tuple[int, dict[str, str]]


class FaultyServer:
    """`script` and `rule`: see above. `info` and `model`: what /server_info and /model_info say.
    `words`: other answers by path, each a list of (status, body) used up in turn; status 0: the
    connection breaks.
    `expand`: the prompt ids that it answers, made of those it got.
    """

    def __init__(self, *script: Word, rule: Word = "ok", **info: Any):
        self.script, self.rule = list(script), rule
        self.info: dict[str, Any] = {"version": "0.5.23", "enable_memory_saver": True, **info}
        self.model: dict[str, Any] = {
            "model_path": "/models/tiny",
            "model_type": "qwen2_5_vl",
            "has_image_understanding": True,
            "weight_version": "default",
        }
        self.expand: Callable[[list[int]], list[int]] = list
        self.words: dict[str, list[tuple[int, Any]]] = {}
        self.bodies: list[dict[str, Any]] = []  # of /generate, in order
        self.answered: Counter[str] = Counter()  # by rid, whether the answer arrived or not
        self.calls: list[tuple[str, Any]] = []  # of control endpoints
        self.keys: dict[str, str] = {}  # path -> the last Authorization header
        self.busy = self.busiest = 0
        self.paused = False
        self.going = asyncio.Event()
        self._ended: dict[str, asyncio.Event] = {}  # requests on their way
        self._peers: set[Any] = set()

    async def __aenter__(self) -> FaultyServer:
        await self.listen(0)
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.die()

    async def listen(self, port: int) -> None:
        app = web.Application(client_max_size=2**30, middlewares=[self._note])
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/server_info", self._said(lambda: self.info))
        app.router.add_get("/model_info", self._said(lambda: self.model))
        app.router.add_post("/{control}", self._control)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def die(self) -> None:
        for transport in self._peers:
            transport.abort()
        for event in self._ended.values():
            event.set()
        await self._runner.cleanup()

    def update(self, version: str) -> None:
        self.model["weight_version"] = version

    @web.middleware
    async def _note(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self._peers.add(request.transport)
        self.keys[request.path] = request.headers.get("Authorization", "")
        return await handler(request)

    def _said(self, what: Callable[[], Any]) -> Any:
        async def answer(request: web.Request) -> web.Response:
            if self.words.get(request.path):
                status, said = self.words[request.path].pop(0)
                return web.json_response(said, status=status)
            said = what()
            return web.Response(text=said) if isinstance(said, str) else web.json_response(said)

        return answer

    async def _control(self, request: web.Request) -> web.Response:
        path, body = request.path, await request.json()
        self.calls.append((path, body))
        if self.words.get(path):
            status, said = self.words[path].pop(0)
            if status == 0:
                request.transport.close()  # type: ignore[union-attr]
            return web.json_response(said, status=status or 200)
        if path == "/pause_generation":
            self.paused = True
            if body["mode"] == "abort":
                self._end(list(self._ended))
        elif path == "/continue_generation":
            self.paused = False
            self.going.set()
            self.going = asyncio.Event()
        elif path == "/abort_request":
            wanted = "" if body.get("abort_all") else body["rid"]
            self._end([rid for rid in self._ended if rid.startswith(wanted)])
            return web.Response()
        elif path == "/flush_cache":
            return web.Response(text="Cache flushed.")
        elif "weight" in path:
            if "weight_version" in body:
                self.update(body["weight_version"])
            return web.json_response({"success": True, "message": ""})
        return web.json_response(None)

    def _end(self, rids: list[str]) -> None:
        for rid in rids:
            self._ended[rid].set()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        while self.paused:
            await self.going.wait()
        self.bodies.append(body)
        word = self.script.pop(0) if self.script else self.rule
        if body["rid"] in self._ended:
            return web.json_response({"error": {"message": "duplicate rid"}}, status=400)
        ended = self._ended[body["rid"]] = asyncio.Event()
        self.busy += 1
        self.busiest = max(self.busiest, self.busy)
        try:
            return await self._answer(request, body, word, ended)
        finally:
            self.busy -= 1
            del self._ended[body["rid"]]

    async def _answer(
        self, request: web.Request, body: dict[str, Any], word: Word, ended: asyncio.Event
    ) -> web.StreamResponse:
        status, headers = word if isinstance(word, tuple) else (word, {})
        if isinstance(status, int):
            said = {"error": {"message": f"the server says {status}"}}
            return web.json_response(said, status=status, headers=headers)
        if word == "hang":
            await asyncio.Event().wait()
        if word == "die":
            asyncio.get_running_loop().create_task(self.die())
            await asyncio.Event().wait()
        await asyncio.sleep(0.01)
        if word == "slow":
            await ended.wait()
        self.answered[body["rid"]] += 1
        if word in ("garbage", "shape"):
            return web.Response(text="<html>not now</html>" if word == "garbage" else '{"a": 1}')
        said = json.dumps(_spoiled(self._made(body, ended.is_set()), str(word)))
        transport = request.transport
        assert transport is not None
        if word in ("reset", "cut", "twice"):
            raw = f"HTTP/1.1 200 OK\r\nContent-Length: {len(said)}\r\n\r\n{said}".encode()
            if word == "twice":
                transport.write(raw + raw)
                await asyncio.Event().wait()
            transport.write(raw[: len(raw) // 2] if word == "cut" else b"")
            await asyncio.sleep(0)
            transport.close()
        return web.Response(text=said, content_type="application/json")

    def _made(self, body: dict[str, Any], aborted: bool) -> dict[str, Any]:
        ids = [7, 8] if aborted else [7, 8, 9]
        stop = (
            {"type": "stop", "matched": 9} if 9 in body["sampling_params"]["stop_token_ids"] else 0
        )
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": "abort", "message": "aborted"}
            if aborted
            else stop or {"type": "length", "length": 3},
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "weight_version": self.model["weight_version"],
        }
        prompt = self.expand(body.get("input_ids") or [])
        return {"text": "", "output_ids": ids, "prompt_token_ids": prompt, "meta_info": meta}


def _spoiled(answer: dict[str, Any], word: str) -> dict[str, Any]:
    meta = answer["meta_info"]
    scored = meta["output_token_logprobs"]
    if word == "prompt":  # an image was expanded twice
        answer["prompt_token_ids"] = answer["prompt_token_ids"] + [1]
    elif word == "short":
        scored.pop()
    elif word == "other":
        scored[1][1] = 3
    elif word == "nan":
        meta["finish_reason"] = {"type": "stop", "matched": "NaN happened"}
    elif word == "positive":
        scored[0][0] = 0.25
    elif word == "infinite":
        scored[0][0] = float("nan")
    elif word == "unfinished":
        meta["finish_reason"] = {"type": "tired"}
    elif word == "weights":
        meta["weight_version"] = "another"
    elif word == "rid":
        meta["id"] = "0" * 32
    return answer


async def _serve(port: int) -> None:
    await FaultyServer(vireo="test").listen(port)
    print("ready", *sys.argv, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "parent" in sys.argv:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    asyncio.run(_serve(int(sys.argv[1])))
