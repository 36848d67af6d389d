"""The vLLM client against a stand-in that answers as vLLM 0.32.0 did (tests/data/vllm): what is
sent, what is believed, what is refused, and the order of control calls."""

from __future__ import annotations

import asyncio
import base64
import copy
import io
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from aiohttp import web
from safetensors.torch import load_file, save_file

from tests.conformance import turned
from tests.tiny_models import noise, renderer, row, scratch, tiny, user
from vireo.data.received import received
from vireo.data.render import Renderer
from vireo.errors import InputError
from vireo.rollout import launch
from vireo.rollout.bridge import VLMRolloutEngine
from vireo.rollout.calls import Call
from vireo.rollout.engine import EngineError, EngineGone, EngineRefused, WrongOrder
from vireo.rollout.http import Http
from vireo.rollout.sample import Generation, Request, Sampling
from vireo.rollout.vllm import VllmEngine
from vireo.weights.source import Folder, Tensors

RECORDED = json.loads((Path(__file__).parent / "data" / "vllm" / "answers.json").read_text())
FAMILY = "qwen2_5_vl"
TOKENS = [20, 21, 22, 23]  # what the stand-in answers, and a stop token behind them
# All that the server reads: it says nothing of a misspelt name, and ignores it.
FIELDS = {"request_id", "token_ids", "content_parts", "return_token_ids", "sampling_params"}
SAMPLING = {
    *("max_tokens", "temperature", "logprobs", "stop_token_ids", "ignore_eos", "detokenize"),
    *("logit_bias", "seed"),
}


def said(name: str) -> Any:
    return copy.deepcopy(RECORDED[name]["body"])


class StandIn:
    """A server with the answers of the real one. `slow`: requests that end only when something ends
    them. `deaf`: aborts that pass by a request. `fail`: path -> recorded answers given once each.
    `spoil` changes an answer to a request."""

    def __init__(self, render: Renderer | None = None, model: str = "/models/demo"):
        self.render = render or renderer(FAMILY)
        self.info, self.version = said("/server_info"), "default"
        self.info["vllm_config"]["model_config"]["model"] = model
        self.slow = self.paused = self.asleep = False
        self.deaf = 0
        self.fail: dict[str, list[str]] = {}
        self.spoil: Callable[[dict[str, Any]], Any] = lambda answer: answer
        self.bodies: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.sent: dict[str, Any] = {}  # the last body by path
        self.ended: dict[str, asyncio.Event] = {}
        self.going = asyncio.Event()

    def gpu(self, **model: Any) -> StandIn:
        self.info["vllm_config"]["device_config"]["device"] = "cuda"
        self.info["vllm_config"]["model_config"] |= model
        return self

    async def __aenter__(self) -> StandIn:
        app = web.Application(client_max_size=2**30)
        app.router.add_get("/{path:.*}", self._get)
        app.router.add_post("/{path:.*}", self._post)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.runner.cleanup()

    def engine(self, **options: Any) -> VllmEngine:
        http = Http(self.url, alive="/health", backoff=0.01, timeout=30.0, **options)
        return VllmEngine(http, self.render)

    def _failed(self, path: str) -> web.Response | None:
        if not self.fail.get(path):
            return None
        name = self.fail[path].pop(0)
        return web.json_response(said(name), status=RECORDED[name]["status"])

    async def _get(self, request: web.Request) -> web.Response:
        if request.path == "/health":
            return web.Response()
        if failed := self._failed(request.path):
            return failed
        found = {
            "/server_info": self.info,
            "/weight_info": {"weight_version": self.version},
            "/is_sleeping": {"is_sleeping": self.asleep or self.paused},
        }
        return web.json_response(found.get(request.path) or said(request.path))

    async def _post(self, request: web.Request) -> web.StreamResponse:
        path, body = request.path, await request.json()
        if path == "/inference/v1/generate":
            return await self._generate(body)
        self.calls.append(str(request.rel_url))
        self.sent[path] = body
        if failed := self._failed(path):
            return failed
        # Only a GPU gives its cache back: that answer is read from the source.
        answer = said(path) if path in RECORDED else {"status": "kv_cache_released"}
        if path == "/tokenize":
            answer["tokens"] = self.render.tokenizer.encode(body["prompt"])
        elif path == "/pause":
            self.paused = True
            if request.query["mode"] == "abort":
                self._end(list(self.ended))
        elif path == "/resume":
            self._go()
        elif path == "/abort_requests":
            self._end([name for name in body["request_ids"] if name in self.ended])
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/wake_up":
            tags = request.query.getall("tags")
            self.asleep = self.asleep and "kv_cache" not in tags
            answer = {"status": "sleeping" if self.asleep else "awake", "tags": tags}
            if not self.asleep:
                self._go()
        elif path in ("/sleep", "/release_kv_cache_memory"):
            self.asleep = True
        return web.json_response(answer) if answer else web.Response()

    def _go(self) -> None:
        self.paused = False
        self.going.set()
        self.going = asyncio.Event()

    def _end(self, names: list[str]) -> None:
        if self.deaf:
            self.deaf -= 1
            return
        for name in names:
            self.ended[name].set()

    async def _generate(self, body: dict[str, Any]) -> web.Response:
        if not body:
            return self._failed("probe") or web.json_response(said("schema"), status=400)
        assert set(body) <= FIELDS
        assert set(body["sampling_params"]) <= SAMPLING
        name = f"generate-tokens-{body['request_id']}"
        ended = self.ended[name] = asyncio.Event()
        try:
            while self.paused and not ended.is_set():
                await asyncio.sleep(0.005)
            self.bodies.append(body)
            if failed := self._failed("/inference/v1/generate"):
                return failed
            if self.slow:
                await ended.wait()
            return web.json_response(self.spoil(self._answer(name, body, ended.is_set())))
        finally:
            del self.ended[name]

    def _answer(self, name: str, body: dict[str, Any], aborted: bool) -> dict[str, Any]:
        answer, sampling = said("image"), body["sampling_params"]
        encoded = [part["url"].partition("base64,")[2] for part in body["content_parts"]]
        pngs = [PIL.Image.open(io.BytesIO(base64.b64decode(one))) for one in encoded]
        prompt = received(self.render, pngs, ids=body["token_ids"])
        ids = [*TOKENS, *sampling["stop_token_ids"][:1]][: sampling["max_tokens"]]
        finish = "stop" if ids[-1] in sampling["stop_token_ids"] else "length"
        ids, finish = (ids[:2], "abort") if aborted else (ids, finish)
        (choice,) = answer["choices"]
        choice |= {
            "token_ids": ids,
            "finish_reason": finish,
            "stop_reason": ids[-1] if finish == "stop" else None,
            "logprobs": {"content": [{"token_id": i, "logprob": -0.5, "rank": 1} for i in ids]},
            "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}],
        }
        return answer | {"request_id": name, "prompt_token_ids": prompt.expanded}


USUAL = Sampling(8)


def request(images: int = 1, sampling: Sampling = USUAL, **changes: Any) -> Request:
    render = renderer(FAMILY)
    asked = row(user(*range(images), "What?"), images=[noise(56, 84, i) for i in range(images)])
    options = {"stop_ids": render.stop_ids, "banned": render.banned_ids} | changes
    return Request(render.rollout(asked), sampling, **options)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.002)


# -- answers of the real server ------------------------------------------------------------------


def read(name: str) -> Generation:
    """What the client makes of a recorded answer."""
    engine = VllmEngine(Http("http://127.0.0.1:1"), renderer(FAMILY))
    engine._versions = ["default", "step-1"]
    rid = said(name)["request_id"].removeprefix("generate-tokens-")
    return engine._generation(Call(sent=rid), said(name))


@pytest.mark.parametrize(
    ("name", "finish", "matched", "spans"),
    [
        ("image", "stop", 374, [("default", 2)]),
        ("text", "stop", 374, [("default", 2)]),
        ("length", "length", None, [("default", 1)]),
        ("abort", "abort", None, [("default", 5)]),
        ("abort, nothing", "abort", None, []),
        ("spans", "length", None, [("default", 2), ("step-1", 4)]),
    ],
)
def test_recorded_answers_are_read(
    name: str, finish: str, matched: int | None, spans: list[tuple[str, int]]
) -> None:
    got = read(name)
    assert (got.finish, got.matched, got.spans) == (finish, matched, spans)
    recorded = said(name)["choices"][0]
    assert got.ids == recorded["token_ids"]
    assert got.logprobs == [one["logprob"] for one in recorded["logprobs"]["content"]]
    assert got.prompt_ids == said(name)["prompt_token_ids"]


def spoiled(where: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    def spoil(answer: dict[str, Any]) -> dict[str, Any]:
        *path, last = where.split(".")
        inner: Any = answer
        for step in path:
            inner = inner[int(step) if step.isdigit() else step]
        inner[int(last) if last.isdigit() else last] = value
        return answer

    return spoil


CONTENT = "choices.0.logprobs.content"


WRONG = {
    "no choice": ("choices", [], "has another shape"),
    "no choices": ("choices", "none", "has another shape"),
    "no log-probs": ("choices.0.logprobs", None, "has another shape"),
    "no versions": ("choices.0.weight_versions", None, "has another shape"),
    "no prompt": ("prompt_token_ids", None, "does not say which prompt ids"),
    "another prompt": ("prompt_token_ids", [1, 2], "the engine saw another prompt"),
    "another's answer": ("request_id", "generate-tokens-x", "is one to generate-tokens-x"),
    "lost ids": ("choices.0.token_ids", [20, 21], "5 log-probabilities of other tokens"),
    "other ids": (f"{CONTENT}.1.token_id", 99, "5 log-probabilities of other tokens"),
    "not finite": (f"{CONTENT}.1.logprob", -9999.0, "has a log-probability of -9999.0"),
    "NaN": (f"{CONTENT}.1.logprob", float("nan"), "has a log-probability of nan"),
    "positive": (f"{CONTENT}.1.logprob", 0.1, "has a log-probability of 0.1"),
    "unknown finish": ("choices.0.finish_reason", "error", "finished by 'error'"),
    "short spans": ("choices.0.weight_versions.0.end", 3, "has weight versions .* of 5 tokens"),
    "old": ("choices.0.weight_versions.0.version", "old", "is of weights 'old', expected one of"),
}


@pytest.mark.parametrize(("where", "value", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_answer_is_an_error(where: str, value: Any, message: str) -> None:
    async def test() -> None:
        async with StandIn() as server, server.engine() as engine:
            server.spoil = spoiled(where, value)
            rollouts = VLMRolloutEngine(engine, server.render)
            with pytest.raises(EngineError, match=message):
                await rollouts.samples(request().prompt, Sampling(8), group="a")

    run(test)


def test_a_log_probability_that_is_rounded_above_zero_is_zero() -> None:
    async def test() -> None:
        async with StandIn() as server, server.engine() as engine:
            server.spoil = spoiled(f"{CONTENT}.1.logprob", 5e-7)
            assert (await engine.generate(request())).logprobs[1] == 0.0

    run(test)


# -- requests ------------------------------------------------------------------------------------


@pytest.mark.parametrize("images", [0, 1, 2])
def test_a_prompt_goes_out_unexpanded_and_comes_back_as_the_trainers(images: int) -> None:
    async def test() -> None:
        async with StandIn().gpu() as server, server.engine() as engine:
            asked = request(images, Sampling(8, 0.7, seed=5))
            got = await engine.generate(asked)
            render, (body,) = server.render, server.bodies
            assert got.prompt_ids == asked.prompt.expanded
            assert got.ids == [*TOKENS, render.stop_ids[0]]
            assert (got.finish, got.matched) == ("stop", render.stop_ids[0])
            assert (got.logprobs, got.spans) == ([-0.5] * 5, [("default", 5)])
            assert body["token_ids"] == asked.prompt.ids
            assert len(body["content_parts"]) == images
            assert body["sampling_params"] == {
                "max_tokens": 8,
                "temperature": 0.7,
                "logprobs": 0,
                "seed": 5,
                "stop_token_ids": list(render.stop_ids),
                "ignore_eos": True,
                "detokenize": False,
                "logit_bias": {str(i): -1e9 for i in render.banned_ids},
            }

    run(test)


def test_a_response_goes_on_with_other_random_numbers() -> None:
    async def test() -> None:
        async with StandIn().gpu() as server, server.engine() as engine:
            asked = request(1, Sampling(7, seed=5), response=[30, 31, 32])
            got = await engine.generate(asked)
            assert got.prompt_ids == [*asked.prompt.expanded, 30, 31, 32]
            assert server.bodies[0]["sampling_params"]["max_tokens"] == 4
            assert server.bodies[0]["sampling_params"]["seed"] == 8

    run(test)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(8, top_p=0.9), "top_p 0.9, top_k 0: vLLM's log-probabilities"),
        (Sampling(8, top_k=5), "use 1 and 0"),
        (Sampling(2000), r"start it with --max-model-len 20\d\d or more"),
    ],
)
def test_what_would_spoil_a_response_is_refused(sampling: Sampling, message: str) -> None:
    async def test() -> None:
        async with StandIn() as server, server.engine() as engine:
            with pytest.raises(EngineRefused, match=message):
                await engine.generate(request(1, sampling))
            assert not server.bodies

    run(test)


def test_no_seed_goes_to_a_server_on_a_cpu() -> None:
    """It sets the generator of such a request back, when a part of a prompt was computed, and that
    of a CPU cannot be: "CPU Generator does not use offset", and the server dies."""

    async def test() -> None:
        async with StandIn() as server, server.engine() as engine:
            await engine.generate(request(1, Sampling(8, seed=5)))
            assert not engine.seeds
            assert "seed" not in server.bodies[0]["sampling_params"]

    run(test)


def test_greedy_may_name_a_top_p() -> None:
    async def test() -> None:
        async with StandIn() as server, server.engine() as engine:
            await engine.generate(request(1, Sampling(8, 0.0, top_p=0.9)))
            assert server.bodies[0]["sampling_params"]["temperature"] == 0.0

    run(test)


def test_a_passing_failure_is_sent_again_under_another_name() -> None:
    """As when its cache of pictures and that of its worker have come apart."""

    async def test() -> None:
        async with StandIn() as server, server.engine() as engine:
            server.fail["/inference/v1/generate"] = ["drift"]
            got = await engine.generate(asked := request())
            first, second = (body["request_id"] for body in server.bodies)
            assert (got.finish, first) == ("stop", asked.rid)
            assert first != second
            assert server.sent["/abort_requests"] == {"request_ids": [f"generate-tokens-{first}"]}

    run(test)


def test_a_refusal_is_not_sent_again() -> None:
    async def test() -> None:
        async with StandIn() as server, server.engine() as engine:
            server.fail["/inference/v1/generate"] = ["bad image"]
            with pytest.raises(EngineError, match="400: 'Failed to load image"):
                await engine.generate(request())
            assert len(server.bodies) == 1

    run(test)


# -- which servers are refused -------------------------------------------------------------------


def fails(path: str, name: str) -> Callable[[StandIn], None]:
    return lambda server: server.fail.update({path: [name]})


def has(**model: Any) -> Callable[[StandIn], None]:
    return lambda server: server.info["vllm_config"]["model_config"].update(model)


def says(path: str, **answer: Any) -> Callable[[StandIn], None]:
    def change(server: StandIn) -> None:
        real = server._post if path == "/tokenize" else server._get

        async def spoiled(request: web.Request) -> web.StreamResponse:
            return web.json_response(answer) if request.path == path else await real(request)

        setattr(server, real.__name__, spoiled)

    return change


def other_model(server: StandIn) -> None:
    server.info["vllm_config"]["model_config"]["model"] = tiny("qwen2_vl")


SERVERS = {
    "another release": (says("/version", version="0.33.0"), "vLLM 0.33.0 is not known"),
    "no control": (fails("/server_info", "not found"), "VLLM_SERVER_DEV_MODE=1 in its env"),
    "no tokens": (fails("probe", "scale-out"), "start it with --enable-scale-out"),
    "raw log-probs": (has(logprobs_mode="raw_logprobs"), r"processed_logprobs \(it has raw_"),
    "text alone": (has(multimodal_config=None), "the vision tower"),
    "no tower": (has(multimodal_config={"language_model_only": True}), "the vision tower"),
    "another model": (other_model, "is of type qwen2_vl, not qwen2_5_vl"),
    "another tokenizer": (says("/tokenize", tokens=[1, 2]), "has another tokenizer"),
}


@pytest.mark.parametrize(("change", "message"), SERVERS.values(), ids=SERVERS.keys())
def test_a_server_that_cannot_answer_rollouts_is_refused(
    change: Callable[[StandIn], None], message: str
) -> None:
    async def test() -> None:
        server = StandIn()
        change(server)
        async with server:
            engine = server.engine()
            with pytest.raises(EngineRefused, match=message):
                await engine.start()
            await engine.close()
            assert not server.bodies

    run(test)


def test_a_server_of_another_shape_is_an_error() -> None:
    async def test() -> None:
        async with StandIn() as server:
            del server.info["vllm_config"]["device_config"]
            engine = server.engine()
            with pytest.raises(EngineError, match=r"/server_info.*model_config, device_config"):
                await engine.start()
            await engine.close()

    run(test)


@pytest.mark.parametrize(("family", "why"), [("mllama", "0.10.2"), ("gemma3", "no text with")])
def test_a_family_that_vllm_does_not_run_as_trained_is_refused(family: str, why: str) -> None:
    async def test() -> None:
        async with StandIn(renderer(family)) as server:
            engine = server.engine()
            with pytest.raises(EngineRefused, match=f"{family} with vLLM.*{why}.*embedded"):
                await engine.start()
            await engine.close()

    run(test)


def test_the_same_model_under_a_path_here_is_taken() -> None:
    async def test() -> None:
        async with StandIn(model=tiny(FAMILY)) as server, server.engine() as engine:
            health = await engine.health()
            assert (health.ready, health.weights, health.server) == (True, "default", "vLLM 0.32.0")

    run(test)


def test_a_server_that_was_left_paused_goes_on() -> None:
    async def test() -> None:
        async with StandIn() as server:
            server.paused = True
            async with server.engine() as engine:
                assert (await engine.generate(request())).finish == "stop"

    run(test)


# -- pauses and aborts ---------------------------------------------------------------------------


def test_an_abort_ends_its_request_alone() -> None:
    async def test() -> None:
        async with StandIn() as server, server.engine() as engine:
            server.slow = True
            first, second = request(), request()
            tasks = [asyncio.create_task(engine.generate(one)) for one in (first, second)]
            await until(lambda: len(server.bodies) == 2)
            await engine.abort([first.rid])
            got = await tasks[0]
            assert (got.finish, got.ids, got.prompt_ids) == (
                *("abort", TOKENS[:2]),
                first.prompt.expanded,
            )
            assert not tasks[1].done()
            await engine.abort()
            assert (await tasks[1]).finish == "abort"

    run(test)


def test_an_abort_reaches_a_request_whose_pictures_are_still_being_read() -> None:
    """The server says that it aborted, and did not know the request yet."""

    async def test() -> None:
        async with StandIn() as server, server.engine() as engine:
            server.slow, server.deaf = True, 2
            task = asyncio.create_task(engine.generate(request()))
            await until(lambda: server.bodies)
            await engine.abort()
            assert (await task).finish == "abort"
            assert server.calls.count("/abort_requests") == 3

    run(test)


@pytest.mark.parametrize(
    ("mode", "query"),
    [
        ("abort", "mode=abort"),
        ("in_place", "mode=keep&clear_cache=false"),
        ("retract", "mode=keep&clear_cache=true"),
    ],
)
def test_a_pause_holds_requests(mode: Any, query: str) -> None:
    async def test() -> None:
        async with StandIn() as server, server.engine() as engine:
            server.slow, server.deaf = True, 1
            going = asyncio.create_task(engine.generate(request()))
            await until(lambda: server.bodies)
            await engine.pause(mode)
            assert server.calls[-1] == f"/pause?{query}"
            assert going.done() == (mode == "abort")
            assert engine.http._held  # a frozen request is not one whose server hangs
            waiting = asyncio.create_task(engine.generate(request()))
            await asyncio.sleep(0.02)
            await engine.pause(mode)
            assert not waiting.done()
            assert len(server.bodies) == 1
            server.slow = False
            await engine.resume()
            assert (await waiting).finish == "stop"
            assert not engine.http._held
            await engine.abort()
            assert (await going).finish == "abort"

    run(test)


def test_a_server_that_was_left_asleep_is_refused() -> None:
    """It would go on, with whatever lies where its weights were."""

    async def test() -> None:
        async with StandIn() as server:
            server.asleep = server.paused = True
            engine = server.engine()
            with pytest.raises(EngineRefused, match="left asleep, without them"):
                await engine.start()
            await engine.close()

    run(test)


def test_closing_ends_what_waits() -> None:
    async def test() -> None:
        async with StandIn() as server, server.engine() as engine:
            server.slow = True
            task = asyncio.create_task(engine.generate(request()))
            await until(lambda: server.bodies)
            await engine.close()
            with pytest.raises(EngineGone):
                await task

    run(test)


def test_a_dead_server_is_gone() -> None:
    async def test() -> None:
        async with StandIn() as server:
            engine = server.engine(retries=0)
            await engine.start()
        with pytest.raises(EngineGone, match="is dead"):
            await engine.generate(request())
        health = await engine.health()
        assert not health.ready
        assert "is dead" in health.why
        await engine.close()

    run(test)


# -- memory --------------------------------------------------------------------------------------


def test_sleep_without_sleep_mode_is_refused() -> None:
    """Such a server answers that it sleeps, and keeps its memory."""

    async def test() -> None:
        async with StandIn() as server, server.engine() as engine:
            await engine.pause()
            with pytest.raises(EngineRefused, match="start it with --enable-sleep-mode"):
                await engine.sleep()

    run(test)


def test_a_server_sleeps_and_stays_paused_when_it_wakes() -> None:
    async def test() -> None:
        async with (
            StandIn().gpu(enable_sleep_mode=True) as server,
            server.engine() as engine,
        ):
            with pytest.raises(WrongOrder):
                await engine.sleep()
            await engine.pause()
            server.calls.clear()
            await engine.sleep()
            await engine.sleep()
            await engine.wake(["weights"])
            assert server.calls == ["/sleep?level=2", "/wake_up?tags=weights"]
            with pytest.raises(WrongOrder):
                await engine.generate(request())
            await engine.update_weights(Folder(tiny(FAMILY)), "one")
            server.calls.clear()
            await engine.wake()
            # A server that is wholly awake goes on by itself.
            assert server.calls == ["/wake_up?tags=kv_cache", "/pause?mode=keep&clear_cache=false"]
            assert server.paused
            await engine.resume()
            assert (await engine.generate(request())).spans == [("one", 5)]

    run(test)


def test_a_cache_sleeps_alone_and_weights_do_not() -> None:
    async def test() -> None:
        async with (
            StandIn().gpu(enable_sleep_mode=True) as server,
            server.engine() as engine,
        ):
            await engine.pause()
            for tags in (["weights"], ["kv_cache", "weights", "cuda_graph"]):
                with pytest.raises(EngineRefused, match="gives back kv_cache, or that and"):
                    await engine.sleep(tags)
            await engine.sleep(["kv_cache"])
            assert server.calls[-1] == "/release_kv_cache_memory"
            await engine.wake(["kv_cache"])
            await engine.resume()
            assert (await engine.generate(request())).finish == "stop"

    run(test)


# -- weights -------------------------------------------------------------------------------------

EMPTIED = [f"/reset_{c}_cache?reset_running_requests=true" for c in ("prefix", "mm", "encoder")]


def other() -> str:
    out = scratch() / "vllm-turned"
    return str(out) if out.exists() else turned(tiny(FAMILY), out)


def changed(name: str, change: Callable[[dict[str, Any], str], Any]) -> str:
    """A copy of the tiny checkpoint in which one tensor is not as it must be."""
    out = scratch() / f"vllm-{name}"
    shutil.copytree(tiny(FAMILY), out, dirs_exist_ok=True)
    tensors = load_file(out / "model.safetensors")
    change(tensors, "model.layers.0.mlp.down_proj.weight")
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return str(out)


def test_new_weights_come_with_empty_caches() -> None:
    async def test() -> None:
        async with StandIn().gpu() as server, server.engine() as engine:
            await engine.generate(request())
            await engine.pause()
            server.calls.clear()
            await engine.update_weights(Folder(other()), "step-1")
            assert server.calls == ["/collective_rpc", *EMPTIED, "/update_weight_version"]
            assert server.sent["/collective_rpc"] == {
                "method": "reload_weights",
                "kwargs": {"weights_path": other()},
            }
            await engine.resume()
            assert (await engine.generate(request())).spans == [("step-1", 5)]
            assert engine.weights == (await engine.health()).weights == "step-1"

    run(test)


def test_a_running_server_is_drained_paused_and_goes_on() -> None:
    async def test() -> None:
        async with StandIn().gpu() as server, server.engine() as engine:
            server.slow = True
            going = asyncio.create_task(engine.generate(request()))
            await until(lambda: server.bodies)
            update = asyncio.create_task(engine.update_weights(Folder(other()), "step-1"))
            await asyncio.sleep(0.02)
            late = asyncio.create_task(engine.generate(request()))
            await asyncio.sleep(0.02)
            assert "/collective_rpc" not in server.calls
            server.slow = False
            server._end(list(server.ended))
            assert (await going).spans == [("default", 2)]
            await update
            assert (await late).spans == [("step-1", 5)]
            paused, resumed = server.calls.index("/pause?mode=keep&clear_cache=false"), -1
            assert server.calls[paused + 1] == "/collective_rpc"
            assert server.calls[resumed] == "/resume"

    run(test)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("lacking", lambda t, name: t.pop(name), "0.mlp.down_proj.*checkpoint has it"),
        ("strange", lambda t, name: t.update(extra=t[name] * 1), "extra.*no such tensor"),
        ("short", lambda t, name: t.update({name: t[name][:, :8].contiguous()}), "has shape"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_a_call(
    name: str, change: Callable[[dict[str, Any], str], Any], message: str
) -> None:
    """vLLM says nothing about a tensor that is lacking, and dies of a wrong shape."""

    async def test() -> None:
        async with StandIn().gpu() as server, server.engine() as engine:
            server.calls.clear()
            with pytest.raises(InputError, match=message):
                await engine.update_weights(Folder(changed(name, change)), "step-1")
            assert server.calls == []
            assert (await engine.generate(request())).spans == [("default", 5)]

    run(test)


def test_an_update_that_failed_leaves_only_another_update() -> None:
    async def test() -> None:
        async with StandIn().gpu() as server, server.engine() as engine:
            await engine.pause()
            server.fail["/collective_rpc"] = ["bad path"]
            with pytest.raises(EngineError, match="Call to collective_rpc method failed"):
                await engine.update_weights(Folder(other()), "step-1")
            assert server.calls.count("/collective_rpc") == 1
            with pytest.raises(WrongOrder):
                await engine.generate(request())
            with pytest.raises(WrongOrder):
                await engine.resume()
            await engine.update_weights(Folder(other()), "step-2")
            await engine.resume()
            assert (await engine.generate(request())).spans == [("step-2", 5)]

    run(test)


def test_a_server_that_keeps_its_prefix_cache_is_an_error() -> None:
    async def test() -> None:
        async with StandIn().gpu() as server, server.engine() as engine:
            RECORDED["kept"] = {"status": 200, "body": {"success": False}}
            server.fail["/reset_prefix_cache"] = ["kept"]
            with pytest.raises(EngineError, match=r"prefix cache: .*False"):
                await engine.update_weights(Folder(other()), "step-1")

    run(test)


def test_weights_that_vllm_does_not_take_are_refused() -> None:
    async def test() -> None:
        async with StandIn() as server, server.engine() as engine:
            with pytest.raises(EngineRefused, match="as a Folder, not Tensors"):
                await engine.update_weights(Tensors(lambda: iter(())), "step-1")
            with pytest.raises(EngineRefused, match=r"on a CPU.*start it with the new model"):
                await engine.update_weights(Folder(other()), "step-1")
            assert (await engine.generate(request())).spans == [("default", 5)]

    run(test)


# -- the command ---------------------------------------------------------------------------------


def test_a_server_that_vireo_starts_has_what_the_client_needs() -> None:
    keys = launch.Keys("api-key", "admin-key")
    words = launch.vllm_command("/m", 8123, keys, {"max_model_len": "4096"}, dtype="float32")
    assert words[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    for flag, value in (
        *(("--model", "/m"), ("--host", "127.0.0.1"), ("--port", "8123")),
        *(("--api-key", "api-key"), ("--logprobs-mode", "processed_logprobs")),
        *(("--max-model-len", "4096"), ("--dtype", "float32")),
    ):
        assert words[words.index(flag) + 1] == value
    assert "--enable-scale-out" in words
    assert launch.VLLM_ENV == {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
