"""`vireo serve`: an engine of this process over SGLang's HTTP protocol, as stock 0.5.23 speaks it.

Where stock crashes (memory released twice, or under a request), takes what it cannot use for
success (a wrong tensor name), or opens URLs and paths, this server answers 400 and says why.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from aiohttp import web

from vireo import __version__
from vireo.data.conversation import Conversation
from vireo.data.prompt import Prompt
from vireo.data.received import received
from vireo.data.render import Renderer
from vireo.errors import InputError, VireoError, first_line
from vireo.rollout import protocol
from vireo.rollout.control import Control
from vireo.rollout.engine import EngineGone, RolloutEngine
from vireo.rollout.incoming import Asked, Schema, Stopped, field, image_ref, read
from vireo.rollout.sample import Generation, Request
from vireo.serving import bound, told_to_stop
from vireo.settings.rollout import EngineSettings

DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp32": torch.float32}
SPEAKS = "0.5.23"  # the release whose protocol this is
_BODY_BYTES = 1 << 30  # of a request: many images
_CLOSE_S = 2.0  # for answers that are on their way when the server ends
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Fault:
    """A planted fault, for tests of clients: what the engine gets, and what is answered."""

    received: Callable[[Prompt], Prompt] = lambda prompt: prompt
    answered: Callable[[dict[str, Any]], dict[str, Any] | web.Response] = lambda answer: answer


class Server:
    """The endpoints over one engine, which nobody else uses. `receiver`: see Control."""

    def __init__(
        self,
        engine: RolloutEngine,
        renderer: Renderer,
        receiver: Any,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        allow_image_urls: bool = False,
        fault: Fault | None = None,
    ):
        self.engine, self.renderer = engine, renderer
        self.control = Control(engine, receiver, renderer.model_path)
        self.api_key, self.admin_api_key = api_key, admin_api_key
        self.allow_image_urls, self.fault = allow_image_urls, fault or Fault()
        # The token that stands for a part of an image, if the family has one of them.
        self._shown: Any = getattr(renderer.config, "image_token_id", None)
        self._closing = False
        self._reader = ThreadPoolExecutor(1)  # a tokenizer bears one thread

    def app(self) -> web.Application:
        around = [self._guarded, self._explained]
        app = web.Application(client_max_size=_BODY_BYTES, middlewares=around)
        app.cleanup_ctx.append(self._lifetime)
        app.on_shutdown.append(self._close)
        for path in protocol.CONTROL - {protocol.ABORT, protocol.FLUSH}:
            app.router.add_post(path, _json(getattr(self.control, path[1:])))
        app.router.add_post(protocol.GENERATE, self._generate)
        app.router.add_post(protocol.ABORT, self._abort)
        app.router.add_post(protocol.FLUSH, self._flush)
        app.router.add_get(protocol.FLUSH, self._flush)
        for path in (protocol.HEALTH, f"{protocol.HEALTH}_generate"):
            app.router.add_get(path, self._health)
        app.router.add_get(protocol.MODEL_INFO, self._model_info)
        app.router.add_get(protocol.SERVER_INFO, self._server_info)
        return app

    async def _lifetime(self, _app: web.Application) -> AsyncIterator[None]:
        async with self.engine:
            yield
        self._reader.shutdown(wait=False, cancel_futures=True)

    async def _close(self, _app: web.Application) -> None:
        self._closing = True
        await self.control.abort([*self.control.flights])

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Keys: the admin key alone opens control endpoints, where there is one."""
        control = request.path in protocol.CONTROL
        key = (self.admin_api_key or self.api_key) if control else self.api_key
        if key is not None and not request.path.startswith(protocol.HEALTH):
            kind, _, given = request.headers.get("Authorization", "").partition(" ")
            right = secrets.compare_digest(given.encode(errors="replace"), key.encode())
            if kind.lower() != "bearer" or not right:
                return web.json_response({"error": "Unauthorized"}, status=401)
        if control:  # is done to its end, whoever hangs up
            return await asyncio.shield(asyncio.ensure_future(handler(request)))
        return await handler(request)

    @web.middleware
    async def _explained(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Errors in stock's words."""
        try:
            return await handler(request)
        except web.HTTPException:
            raise
        except Schema as error:
            body = {"object": "error", "message": str(error), "type": "BadRequest", "code": 400}
            return web.json_response(body, status=400)
        except Stopped as error:
            return web.Response(text=str(error), status=error.status)
        except Exception as error:
            bad, gone = isinstance(error, InputError), isinstance(error, EngineGone)
            said = {"message": str(error) if isinstance(error, VireoError) else repr(error)}
            if not isinstance(error, VireoError):
                traceback.print_exc()
            elif not bad and not self._closing:
                print(f"{request.path}: {error}", file=sys.stderr, flush=True)
            if request.path != protocol.GENERATE:
                return web.json_response({"success": False, **said}, status=400)
            status = 400 if bad else 503 if gone else 500
            return web.json_response({"error": said}, status=status)
        finally:
            await self.control.notify()

    # -- generation ----------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        began = time.perf_counter()
        body = await _body(request)
        asked, many = read(body)
        rids = [rid for one in asked for rid in one.rids]
        if taken := [rid for rid in rids if rid in self.control.flights]:
            raise InputError(f"rid: Duplicate request IDs detected, in flight already: {taken}")
        self.control.flights |= dict.fromkeys(rids, "waiting")
        try:
            made = [(one, await self._in_reader(self._read, one)) for one in asked]
            calls = [self._one(one, request) for one, requests in made for request in requests]
            answers = await self._together(rids, calls)
        finally:
            for rid in rids:
                del self.control.flights[rid]
        for answer in answers:
            answer["meta_info"]["e2e_latency"] = time.perf_counter() - began
            if not body.get("return_prompt_token_ids"):
                del answer["prompt_token_ids"]
        out = [self.fault.answered(answer) for answer in answers]
        if instead := [answer for answer in out if isinstance(answer, web.Response)]:
            return instead[0]
        return web.json_response(out if many else out[0])

    def _read(self, asked: Asked) -> list[Request]:
        made, words = self.renderer, self.renderer.config.get_text_config().vocab_size
        refs = tuple(image_ref(image, self.allow_image_urls) for image in asked.images)
        pictures = made.pictures(Conversation((), refs))
        text, ids = (asked.prompt, None) if isinstance(asked.prompt, str) else ("", asked.prompt)
        bare = made.tokenizer.encode(text.replace(made.family.placeholder or "", ""))
        for token in ids or bare:
            if token == made.mark_id or not (0 <= token < words or token in made.image_ids):
                raise InputError(f"the prompt has {token}, which is no token of the model")
        found, slots = (ids or bare).count(self._shown), len(pictures) if ids else 0
        if self._shown is not None and found > slots:  # the model would fail on the whole batch
            raise InputError(f"{found} image tokens in the prompt, expected {slots} placeholders")
        prompt = self.fault.received(received(made, pictures, text=text, ids=ids))
        return asked.requests(prompt, made.stop_ids, words, made.max_length)

    async def _together(self, rids: list[str], calls: list[Any]) -> list[dict[str, Any]]:
        """The results of all. If one fails, or the client hangs up, the others are aborted."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        failed: list[asyncio.Task] = []
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failed = [task for task in done if task.exception()]
        finally:
            if not all(task.done() for task in tasks):
                await self.control.abort(rids)
            await asyncio.gather(*tasks, return_exceptions=True)
        return [task.result() for task in failed or tasks]

    async def _one(self, asked: Asked, request: Request) -> dict[str, Any]:
        control, rid = self.control, request.rid
        await control.until(lambda: control.flights[rid] == "aborted" or control.open)
        if self._closing:
            raise EngineGone("the server is shutting down")
        if control.flights[rid] == "aborted":
            raise Stopped(499, f"request {rid} was aborted before it began")
        control.flights[rid] = "running"
        try:
            got = await self.engine.generate(request)
        finally:
            control.flights[rid] = "done"
            await control.notify()
        return await self._in_reader(self._answer, asked, request, got)

    def _answer(self, asked: Asked, request: Request, got: Generation) -> dict[str, Any]:
        reason: dict[str, Any] = {"type": "stop", "matched": got.matched}
        if got.finish == "abort":
            reason = {"type": "abort", "message": "Aborted", "status_code": None}
        elif len(got.ids) >= request.sampling.max_new_tokens:  # stock looks at the length first
            reason = {"type": "length", "length": len(got.ids)}
        spans, end = [], 0
        for version, count in got.spans or [(self.engine.weights, 0)]:
            spans.append({"version": version, "start": end, "end": end + count})
            end += count
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": reason,
            "prompt_tokens": len(request.prompt.expanded),
            "completion_tokens": len(got.ids),
            "cached_tokens": 0,
            "weight_version": spans[-1]["version"],
            "weight_versions": spans,
        }
        if request.prompt.pictures:
            ids = self.renderer.image_ids if self._shown is None else {self._shown}
            meta["image_tokens"] = sum(token in ids for token in request.prompt.expanded)
        if asked.logprobs:
            pairs = [[value, token, None] for value, token in zip(got.logprobs, got.ids)]
            meta |= {"output_token_logprobs": pairs, "output_token_logprobs_length": len(pairs)}
        trimmed = reason["type"] == "stop" and not asked.params["no_stop_trim"]
        return {
            "text": self.renderer.tokenizer.decode(
                got.ids[:-1] if trimmed else got.ids,
                skip_special_tokens=asked.params["skip_special_tokens"],
            ),
            "output_ids": got.ids,
            "prompt_token_ids": got.prompt_ids or request.prompt.expanded,
            "meta_info": meta,
        }

    async def _in_reader(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reader, call, *arguments)

    # -- calls that are not answered in JSON objects, and what the server is -------------------

    async def _abort(self, request: web.Request) -> web.Response:
        body = await _body(request)
        rid, every = field(body, "rid", str, ""), field(body, "abort_all", bool, False)
        flights = self.control.flights if rid or every else ()
        await self.control.abort([name for name in flights if every or name.startswith(rid)])
        return web.Response()

    async def _flush(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(float(request.query.get("timeout", 0))):
                await self.control.until(lambda: self.control.idle)
        except ValueError as error:
            raise Schema(f"timeout: {error}") from error
        except TimeoutError:
            return web.Response(text="not flushed: requests are running or waiting\n", status=400)
        return web.Response(text="Cache flushed.\n")

    async def _health(self, _request: web.Request) -> web.Response:
        ready = (await self.engine.health()).ready and self.control.open and not self._closing
        return web.Response(status=200 if ready else 503)

    async def _model_info(self, _request: web.Request) -> web.Response:
        config, family = self.renderer.config, self.renderer.family
        found = {"model_path": self.control.model_path, "weight_version": self.engine.weights}
        found |= {"model_type": config.model_type, "architectures": config.architectures}
        return web.json_response(found | {"has_image_understanding": family.has_vision})

    async def _server_info(self, _request: web.Request) -> web.Response:
        found: dict[str, Any] = {"version": SPEAKS, "vireo": __version__}
        found |= {"internal_states": [{"state": self.engine.state.name}]}
        # As stock says that it can give memory back, and that it honours seeds.
        found |= {"enable_memory_saver": True, "enable_deterministic_inference": True}
        return web.json_response(found | {"model_path": self.control.model_path})


async def _body(request: web.Request) -> dict[str, Any]:
    """The JSON object of a call. Schema: there is none."""
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise Schema(f"the body is no JSON: {first_line(error)}") from error
    if not isinstance(body, dict) or request.content_type != "application/json":
        raise Schema("expected a JSON object, sent as application/json")
    return body


def _json(call: Callable[[dict[str, Any]], Awaitable[Any]]) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(await call(await _body(request)))

    return handler


async def listen(server: Server, sock: socket.socket) -> web.AppRunner:
    """Starts the engine, then answers on a bound socket, until `cleanup` of what it returns."""
    options: Any = {"handler_cancellation": True, "shutdown_timeout": _CLOSE_S}
    runner = web.AppRunner(server.app(), access_log=None, **options)
    await runner.setup()
    await web.SockSite(runner, sock).start()
    return runner


def serve(
    model: str,
    *,
    port: int = 30000,
    host: str = "127.0.0.1",
    processor: str | None = None,
    dtype: str = "auto",
    max_rows: int | None = None,
    image_size: int | None = None,
    image_strategy: str = "longest",
    trust_remote_code: bool = False,
    **options: Any,
) -> None:
    """Serves a model folder until SIGTERM or SIGINT. `options` are those of Server."""
    from vireo.rollout.embedded import EmbeddedEngine
    from vireo.rollout.run import open_model
    from vireo.weights.receive import Receiver

    with bound(host, port) as sock:  # before the model is loaded, which takes longer
        fit = {"image_size": image_size, "image_strategy": image_strategy}
        trust = {"trust_remote_code": trust_remote_code}
        folder, renderer = open_model(model, processor, EngineSettings(), **fit, **trust)
        engine = EmbeddedEngine.of_folder(folder, renderer, DTYPES[dtype], max_rows=max_rows)
        receiver = Receiver(engine.policy.hf, renderer.family)
        asyncio.run(until_stopped(Server(engine, renderer, receiver, **options), sock))


async def until_stopped(server: Server, sock: socket.socket) -> None:
    """Serves on a bound socket, and says so, until SIGTERM or SIGINT."""
    stop = told_to_stop()
    runner = await listen(server, sock)
    try:
        host, port = sock.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        print(f"serving {server.control.model_path} at http://{name}:{port}", flush=True)
        await stop.wait()
    finally:
        await runner.cleanup()
