"""`vireo serve` speaks SGLang's protocol as stock 0.5.23 does, over real sockets."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from aiohttp import web

from tests.launch import environment
from tests.serving import Calls, Scripted, calling, in_loop, serving
from tests.tiny_models import noise, renderer, row, tiny, user
from vireo import __version__, cli
from vireo.data.prompt import Prompt
from vireo.errors import InputError
from vireo.families.tiny import build
from vireo.models.load import targets_of
from vireo.rollout import protocol
from vireo.rollout.contract import check
from vireo.rollout.embedded import EmbeddedEngine
from vireo.rollout.engine import EngineError
from vireo.rollout.http import Http
from vireo.rollout.protocol import generate_body
from vireo.rollout.sample import Request, Sampling, new_rid
from vireo.rollout.server import Fault, Server, bound, until_stopped
from vireo.rollout.sglang import SglangEngine
from vireo.weights.named import published
from vireo.weights.payload import packed
from vireo.weights.receive import Receiver
from vireo.weights.source import Broadcast, Folder, Tensors

FAMILY = "qwen2_5_vl"
IDS = [4, 5, 6]


def one_picture(family: str = FAMILY) -> Prompt:
    return renderer(family).rollout(row(user(0, "What?"), images=[noise(60, 40)]))


def png(width: int = 30, height: int = 30, shade: int = 90) -> bytes:
    out = io.BytesIO()
    PIL.Image.new("RGB", (width, height), (shade, 0, 0)).save(out, "PNG")
    return out.getvalue()


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def wire(request: Request, form: str = "ids") -> dict[str, Any]:
    """The body that a client sends for a request."""
    images = {"image_data": [data_url(png) for png in request.prompt.pngs]}
    return generate_body(request, form) | (images if request.prompt.pictures else {})


def ask(new: int | None = 4, **fields: Any) -> dict[str, Any]:
    """A body of /generate; `params` are more sampling parameters."""
    params = {"max_new_tokens": new, **fields.pop("params", {})}
    prompt = {} if "text" in fields else {"input_ids": IDS}
    return {**prompt, "sampling_params": params, **fields}


@asynccontextmanager
async def scripted(*script: int, step: float = 0.002, receiver: Any = None, **options: Any):
    """(calls, engine) of a server over a Scripted engine."""
    engine = Scripted(script, step)
    async with serving(engine, renderer(FAMILY), receiver, **options) as url, calling(url) as calls:
        yield calls, engine


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.002)


def later(calls: Calls, **fields: Any) -> asyncio.Task:
    """A request that takes very long unless it is ended."""
    return asyncio.create_task(calls.post("/generate", ask(None, **fields)))


def finish(answer: tuple[int, Any]) -> str:
    status, said = answer
    assert status == 200, said
    return said["meta_info"]["finish_reason"]["type"]


# -- what is asked and what is answered ------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *[("qwen2_5_vl", "ids"), ("qwen2_5_vl", "text"), ("gemma3", "text")],
        *[("mllama", "text"), ("llava", "ids"), ("qwen3", "ids")],
    ],
)
@in_loop
async def test_the_prompt_of_a_request_is_the_trainers(family: str, form: str):
    made = renderer(family)
    images = [noise(60, 40)] if made.family.has_vision else []
    prompt = made.rollout(row(user(*range(len(images)), "What?"), images=images))
    request = Request(prompt, Sampling(max_new_tokens=2), made.stop_ids, made.banned_ids)
    engine = Scripted()
    async with serving(engine, made) as url, calling(url) as calls:
        status, answer = await calls.post("/generate", wire(request, form))
    assert status == 200, answer
    meta = answer["meta_info"]
    assert answer["prompt_token_ids"] == prompt.expanded
    assert meta["prompt_tokens"] == len(prompt.expanded)
    assert [meta["id"], engine.asked[0].rid] == [request.rid, request.rid]
    assert engine.asked[0].banned == made.banned_ids
    assert set(engine.asked[0].stop_ids) == set(made.stop_ids)
    if images:
        token = made.config.image_token_id
        assert meta["image_tokens"] == prompt.expanded.count(token) > 0
    else:
        assert "image_tokens" not in meta
    theirs = engine.asked[0].prompt.example.fields
    assert theirs.keys() == prompt.example.fields.keys()
    assert all(theirs[name].equal(value) for name, value in prompt.example.fields.items())


@in_loop
async def test_an_answer_has_what_stock_gives():
    async with scripted(7, 8, 9) as (calls, engine):
        engine.weights = "v3"
        status, answer = await calls.post("/generate", ask(3, rid="r", return_logprob=True))
        assert status == 200
        seconds = answer["meta_info"].pop("e2e_latency")
        assert 0 < seconds < 5
        assert answer == {
            "text": renderer(FAMILY).tokenizer.decode([7, 8, 9]),
            "output_ids": [7, 8, 9],
            "meta_info": {
                "id": "r",
                "finish_reason": {"type": "length", "length": 3},
                "prompt_tokens": 3,
                "completion_tokens": 3,
                "cached_tokens": 0,
                "weight_version": "v3",
                "weight_versions": [{"version": "v3", "start": 0, "end": 3}],
                "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None], [-2.5, 9, None]],
                "output_token_logprobs_length": 3,
            },
        }
        _, answer = await calls.post("/generate", ask(3, return_prompt_token_ids=True))
        assert answer["prompt_token_ids"] == IDS
        assert "output_token_logprobs" not in answer["meta_info"]
        assert len(answer["meta_info"]["id"]) == 32


@in_loop
async def test_stop_tokens_end_a_response_and_are_trimmed_from_its_text_alone():
    made = renderer(FAMILY)
    stop = made.stop_ids[0]
    script = (7, 8, stop, 9)
    for params, ids, reason in (
        ({}, [7, 8, stop], {"type": "stop", "matched": stop}),
        ({"ignore_eos": True}, [*script, 5], {"type": "length"}),
        ({"stop_token_ids": [8]}, [7, 8], {"type": "stop", "matched": 8}),
        (
            {"stop_token_ids": [8], "ignore_eos": True},
            [*script, 5],
            {"type": "length", "length": 5},
        ),
        # Stock looks at the length first.
        ({"max_new_tokens": 3}, [7, 8, stop], {"type": "length"}),
        ({"max_new_tokens": 0}, [], {"type": "length"}),
    ):
        async with scripted(*script) as (calls, _):
            body = ask(5, params=params)
            _, answer = await calls.post("/generate", body)
        assert answer["output_ids"] == ids
        reason |= {"length": len(ids)} if reason["type"] == "length" else {}
        assert answer["meta_info"]["finish_reason"] == reason
        shown = ids[:-1] if reason["type"] == "stop" else ids
        assert answer["text"] == made.tokenizer.decode(shown, skip_special_tokens=True)
    async with scripted(7, stop) as (calls, _):
        kept = {"skip_special_tokens": False, "no_stop_trim": True}
        _, answer = await calls.post("/generate", ask(5, params=kept))
        assert answer["text"] == made.tokenizer.decode([7, stop])


@in_loop
async def test_sampling_parameters_reach_the_engine_and_have_stocks_defaults():
    async with scripted() as (calls, engine):
        await calls.post("/generate", {"input_ids": IDS, "sampling_params": {}})
        await calls.post("/generate", {"input_ids": IDS, "sampling_params": None})
        given = {"temperature": 0.7, "top_p": 0.9, "top_k": 3, "sampling_seed": 11}
        await calls.post("/generate", ask(params={**given, "logit_bias": {"9": -1e9, "3": -1e8}}))
        await calls.post("/generate", ask(params={"temperature": 0, "min_p": 0.0, "stop": None}))
        await calls.post("/generate", ask(params={"max_new_tokens": None, "stop_token_ids": [5]}))
    one, two, given, greedy, whole = engine.asked
    assert one.sampling == two.sampling == Sampling(max_new_tokens=128)
    assert given.sampling == Sampling(4, 0.7, 0.9, 3, 11)
    assert given.banned == (3, 9)
    assert greedy.sampling.temperature == 0
    assert greedy.sampling.softmax_temperature == 1
    assert whole.sampling.max_new_tokens == renderer(FAMILY).max_length - len(IDS)


@in_loop
async def test_a_batch_is_answered_in_order_and_n_prompt_by_prompt():
    async with scripted() as (calls, engine):
        prompts = [[4], [4, 5], [4, 5, 6]]
        each = [{"max_new_tokens": new} for new in (9, 1, 5)]
        body = {"input_ids": prompts, "sampling_params": each, "rid": "b"}
        body["return_logprob"] = [True, False, True]
        _, answers = await calls.post("/generate", body)
        assert engine.done == ["b_1", "b_2", "b_0"]  # and yet:
        assert [a["meta_info"]["id"] for a in answers] == ["b_0", "b_1", "b_2"]
        assert [a["meta_info"]["prompt_tokens"] for a in answers] == [1, 2, 3]
        assert [len(a["output_ids"]) for a in answers] == [9, 1, 5]
        assert ["output_token_logprobs" in a["meta_info"] for a in answers] == [True, False, True]

        params = {"n": 3, "sampling_seed": 4}
        body = {"input_ids": prompts[:2], "sampling_params": params, "rid": ["x", "y"]}
        _, answers = await calls.post("/generate", body)
        assert [a["meta_info"]["prompt_tokens"] for a in answers] == [1, 1, 1, 2, 2, 2]
        names = [a["meta_info"]["id"] for a in answers]
        assert [name[:2] for name in names] == ["x_", "x_", "x_", "y_", "y_", "y_"]
        assert len(set(names)) == 6
        last = engine.asked[-6:]
        assert {request.sampling.seed for request in last} == {4}  # one for all, as in stock
        assert {request.group for request in last if request.rid[0] == "x"} == {last[0].group}
        _, answers = await calls.post("/generate", {"text": ["a"], "sampling_params": {}})
        assert len(answers) == 1


@in_loop
async def test_images_of_a_prompt_a_batch_and_a_prompt_asked_n_times():
    made, image = renderer(FAMILY), data_url(png())
    slot = made.family.placeholder
    raw = base64.b64encode(png(40, 40)).decode()
    for body, images in (
        ({"text": f"{slot}a", "image_data": image}, [1]),
        ({"text": f"{slot}a", "image_data": raw}, [1]),
        ({"text": f"{slot}a{slot}", "image_data": [image, raw]}, [2]),
        ({"text": f"{slot}a{slot}", "image_data": [[image, raw]], "n": 2}, [2, 2]),
        ({"text": f"{slot}a", "image_data": [image], "n": 2}, [1, 1]),
        ({"text": [f"{slot}a", f"{slot}b"], "image_data": [image, raw]}, [1, 1]),
        ({"text": [f"{slot}a", f"{slot}b"], "image_data": image}, [1, 1]),
        ({"text": [f"{slot}{slot}", "b"], "image_data": [[image, image], []]}, [2, 0]),
        ({"text": ["a", "b"], "image_data": []}, [0, 0]),
        ({"text": "a", "image_data": None}, [0]),
    ):
        async with scripted() as (calls, engine):
            params = {"max_new_tokens": 1, "n": body.pop("n", 1)}
            status, answer = await calls.post("/generate", {**body, "sampling_params": params})
        assert status == 200, answer
        assert [len(request.prompt.pictures) for request in engine.asked] == images
    sizes = [picture.size for picture in engine.asked[0].prompt.pictures]
    assert sizes == []


IMAGE = {"image_data": data_url(png())}
SLOT = "<|vision_start|><|image_pad|><|vision_end|>"
BAD = [
    ({}, 400, "exactly one of text and input_ids"),
    ({"text": "a", "input_ids": [1]}, 400, "exactly one of text and input_ids"),
    ({"input_ids": []}, 400, "expected one that is not empty"),
    ({"input_ids": [[1], []]}, 400, "expected one that is not empty"),
    ({"input_ids": [1.5]}, 400, "expected one that is not empty"),
    ({"input_ids": [True]}, 400, "expected one that is not empty"),
    ({"text": ""}, 400, "expected one that is not empty"),
    ({"text": ["a", 3]}, 400, "expected one that is not empty"),
    ({"input_ids": [99_999]}, 400, "the prompt has 99999, which is no token"),
    ({"input_ids": [10**30]}, 400, "which is no token of the model"),
    ({"text": "a\ud800b"}, 400, "expected one that is not empty"),
    ({"input_ids": [-1]}, 400, "the prompt has -1, which is no token"),
    ({"text": "a\U0010fffd"}, 400, "which is no token of the model"),
    ({"text": "a<|image_pad|>"}, 400, "1 image tokens in the prompt, expected 0 placeholders"),
    ({"text": "a", "stream": True}, 400, "stream True: vireo serve does not have it"),
    ({"text": "a", "logprob_start_len": 0}, 400, "logprob_start_len 0: vireo serve does not"),
    ({"text": "a", "logprob_start_len": -1, "top_logprobs_num": 0, "stream": False}, 200, ""),
    ({"text": "a", "top_logprobs_num": 2}, 400, "top_logprobs_num 2: vireo serve does not"),
    ({"text": "a", "lora_path": "x"}, 400, "lora_path x: vireo serve does not have it"),
    ({"text": "a", "no_such_field": 1}, 200, ""),
    ({"text": "a", "rid": 7}, 400, "rid: expected a text"),
    ({"text": "a", "rid": ["x"]}, 200, ""),
    ({"text": ["a", "b"], "rid": ["x"]}, 400, "rid: expected a text, or 2 different ones"),
    ({"text": ["a", "b"], "rid": ["x", "x"]}, 400, "rid: expected a text, or 2 different ones"),
    ({"text": SLOT}, 400, "0 pictures for 1 placeholders"),
    ({"text": "a", **IMAGE}, 400, "1 pictures for 0 placeholders"),
    ({"text": SLOT, "image_data": {"url": "x"}}, 400, "found dict, expected a data URL or base64"),
    ({"text": SLOT, "image_data": "no/base 64!"}, 400, "image_data: 'no/base 64!'"),
    ({"text": SLOT, "image_data": base64.b64encode(b"text").decode()}, 400, "is not an image"),
    ({"text": SLOT, "image_data": data_url(png()[:60])}, 400, "truncated"),
    ({"text": [SLOT, "b"], **IMAGE, "image_data": [[IMAGE["image_data"]], None]}, 400, "[] is"),
    ({"text": [SLOT, "b"], "image_data": ["x"]}, 400, "expected an image or a list of images"),
    ({"text": "a", "sampling_params": 3}, 400, "sampling_params: expected an object"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, 400, "expected one for each prompt"),
    ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, 400, "the same n in all"),
    ({"text": "a", "return_logprob": [True, True]}, 400, "return_logprob: expected one value"),
]
BAD_PARAMS = [
    ({"tempreature": 1}, 500, "no argument 'tempreature'"),
    ({"temperature": "hot"}, 500, "temperature 'hot' is of a wrong type"),
    ({"max_new_tokens": True}, 500, "max_new_tokens True is of a wrong type"),
    ({"stop_token_ids": ["a"]}, 500, "are no token ids"),
    ({"temperature": -1}, 400, "temperature: found -1, expected a finite number of at least 0"),
    ({"temperature": float("inf")}, 400, "temperature: found inf"),
    ({"temperature": float("nan")}, 400, "temperature: found nan"),
    ({"top_p": 0}, 400, "top_p: found 0, expected above 0 and at most 1"),
    ({"top_k": 0}, 400, "top_k: found 0, expected -1 (all) or at least 1"),
    ({"max_new_tokens": -1}, 400, "max_new_tokens: found -1, expected at least 0"),
    ({"n": 0}, 400, "n: found 0, expected at least 1"),
    ({"sampling_seed": -1}, 400, "sampling_seed: found -1"),
    ({"min_p": 0.1}, 400, "min_p 0.1: vireo serve does not have it"),
    ({"stop": ["x"]}, 400, "stop ['x']: vireo serve does not have it"),
    ({"repetition_penalty": 1.2}, 400, "repetition_penalty: found 1.2"),
    ({"logit_bias": {"9": -2.0}}, 400, "logit_bias -2.0: only bans, -1e+08 or less, are built"),
    ({"logit_bias": {"99999": -1e9}}, 400, "logit_bias: '99999' is no token id below"),
    ({"logit_bias": {"x": -1e9}}, 400, "logit_bias: 'x' is no token id below"),
    ({"max_new_tokens": 10**6}, 400, "max_new_tokens 1000000 are more than the model's"),
]


@in_loop
async def test_what_is_asked_for_wrongly_is_refused_as_stock_does_and_named():
    async with scripted() as (calls, engine):
        wrong = []
        cases = [*BAD, *(({"text": "a", "sampling_params": p}, s, t) for p, s, t in BAD_PARAMS)]
        for body, status, text in cases:
            before = len(engine.asked)
            found, answer = await calls.post("/generate", body)
            said = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
            ran = len(engine.asked) > before
            if (found, text in said, ran) != (status, True, status == 200):
                wrong.append((body, found, said))
        assert wrong == []


@in_loop
async def test_ids_of_an_image_that_is_not_there_are_refused_before_they_fail_others():
    made, image = renderer(FAMILY), data_url(png())
    slot = made.tokenizer.encode(SLOT, add_special_tokens=False)
    token = made.config.image_token_id
    async with scripted() as (calls, _):
        for ids, images, status in (
            ([4, *slot], [image], 200),
            ([4, *slot, *slot], [image, image], 200),
            ([4, token], None, 400),
            ([4, *slot, token], [image], 400),
            ([4, slot[0], token, token, slot[-1]], [image], 400),  # expanded already
            (slot, None, 400),
            ([4], [image], 400),
        ):
            found, answer = await calls.post("/generate", ask(1, input_ids=ids, image_data=images))
            assert found == status, (ids, answer)


@in_loop
async def test_each_kind_of_error_has_stocks_shape():
    async with scripted() as (calls, _):
        _, answer = await calls.post("/generate", {})
        assert answer.keys() == {"error"}
        assert "exactly one" in answer["error"]["message"]
        _, answer = await calls.post("/generate", {"text": ""})
        assert answer["object"] == "error"
        assert answer.keys() == {"object", "message", "type", "code"}
        _, answer = await calls.post("/generate", ask(params={"x": 1}))
        assert isinstance(answer, str)
        _, answer = await calls.post("/end_weight_update")
        assert answer.keys() == {"success", "message"}
        assert answer["success"] is False
        for path in ("/generate", "/pause_generation", "/abort_request"):
            for options in (
                {},
                {"data": b"{}"},
                {"data": b"", "headers": {"Content-Type": "application/json"}},
                {"data": b"{", "headers": {"Content-Type": "application/json"}},
                {"data": b"[" * 99_999, "headers": {"Content-Type": "application/json"}},
                {"json": [1]},
            ):
                async with calls.session.post(calls.url + path, **options) as response:
                    assert response.status == 400, (path, options)
                    assert (await response.json())["object"] == "error"
        assert (await calls.get("/generate"))[0] == 405
        assert (await calls.get("/no_such_path"))[0] == 404


@pytest.fixture
def picture_site() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/a.png" else 404)
            self.end_headers()
            self.wfile.write(png())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_urls_and_paths_are_not_opened_unless_urls_are_allowed(tmp_path: Path, picture_site: str):
    (tmp_path / "a.png").write_bytes(png())
    path, url = str(tmp_path / "a.png"), f"{picture_site}/a.png"

    async def statuses(**options: Any) -> list[int]:
        async with scripted(**options) as (calls, _):
            found = []
            for image in (url, path, f"file://{path}", f" {url}", f"{picture_site}/b", "ftp://x/y"):
                status, said = await calls.post("/generate", ask(1, text=SLOT, image_data=image))
                assert status == 200 or "image" in said["error"]["message"]
                found.append(status)
            return found

    assert asyncio.run(statuses()) == [400] * 6
    assert asyncio.run(statuses(allow_image_urls=True)) == [200, 400, 400, 200, 400, 400]


# -- aborts ----------------------------------------------------------------------------------------


@in_loop
async def test_an_abort_ends_requests_by_the_beginning_of_their_name_with_what_they_have():
    async with scripted() as (calls, engine):
        tasks = {rid: later(calls, rid=rid) for rid in ("a1", "a10", "b1", "c1")}
        await until(lambda: len(engine.asked) == 4)
        await asyncio.sleep(0.02)
        assert await calls.post("/abort_request", {"rid": "nobody"}) == (200, "")
        assert await calls.post("/abort_request", {"rid": ""}) == (200, "")
        assert await calls.post("/abort_request", {"rid": "a1"}) == (200, "")
        for rid in ("a1", "a10"):
            status, answer = await tasks[rid]
            reason = answer["meta_info"]["finish_reason"]
            assert (status, reason["type"]) == (200, "abort")
            assert 0 < len(answer["output_ids"]) < renderer(FAMILY).max_length - 3
            assert "status_code" in reason
            assert reason["status_code"] is None
        assert not tasks["b1"].done()
        assert await calls.post("/abort_request", {"abort_all": True}) == (200, "")
        assert [finish(await tasks[rid]) for rid in ("b1", "c1")] == ["abort", "abort"]
        assert await calls.post("/abort_request", {"rid": "a1"}) == (200, "")


@in_loop
async def test_a_client_that_hangs_up_aborts_its_requests():
    async with scripted() as (calls, engine):
        task = later(calls, rid=["x", "y"], input_ids=[IDS, IDS])
        other = later(calls, rid="z")
        await until(lambda: len(engine.asked) == 3)
        task.cancel()
        await until(lambda: sorted(engine.done) == ["x", "y"])
        while (await calls.post("/generate", ask(1, rid="x")))[0] != 200:  # the name is free again
            await asyncio.sleep(0.01)
        assert not other.done()
        await calls.post("/abort_request", {"rid": "z"})
        await other


@in_loop
async def test_a_client_that_hangs_up_while_it_waits_leaves_nothing_behind():
    async with scripted() as (calls, engine):
        await calls.post("/pause_generation", {})
        task = later(calls, rid="x")
        await asyncio.sleep(0.05)
        task.cancel()
        again = asyncio.create_task(calls.post("/generate", ask(1, rid="x")))
        while (await asyncio.wait([again], timeout=0.5))[0]:  # refused: the name is not free yet
            again = asyncio.create_task(calls.post("/generate", ask(1, rid="x")))
        await calls.post("/continue_generation")
        assert finish(await again) == "length"
        assert [request.sampling.max_new_tokens for request in engine.asked] == [1]


@in_loop
async def test_a_name_in_flight_is_refused_a_second_time():
    async with scripted() as (calls, engine):
        task = later(calls, rid="x")
        await until(lambda: len(engine.asked) == 1)
        status, answer = await calls.post("/generate", ask(1, rid="x"))
        assert (status, "in flight already: ['x']" in answer["error"]["message"]) == (400, True)
        await calls.post("/abort_request", {"rid": "x"})
        assert finish(await task) == "abort"


@in_loop
async def test_one_request_of_a_batch_that_fails_ends_the_others():
    async with scripted() as (calls, engine):
        task = later(calls, rid="x", input_ids=[IDS, IDS])
        other = later(calls, rid="y")
        await until(lambda: len(engine.asked) == 3)
        engine.error = EngineError("the GPU is on fire")
        status, answer = await task
        assert (status, answer["error"]["message"]) == (500, "the GPU is on fire")
        assert (await other)[0] == 500
        engine.error = None
        assert (await calls.post("/generate", ask(1, rid="x_0")))[0] == 200


# -- pauses and memory -----------------------------------------------------------------------------


@in_loop
async def test_a_pause_by_abort_returns_when_nothing_runs_and_new_requests_wait():
    async with scripted() as (calls, engine):
        running = [later(calls, rid=f"r{i}") for i in range(3)]
        await until(lambda: len(engine.asked) == 3)
        assert (await calls.post("/flush_cache"))[0] == 400
        assert (await calls.get("/health"))[0] == 200
        status, answer = await calls.post("/pause_generation", {})
        assert (status, answer["status"]) == (200, "ok")
        assert [finish(await task) for task in running] == ["abort"] * 3
        assert (await calls.post("/flush_cache"))[0] == 200
        assert [(await calls.get(p))[0] for p in ("/health", "/health_generate")] == [503, 503]
        assert (await calls.get("/model_info"))[0] == 200
        waiting = asyncio.create_task(calls.post("/generate", ask(1)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert (await calls.post("/flush_cache"))[0] == 200  # what waits is not busy
        assert (await calls.post("/pause_generation", {"mode": "abort"}))[0] == 200
        assert (await calls.post("/continue_generation", {"torch_empty_cache": True}))[0] == 200
        assert (await calls.post("/continue_generation"))[0] == 200
        assert finish(await waiting) == "length"
        assert (await calls.get("/health"))[0] == 200
        status, answer = await calls.post("/pause_generation", {"mode": "slowly"})
        assert (status, answer["object"]) == (400, "error")


@in_loop
async def test_a_request_that_comes_while_a_pause_begins_waits_outside_the_engine():
    class Slow(Scripted):
        async def pause(self, mode: Any = "abort") -> None:
            await super().pause(mode)
            await asyncio.sleep(0.1)

    engine = Slow()
    async with serving(engine, renderer(FAMILY)) as url, calling(url) as calls:
        pause = asyncio.create_task(calls.post("/pause_generation", {}))
        await until(lambda: engine.state.name == "paused")
        task = asyncio.create_task(calls.post("/generate", ask(1)))
        assert (await pause)[0] == 200  # and does not wait for it
        assert not task.done()
        await calls.post("/continue_generation")
        assert finish(await task) == "length"


@in_loop
async def test_requests_that_wait_in_a_pause_are_aborted_with_status_499():
    async with scripted() as (calls, engine):
        await calls.post("/pause_generation", {})
        waiting = asyncio.create_task(calls.post("/generate", ask(1, rid="w")))
        await asyncio.sleep(0.05)
        await calls.post("/abort_request", {"rid": "w"})
        assert (await waiting)[0] == 499
        assert engine.asked == []


@pytest.mark.parametrize(("mode", "flushed"), [("in_place", 400), ("retract", 200)])
@in_loop
async def test_a_pause_in_place_or_by_retract_goes_on_where_it_stopped(mode: str, flushed: int):
    async with scripted() as (calls, engine):
        task = asyncio.create_task(calls.post("/generate", ask(40, rid="r")))
        await until(lambda: len(engine.asked) == 1)
        await calls.post("/pause_generation", {"mode": mode})
        assert (await calls.post("/flush_cache"))[0] == flushed
        status, answer = await calls.post("/release_memory_occupation", {"tags": ["kv_cache"]})
        assert status == (200 if mode == "retract" else 400), answer
        if status == 200:
            await calls.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
        await asyncio.sleep(0.1)
        assert not task.done()
        await calls.post("/continue_generation")
        status, answer = await task
        assert (status, len(answer["output_ids"])) == (200, 40)


@in_loop
async def test_a_flush_waits_for_what_runs_as_long_as_it_may():
    async with scripted() as (calls, engine):
        task = asyncio.create_task(calls.post("/generate", ask(30)))
        await until(lambda: len(engine.asked) == 1)
        assert (await calls.get("/flush_cache"))[0] == 400
        assert (await calls.post("/flush_cache?timeout=0.01"))[0] == 400
        assert (await calls.get("/flush_cache?timeout=10"))[0] == 200
        assert (await calls.get("/flush_cache?timeout=soon"))[0] == 400
        assert (await task)[0] == 200


@in_loop
async def test_memory_in_an_order_that_kills_stock_is_refused(capsys: pytest.CaptureFixture):
    async with scripted() as (calls, engine):

        async def said(path: str, tags: list[str] | None, *words: str) -> None:
            status, answer = await calls.post(f"/{path}_memory_occupation", {"tags": tags})
            if not words:
                assert (status, answer) == (200, None)
                return
            assert (status, answer["success"]) == (400, False)
            assert all(word in answer["message"] for word in words), answer
            assert answer["message"] in capsys.readouterr().err

        await said("release", ["kv_cache"], "the engine is running")
        await said("resume", ["kv_cache"], "kv_cache is not released")
        task = later(calls, rid="r")
        await until(lambda: len(engine.asked) == 1)
        await calls.post("/pause_generation", {"mode": "in_place"})
        await said("release", None, "requests are on their way")
        await calls.post("/continue_generation")
        await calls.post("/pause_generation", {})
        assert finish(await task) == "abort"
        await said("release", ["kv_cache", "weights"])
        await said("release", ["weights"], "weights is released already")
        await said("resume", None, "cuda_graph is not released")
        status, answer = await calls.post("/continue_generation")
        assert (status, answer["success"]) == (400, False)
        status, answer = await calls.post("/weights_checker", {"action": "checksum"})
        assert (status, "weights are released" in answer["message"]) == (400, True)
        waiting = later(calls, rid="w")  # on stock, too, it waits as long as the pause
        assert (await calls.post("/pause_generation", {}))[0] == 200
        await said("resume", ["weights"])
        await said("resume", ["kv_cache"])
        status, _ = await calls.post("/release_memory_occupation", {"tags": ["disk"]})
        assert status == 400
        assert not waiting.done()
        assert engine.state.name == "resumed"  # the weights are garbage
        assert (await calls.post("/continue_generation"))[0] == 400
        waiting.cancel()


# -- weights ---------------------------------------------------------------------------------------


class Writes:
    """A receiver that keeps what it gets; `error` is raised instead, `slow` seconds later."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.error: Exception | None = None
        self.slow = 0.0
        self.during: Callable[[], Any] = lambda: None

    def _take(self, *what: Any) -> None:
        time.sleep(self.slow)
        self.during()
        if self.error is not None:
            raise self.error
        self.got.append(what)

    def from_disk(self, path: str) -> None:
        self._take("disk", path)

    def from_tensors(self, payloads: list[str]) -> None:
        self._take("tensors", payloads)

    def from_group(self, *given: Any) -> None:
        self._take("group", *given)

    def init_group(self, *given: Any) -> None:
        self._take("init", *given)

    def destroy_group(self, name: str) -> None:
        self._take("destroy", name)

    def checksums(self) -> dict[str, str]:
        return {"a": "00", "b": "11"}


async def ok(calls: Calls, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    status, answer = await calls.post(path, body or {})
    assert (status, answer["success"]) == (200, True), answer
    return answer


async def no(calls: Calls, path: str, body: dict[str, Any] | None, text: str) -> None:
    status, answer = await calls.post(path, body or {})
    assert (status, answer["success"]) == (400, False), answer
    assert text in answer["message"], answer


BUCKET = {"serialized_named_tensors": ["p0", "p1"], "flush_cache": False}


@in_loop
async def test_updates_stand_in_a_session_but_for_those_from_disk():
    writes = Writes()
    async with scripted(receiver=writes) as (calls, engine):
        await no(calls, "/update_weights_from_tensor", BUCKET, "no weight update is open")
        group = {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2, 3]]}
        await no(calls, "/update_weights_from_distributed", group, "no weight update is open")
        await no(calls, "/end_weight_update", {}, "no weight update is open")
        await ok(calls, "/begin_weight_update", {"selector": "all"})
        await no(calls, "/begin_weight_update", {}, "already open")
        await ok(calls, "/update_weights_from_tensor", BUCKET)
        assert engine.weights == "default"
        await ok(calls, "/update_weights_from_distributed", group | {"weight_version": "v1"})
        assert (await calls.get("/model_info"))[1]["weight_version"] == "v1"
        await ok(calls, "/end_weight_update")
        await ok(calls, "/update_weights_from_disk", {"model_path": "new", "weight_version": "v2"})
        found = (await calls.get("/model_info"))[1]
        assert (found["weight_version"], found["model_path"]) == ("v2", "new")
        names = {"master_address": "h", "master_port": 9, "rank_offset": 1, "world_size": 2}
        await ok(calls, "/init_weights_update_group", names)
        await ok(calls, "/destroy_weights_update_group", {"group_name": "g"})
        assert (await calls.post("/init_weights_update_group", {}))[0] == 400
        assert (await calls.post("/update_weights_from_disk", {}))[0] == 400
        answer = await ok(calls, "/weights_checker", {"action": "checksum"})
        assert answer["ranks"][0]["checksums"] == {"a": "00", "b": "11"}
        assert len(answer["per_engine_checksum"]) == 64
        await no(calls, "/weights_checker", {"action": "reset_tensors"}, "only has checksum")
    default = "weight_update_group"
    assert writes.got == [
        ("tensors", ["p0"]),
        ("group", ["a"], ["bfloat16"], [[2, 3]], default),
        ("disk", "new"),
        ("init", "h", 9, 1, 2, default, "nccl"),
        ("destroy", "g"),
    ]


@in_loop
async def test_an_update_waits_for_what_runs_and_what_comes_waits_for_the_update():
    writes = Writes()
    async with scripted(receiver=writes) as (calls, engine):
        running = asyncio.create_task(calls.post("/generate", ask(20, rid="before")))
        await until(lambda: len(engine.asked) == 1)
        seen: list[Any] = []
        writes.during = lambda: seen.append((list(engine.done), len(engine.asked)))
        writes.slow = 0.05
        disk = {"model_path": "new", "weight_version": "v1"}
        update = asyncio.create_task(calls.post("/update_weights_from_disk", disk))
        await asyncio.sleep(0.01)
        after = asyncio.create_task(calls.post("/generate", ask(2, rid="after")))
        assert (await update)[0] == 200
        assert seen == [(["before"], 1)]
        assert (await running)[1]["meta_info"]["weight_version"] == "default"
        assert (await after)[1]["meta_info"]["weight_version"] == "v1"


@in_loop
async def test_weights_that_change_under_a_frozen_request_show_in_its_spans():
    writes = Writes()
    async with scripted(receiver=writes) as (calls, engine):
        task = asyncio.create_task(calls.post("/generate", ask(30)))
        await until(lambda: len(engine.asked) == 1)
        await asyncio.sleep(0.02)
        await calls.post("/pause_generation", {"mode": "in_place"})
        await ok(calls, "/begin_weight_update")
        await ok(calls, "/update_weights_from_tensor", BUCKET)
        assert engine.state.name == "updating"
        await ok(calls, "/update_weights_from_tensor", BUCKET | {"weight_version": "v1"})
        await ok(calls, "/end_weight_update")
        assert engine.state.name == "paused"
        # The default asks for a flush, which frozen requests forbid: the weights are in, no success
        disk = {"model_path": "new", "weight_version": "v2"}
        await no(calls, "/update_weights_from_disk", disk, "flush_cache finds requests running")
        assert writes.got[-1] == ("disk", "new")
        assert engine.weights == "v1"
        await calls.post("/continue_generation")
        meta = (await task)[1]["meta_info"]
    first, second = meta["weight_versions"]
    assert (first["version"], second["version"]) == ("default", "v1")
    assert 0 == first["start"] < first["end"] == second["start"] < second["end"] == 30
    assert meta["weight_version"] == "v1"


@in_loop
async def test_refused_weights_change_nothing_and_failed_ones_stop_generation():
    writes = Writes()
    async with scripted(receiver=writes) as (calls, engine):
        writes.error = InputError("model.layers.0.no_such.weight is unknown")
        disk = {"model_path": "new", "weight_version": "v1"}
        await no(calls, "/update_weights_from_disk", disk, "no_such.weight is unknown")
        assert finish(await calls.post("/generate", ask(1))) == "length"
        await ok(calls, "/begin_weight_update")
        await no(calls, "/update_weights_from_tensor", BUCKET, "no_such.weight is unknown")
        writes.error = RuntimeError("broken pipe")
        await no(calls, "/update_weights_from_tensor", BUCKET, "RuntimeError('broken pipe')")
        await ok(calls, "/end_weight_update")
        assert engine.weights == "default"
        status, answer = await calls.post("/generate", ask(1))
        assert (status, "send weights" in answer["error"]["message"]) == (500, True)
        assert (await calls.get("/health"))[0] == 503
        writes.error = None
        await ok(calls, "/update_weights_from_disk", disk)
        assert finish(await calls.post("/generate", ask(1))) == "length"


@in_loop
async def test_weights_after_a_release_and_a_session_that_a_dead_client_left_open():
    async with scripted(receiver=Writes()) as (calls, engine):
        await calls.post("/pause_generation", {})
        await calls.post("/release_memory_occupation", {})
        await no(calls, "/update_weights_from_disk", {"model_path": "x"}, "the engine is released")
        await calls.post("/resume_memory_occupation", {"tags": ["weights"]})
        await ok(calls, "/begin_weight_update")
        await ok(calls, "/update_weights_from_tensor", BUCKET)
        await ok(calls, "/end_weight_update")
        assert engine.state.name == "released"
        await calls.post("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
        assert (await calls.post("/continue_generation"))[0] == 200
        await calls.post("/pause_generation", {})
        await ok(calls, "/begin_weight_update")
        await ok(calls, "/update_weights_from_tensor", BUCKET)
        # Here the client dies; the next one begins like this.
        assert (await calls.post("/continue_generation"))[0] == 200
        assert finish(await calls.post("/generate", ask(1))) == "length"
        await ok(calls, "/end_weight_update")
        await ok(calls, "/begin_weight_update")
        await ok(calls, "/update_weights_from_tensor", BUCKET | {"abort_all_requests": True})
        bucket = BUCKET | {"load_format": "flattened_bucket"}
        await no(calls, "/update_weights_from_tensor", bucket, "only has the default one")


@in_loop
async def test_an_update_goes_on_when_its_client_hangs_up():
    writes = Writes()
    writes.slow = 0.1
    async with scripted(receiver=writes) as (calls, engine):
        task = asyncio.create_task(calls.post("/update_weights_from_disk", {"model_path": "new"}))
        await until(lambda: engine.state.name == "updating")
        task.cancel()
        await until(lambda: engine.state.name == "running")
        assert writes.got == [("disk", "new")]


# -- keys, load, faults ----------------------------------------------------------------------------

KEYS = {
    # (api key, admin key) of the server: (key given, status of /generate, of a control call)
    (None, None): [("", 200, 200), ("any", 200, 200)],
    ("a", None): [("", 401, 401), ("b", 401, 401), ("a", 200, 200)],
    (None, "b"): [("", 200, 401), ("a", 200, 401), ("b", 200, 200)],
    ("a", "b"): [("", 401, 401), ("a", 200, 401), ("b", 401, 200)],
}


@pytest.mark.parametrize("keys", KEYS)
@in_loop
async def test_keys_open_what_they_open_on_stock(keys: tuple[str | None, str | None]):
    api, admin = keys
    async with scripted(api_key=api, admin_api_key=admin) as (calls, _):
        for key, generate, control in KEYS[keys]:
            assert (await calls.post("/generate", ask(1), key))[0] == generate
            assert (await calls.get("/server_info", key))[0] == generate
            assert (await calls.get("/flush_cache", key))[0] == control
            assert (await calls.post("/abort_request", {"rid": "x"}, key))[0] == control
        assert (await calls.get("/health"))[0] == 200
        assert (await calls.get("/health_generate"))[0] == 200
    for path in protocol.CONTROL:
        if api or admin:
            async with scripted(api_key=api, admin_api_key=admin) as (calls, _):
                assert (await calls.post(path)) == (401, {"error": "Unauthorized"})
            break


@in_loop
async def test_every_control_endpoint_of_the_protocol_is_there_and_guarded():
    async with scripted(admin_api_key="b") as (calls, _):
        for path in protocol.CONTROL:
            assert await calls.post(path) == (401, {"error": "Unauthorized"})
    async with scripted(receiver=Writes()) as (calls, _):
        for path in protocol.CONTROL:
            assert (await calls.post(path))[0] in (200, 400)


@in_loop
async def test_a_hundred_requests_at_once_are_each_answered_as_asked():
    async with scripted(step=0.0005) as (calls, engine):
        bodies = [
            {"input_ids": [4] * (1 + i % 7), "sampling_params": {"max_new_tokens": 1 + i % 11}}
            for i in range(100)
        ]
        bodies = [{**body, "rid": f"r{i:03}"} for i, body in enumerate(bodies)]
        answers = await asyncio.gather(*(calls.post("/generate", body) for body in bodies))
    assert len(engine.asked) == 100
    for i, (status, answer) in enumerate(answers):
        assert status == 200
        assert answer["meta_info"]["id"] == f"r{i:03}"
        assert answer["meta_info"]["prompt_tokens"] == 1 + i % 7
        assert len(answer["output_ids"]) == 1 + i % 11


@in_loop
async def test_faults_can_be_planted_in_what_comes_and_in_what_is_answered():
    seen: list[Prompt] = []

    def received(prompt: Prompt) -> Prompt:
        seen.append(prompt)
        return seen[0]  # stale: whatever is asked, the first is what the engine sees

    async with scripted(fault=Fault(received=received)) as (calls, engine):
        await calls.post("/generate", ask(1, text=SLOT, image_data=data_url(png(shade=1))))
        await calls.post("/generate", ask(1, text=SLOT, image_data=data_url(png(shade=2))))
    assert engine.asked[0].prompt is engine.asked[1].prompt
    assert seen[0].pictures[0].getpixel((0, 0)) != seen[1].pictures[0].getpixel((0, 0))

    def answered(answer: dict[str, Any]) -> dict[str, Any] | web.Response:
        if answer["meta_info"]["id"] == "bad":
            return web.Response(status=429, headers={"Retry-After": "1"})
        return {**answer, "output_ids": [1]}

    async with scripted(fault=Fault(answered=answered)) as (calls, _):
        assert (await calls.post("/generate", ask(3)))[1]["output_ids"] == [1]
        assert (await calls.post("/generate", ask(3, rid="bad")))[0] == 429


@in_loop
async def test_a_body_of_many_images_is_taken():
    async with scripted() as (calls, engine):
        picture = PIL.Image.effect_noise((1200, 1200), 90).convert("RGB").resize((28, 28))
        out = io.BytesIO()
        picture.save(out, "PNG")
        large = data_url(out.getvalue() + b"\0" * (3 << 20))  # bytes after a PNG's end are no part
        status, answer = await calls.post(
            "/generate", ask(1, text=SLOT * 2, image_data=[large] * 2)
        )
    assert status == 200, answer
    assert len(engine.asked[0].prompt.pictures) == 2


# -- with a model ----------------------------------------------------------------------------------


def embedded(folder: str) -> tuple[EmbeddedEngine, Receiver]:
    made = renderer(FAMILY)
    engine = EmbeddedEngine.of_folder(folder, made, device="cpu")
    return engine, Receiver(engine.policy.hf, made.family)


@in_loop
async def test_answers_over_http_are_those_of_the_engine_itself():
    made, prompts = renderer(FAMILY), [one_picture(), renderer(FAMILY).rollout(row(user("Hi")))]
    engine, receiver = embedded(tiny(FAMILY))
    rest = (made.stop_ids, made.banned_ids)
    wanted = [
        Request(prompt, Sampling(12, temperature, seed=seed), *rest)
        for prompt in prompts
        for seed, temperature in ((1, 1.0), (2, 0.7), (3, 0.0))
    ]
    async with serving(engine, made, receiver) as url, calling(url) as calls:
        there = await asyncio.gather(
            *(calls.post("/generate", wire(request)) for request in wanted)
        )
        here = await asyncio.gather(
            *(engine.generate(replace(request, rid=request.rid[::-1])) for request in wanted)
        )
    for (status, answer), own in zip(there, here):
        assert status == 200, answer
        assert answer["output_ids"] == own.ids
        scored = [value for value, _, _ in answer["meta_info"]["output_token_logprobs"]]
        assert scored == pytest.approx(own.logprobs, abs=1e-5)
        assert answer["prompt_token_ids"] == own.prompt_ids
    assert len({tuple(answer["output_ids"]) for _, answer in there[:3]}) == 3


@in_loop
async def test_parameters_at_their_limits_do_not_fail_the_requests_beside_them():
    engine, receiver = embedded(tiny(FAMILY))
    last = renderer(FAMILY).config.get_text_config().vocab_size - 1
    limits: list[dict[str, Any]] = [
        *({"temperature": t} for t in (1e-6, 1e30, 9.9e-7)),
        *({"top_p": p} for p in (1e-300, 1, 1.0)),
        *({"top_k": k} for k in (10**30, 1)),
        *({"sampling_seed": seed} for seed in (0, 2**63 - 1)),
        *({"stop_token_ids": [stop]} for stop in (10**30, -1)),
        {"logit_bias": {str(i): -1e9 for i in range(last)}},
        {},
    ]
    async with serving(engine, renderer(FAMILY), receiver) as url, calling(url) as calls:
        bodies = [ask(3, params=params, return_logprob=True) for params in limits]
        answers = await asyncio.gather(*(calls.post("/generate", body) for body in bodies))
    for params, (status, answer) in zip(limits, answers):
        assert status == 200, (params, answer)
        assert len(answer["output_ids"]) > 0
        scored = answer["meta_info"]["output_token_logprobs"]
        assert all(-1e5 < value <= 0 for value, _, _ in scored)
    assert {*answers[-2][1]["output_ids"]} == {last}


@in_loop
async def test_weights_by_folder_and_by_shared_memory_change_answers_and_checksums(tmp_path: Path):
    made, prompt = renderer(FAMILY), one_picture()
    other = str(build(FAMILY, tmp_path / "other", size="test", seed=7))
    engine, receiver = embedded(tiny(FAMILY))
    greedy = Request(prompt, Sampling(6, 0.0), made.stop_ids, made.banned_ids)

    async def scored(calls: Calls) -> list[float]:
        status, answer = await calls.post("/generate", wire(greedy))
        assert status == 200, answer
        return [value for value, _, _ in answer["meta_info"]["output_token_logprobs"]]

    async def sums(calls: Calls) -> dict[str, str]:
        return (await ok(calls, "/weights_checker"))["ranks"][0]["checksums"]

    async with serving(engine, made, receiver) as url, calling(url) as calls:
        first, before = await scored(calls), await sums(calls)
        await ok(calls, "/update_weights_from_disk", {"model_path": other, "weight_version": "o"})
        second, after = await scored(calls), await sums(calls)
        assert before.keys() == after.keys()
        assert first != second
        home, _ = embedded(tiny(FAMILY))
        named = [(n, t) for n, t in home.policy.hf.state_dict().items() if n != "lm_head.weight"]
        names = {n: n.replace("model.language_model.", "model.") for n, _ in named}
        names = {n: c.replace("model.visual.", "visual.") for n, c in names.items()}
        await calls.post("/pause_generation", {})
        await ok(calls, "/begin_weight_update")
        with packed([(names[n], t) for n, t in named]) as payloads:
            bucket = {"serialized_named_tensors": payloads, "flush_cache": False}
            await ok(calls, "/update_weights_from_tensor", bucket | {"weight_version": "back"})
        await ok(calls, "/end_weight_update")
        wrong = [("model.layers.0.no_such.weight", named[0][1])]
        await ok(calls, "/begin_weight_update")
        with packed(wrong) as payloads:
            bucket = {"serialized_named_tensors": payloads}
            await no(calls, "/update_weights_from_tensor", bucket, "no_such")
        await ok(calls, "/end_weight_update")
        await calls.post("/continue_generation")
        assert await sums(calls) == before
        assert await scored(calls) == first


@in_loop
async def test_memory_of_a_model_is_given_back_and_filled_again():
    made = renderer(FAMILY)
    engine, receiver = embedded(tiny(FAMILY))
    body = wire(Request(one_picture(), Sampling(5, 0.0), made.stop_ids, made.banned_ids))
    async with serving(engine, made, receiver) as url, calling(url) as calls:
        first = (await calls.post("/generate", body))[1]["output_ids"]
        await calls.post("/pause_generation", {})
        assert (await calls.post("/release_memory_occupation", {"tags": ["weights"]}))[0] == 200
        assert sum(p.numel() for p in engine.policy.parameters()) == 0
        assert (await calls.post("/resume_memory_occupation", {"tags": ["weights"]}))[0] == 200
        await ok(calls, "/update_weights_from_disk", {"model_path": tiny(FAMILY)})
        await calls.post("/continue_generation")
        assert (await calls.post("/generate", body))[1]["output_ids"] == first


@in_loop
async def test_the_client_of_this_package_leads_it_through_a_step_of_training(tmp_path: Path):
    made, prompt = renderer(FAMILY), one_picture()
    other = str(build(FAMILY, tmp_path / "other", size="test", seed=7))
    engine, receiver = embedded(tiny(FAMILY))
    trained, _ = embedded(other)
    greedy = Request(prompt, Sampling(6, 0.0), made.stop_ids, made.banned_ids)
    keys = {"api_key": "a", "admin_api_key": "b"}

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        hf = trained.policy.hf
        yield from published(hf, made.family, targets_of(hf)[0].items())

    async with (
        serving(engine, made, receiver, **keys) as url,
        SglangEngine(Http(url, api_key="a", admin_key="b", timeout=10.0), made) as client,
    ):
        assert (client.seeds, client.version.sessions, client.form) == (True, True, "embedded")
        first = await client.generate(replace(greedy, rid=new_rid()))
        check("sample", greedy, first, made.config.get_text_config().vocab_size, {"default"})
        await client.pause()
        await client.sleep()
        await client.wake(["weights"])
        await client.update_weights(Folder(other), "folder")
        await client.wake(["kv_cache"])
        await client.resume()
        second = await client.generate(replace(greedy, rid=new_rid()))
        assert second.spans == [("folder", len(second.ids))]
        assert second.logprobs != first.logprobs
        for version, weights in (("shared", Tensors(named)), ("sent", Broadcast(named))):
            await client.update_weights(Folder(tiny(FAMILY)), "home")
            home = await client.generate(replace(greedy, rid=new_rid()))
            assert home.logprobs == first.logprobs
            await client.pause("in_place")
            await client.update_weights(weights, version)
            await client.resume()
            there = await client.generate(replace(greedy, rid=new_rid()))
            assert (there.logprobs, there.spans[0][0]) == (second.logprobs, version)
        late = asyncio.create_task(client.generate(replace(greedy, rid="late")))
        await client.abort(["late"])
        assert (await late).finish in ("abort", "length", "stop")
        assert (await client.health()).ready


# -- the command -----------------------------------------------------------------------------------


@contextlib.contextmanager
def command(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`vireo serve` as a process, and its URL; killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "vireo", "serve", "--model", tiny(FAMILY), "--port", "0", *flags],
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"serving (\S+) at (http://127\.0\.0\.1:\d+)\n", line)
        assert found, (line, process.poll() and process.stderr.read())
        yield process, found[2]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_the_command_serves_a_model_until_it_is_told_to_stop():
    with command("--api-key", "k", "--max_rows=8", "--dtype", "fp32") as (process, url):

        async def talk() -> None:
            async with calling(url) as calls:
                info = (await calls.get("/server_info", "k"))[1]
                assert (info["version"], info["vireo"]) == ("0.5.23", __version__)
                assert "k" not in info.values()
                model = (await calls.get("/model_info", "k"))[1]
                assert model["model_path"] == tiny(FAMILY)
                assert model["weight_version"] == "default"
                assert model["model_type"] == FAMILY
                assert model["architectures"] == ["Qwen2_5_VLForConditionalGeneration"]
                assert model["has_image_understanding"] is True
                body = ask(4, text=SLOT + "Hi", image_data=data_url(png()))
                status, answer = await calls.post("/generate", body, "k")
                assert (status, len(answer["output_ids"]) > 0) == (200, True)
                assert (await calls.post("/generate", body))[0] == 401
                long = ask(None, params={"ignore_eos": True})
                running = asyncio.create_task(calls.post("/generate", long, "k"))
                while (await calls.get("/flush_cache", "k"))[0] == 200:  # not busy yet
                    await asyncio.sleep(0.01)
                process.send_signal(signal.SIGTERM)
                answer = await running
                assert finish(answer) == "abort", answer

        asyncio.run(asyncio.wait_for(talk(), 60))
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out, err) == (0, "", "")


def test_ctrl_c_ends_the_server_and_the_requests_that_run(capsys: pytest.CaptureFixture):
    engine = Scripted()
    server = Server(engine, renderer(FAMILY), None)

    async def talk() -> tuple[int, Any]:
        with bound("127.0.0.1", 0) as sock:
            serving = asyncio.create_task(until_stopped(server, sock))
            async with calling(f"http://127.0.0.1:{sock.getsockname()[1]}") as calls:
                await until(lambda: "serving" in capsys.readouterr().out)
                running = later(calls)
                await until(lambda: len(engine.asked) == 1)
                os.kill(os.getpid(), signal.SIGINT)
                answer = await running
                await serving
                return answer

    assert finish(asyncio.run(asyncio.wait_for(talk(), 30))) == "abort"
    assert engine.closed


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(capsys: pytest.CaptureFixture):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", "--model", "no-such-model", "--port", port]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: 127.0.0.1:{port} cannot be opened: ")
    assert "Address already in use" in err
    assert cli.main(["serve", "--model", "no-such-model", "--port", "0"]) == 2
    assert "no model folder at no-such-model" in capsys.readouterr().err
    assert cli.main(["serve", "--model", "no-such-model", "--port", "70000"]) == 2
    assert "port must be 0-65535" in capsys.readouterr().err
    assert cli.main(["serve", "--model", "no-such-model", "--host", "203.0.113.9"]) == 2
    assert "203.0.113.9:30000 cannot be opened" in capsys.readouterr().err
