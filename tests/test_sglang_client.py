"""The client of SGLang servers against one that fails as it is told to, over real sockets."""

from __future__ import annotations

import asyncio
import io
import sys
import types
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import numpy as np
import PIL.Image
import pytest

from tests import tiny_models
from tests.faulty_server import FaultyServer, Word
from tests.tiny_models import noise, renderer, row, user
from vireo.data.conversation import ImageRef
from vireo.data.prompt import Prompt
from vireo.errors import InputError
from vireo.rollout import calls
from vireo.rollout.bridge import VLMRolloutEngine
from vireo.rollout.contract import ContractError
from vireo.rollout.engine import EngineError, EngineGone, EngineRefused, RolloutEngine, WrongOrder
from vireo.rollout.http import Http
from vireo.rollout.sample import Generation, Request, Sampling
from vireo.rollout.several import SeveralEngines
from vireo.rollout.sglang import SglangEngine
from vireo.weights.source import Folder

FAMILY = "qwen2_5_vl"
STOP = 9  # the stand-in's last token


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_LIMIT_S", 0.1)


@cache
def prompt(text: str = "What is it?", shade: int | None = None) -> Prompt:
    """Of text alone, or of a picture too, of which one pixel has that shade of grey."""
    if shade is None:
        return renderer(FAMILY).rollout(row(user(text)))
    pixels = np.full((56, 56, 3), 100, np.uint8)
    pixels[20, 30] = shade
    picture = ImageRef(PIL.Image.fromarray(pixels))
    return renderer(FAMILY).rollout(row(user(0, text), images=[picture]))


def request(made: Prompt | None = None, **sampling: Any) -> Request:
    return Request(made or prompt(), Sampling(3, **sampling), (STOP,), (1, 2))


def client(url: str, keys: tuple[str | None, str | None] = (None, None), **options: Any):
    usual: dict[str, Any] = {"timeout": 5.0, "backoff": 0.01, "retries": 2}
    http = Http(url, api_key=keys[0], admin_key=keys[1], **(usual | options))
    return SglangEngine(http, renderer(FAMILY))


@asynccontextmanager
async def serving(*script: Word, rule: Word = "ok", **options: Any):
    """A server and an engine that is started on it."""
    async with FaultyServer(*script, rule=rule) as server, client(server.url, **options) as engine:
        server.calls.clear()
        yield server, engine


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.005)


# -- what is sent again, and what stops -----------------------------------------------------------

AGAIN: dict[str, list[Word]] = {
    "no room": [429, 503],
    "no room, and says when": [(503, {"Retry-After": "0"})],
    "failed once": [500],
    "the connection broke before the answer": ["reset"],
    "the connection broke in the answer": ["cut", "cut"],
    "one after the other": ["reset", 429, 500],
}


@pytest.mark.parametrize("script", AGAIN.values(), ids=AGAIN.keys())
def test_a_passing_failure_is_tried_again(script: list[Word]) -> None:
    async def test() -> None:
        async with serving(*script) as (server, engine):
            got = await engine.generate(request())
            assert (got.ids, got.finish, got.matched) == ([7, 8, 9], "stop", 9)
            assert len(server.bodies) == len(script) + 1
            assert engine.http.failures == script.count(500)

    run(test)


STOPS: dict[str, tuple[list[Word], str]] = {
    "bad request": ([400], "400: 'the server says 400'"),
    "unknown key": ([401], "401.*--engine_api_key"),
    "forbidden": ([403], "403.*--engine_admin_key"),
    "not found": ([404], "404"),
    "wrong shape": ([422], "422"),
    "redirect": ([(302, {"Location": "http://127.0.0.1:1/"})], "302"),
    "failed twice": ([500, 500], "500"),
    "never any room": ([429] * 3, "429"),
    "broken three times": (["reset"] * 3, "connection broke"),
    "no JSON": (["garbage"], "<html>not now"),
    "other JSON": (["shape"], "output_ids, meta_info, but '{\"a\": 1}'"),
    "too few log-probs": (["short"], "2 log-probabilities are of other tokens"),
    "log-probs of others": (["other"], "of other tokens"),
    "NaN": (["nan"], "computed NaN"),
    "a positive log-prob": (["positive"], "token 7 is 0.25"),
    "a log-prob that is no number": (["infinite"], "is nan"),
    "an unknown finish": (["unfinished"], "'tired'"),
    "other weights": (["weights"], r"'another', expected \['default'\]"),
    "the answer to another request": (["rid"], "that to request 0000"),
}


@pytest.mark.parametrize(("script", "said"), STOPS.values(), ids=STOPS.keys())
def test_other_failures_stop_and_say_why(script: list[Word], said: str) -> None:
    async def test() -> None:
        async with serving(*script) as (server, engine):
            with pytest.raises(EngineError, match=said) as error:
                await engine.generate(request())
            assert not isinstance(error.value, EngineGone)
            assert server.url in str(error.value)
            assert len(server.bodies) == len(script)
            assert server.bodies[-1]["rid"] in str(error.value)
            assert (await engine.generate(request())).ids == [7, 8, 9]

    run(test)


def test_an_answer_of_another_prompt_breaks_the_contract() -> None:
    async def test() -> None:
        async with serving("prompt") as (_, engine):
            bridge = VLMRolloutEngine(engine, renderer(FAMILY))
            with pytest.raises(ContractError, match="the engine saw another prompt"):
                await bridge.samples(prompt(), Sampling(3), group="g")

    run(test)


def test_a_request_that_the_server_aborted_has_an_empty_response() -> None:
    async def test() -> None:
        async with serving(499) as (server, engine):
            got = await engine.generate(request())
            assert (got.ids, got.logprobs, got.finish, got.spans) == ([], [], "abort", [])
            assert len(server.bodies) == 1

    run(test)


def test_an_empty_aborted_response_makes_a_partial_sample() -> None:
    async def test() -> None:
        async with serving(499) as (_, engine):
            bridge = VLMRolloutEngine(engine, renderer(FAMILY))
            (sample,) = await bridge.samples(prompt(), Sampling(3), group="g")
            assert (sample.status, sample.response_ids) == ("partial", [])

    run(test)


def test_a_request_is_sent_again_under_another_name_after_its_first_was_ended() -> None:
    async def test() -> None:
        async with serving("reset", 429) as (server, engine):
            asked = request()
            await engine.generate(asked)
            first, second, third = (body["rid"] for body in server.bodies)
            assert first == asked.rid
            assert len({first, second, third}) == 3
            assert {len(first), len(second), len(third)} == {32}
            assert server.calls == [("/abort_request", {"rid": first})]

    run(test)


@pytest.mark.parametrize("word", ["die", "hang"])
def test_a_server_that_is_gone_is_said_to_be(word: str) -> None:
    async def test() -> None:
        async with serving("ok", word, timeout=0.4) as (server, engine):
            await engine.generate(request())
            said = "is dead" if word == "die" else "hangs: silent for 0.4 s"
            with pytest.raises(EngineGone, match=said):
                await engine.generate(request())
            health = await engine.health()
            assert health.ready == (word == "hang")
            assert (server.url in health.why) == (word == "die")

    run(test)


def test_a_server_that_goes_down_is_not_asked_again() -> None:
    async def test() -> None:
        async with serving(500) as (server, engine):
            server.words["/model_info"] = [(503, "down")]
            with pytest.raises(EngineGone, match=r"500.*going down"):
                await engine.generate(request())
            assert len(server.bodies) == 1

    run(test)


def test_no_request_is_lost_or_answered_twice() -> None:
    """Many at once through every passing failure, and some that stop."""
    script: list[Word] = ["reset", 503, "ok", "cut", 500, "ok", "garbage", 429, "short", "ok", 400]

    async def test() -> None:
        options: dict[str, Any] = {"concurrency": 8, "retries": 20, "backoff": 0.001}
        async with serving(*script * 2, **options) as (server, engine):
            made = [request() for _ in range(40)]
            got = await asyncio.gather(*map(engine.generate, made), return_exceptions=True)
            good = [one for one in got if isinstance(one, Generation)]
            bad = [one for one in got if isinstance(one, EngineError)]
            assert len(good) + len(bad) == 40
            assert 6 <= len(bad) <= 7  # those that stop; and one may have met both 500
            assert all(one.ids == [7, 8, 9] for one in good)
            assert max(server.answered.values()) == 1
            assert server.busiest <= 8
            names = [body["rid"] for body in server.bodies]
            assert len(set(names)) == len(names)

    run(test)


def test_an_answer_that_comes_twice_is_read_once() -> None:
    async def test() -> None:
        async with serving("twice", concurrency=1) as (server, engine):
            first = await engine.generate(request())
            await asyncio.sleep(0.02)
            second = await engine.generate(request())
            assert first.ids == second.ids == [7, 8, 9]
            assert len(server.bodies) == 2

    run(test)


# -- limits ---------------------------------------------------------------------------------------


def test_control_calls_pass_by_requests_that_wait() -> None:
    async def test() -> None:
        async with serving(rule="slow", concurrency=2) as (server, engine):
            waiting = [asyncio.create_task(engine.generate(request())) for _ in range(5)]
            await until(lambda: server.busy == 2)
            assert (await engine.health()).ready
            await engine.abort()
            got = await asyncio.gather(*waiting)
            assert sorted(len(one.ids) for one in got) == [0, 0, 0, 2, 2]
            assert {one.finish for one in got} == {"abort"}
            assert server.busiest == 2

    run(test)


def test_a_server_that_answers_others_does_not_hang() -> None:
    """The limit is of its silence: one long response among short ones is not over it."""

    async def test() -> None:
        async with serving("slow", timeout=0.4) as (server, engine):
            long = asyncio.create_task(engine.generate(request()))
            await until(lambda: server.busy == 1)
            for _ in range(6):
                await asyncio.sleep(0.1)
                await engine.generate(request())
            assert not long.done()
            with pytest.raises(EngineGone, match="hangs"):
                await long

    run(test)


def test_the_silence_of_a_paused_server_is_no_failure() -> None:
    async def test() -> None:
        async with serving("slow", timeout=0.3) as (server, engine):
            frozen = asyncio.create_task(engine.generate(request()))
            await until(lambda: server.busy == 1)
            await engine.pause("in_place")
            for _ in range(3):
                await asyncio.sleep(0.15)
            assert not frozen.done()
            await engine.resume()
            with pytest.raises(EngineGone, match="hangs"):
                await frozen

    run(test)


def test_a_cancelled_request_leaves_its_place() -> None:
    async def test() -> None:
        async with serving("slow", concurrency=1) as (server, engine):
            task = asyncio.create_task(engine.generate(request()))
            await until(lambda: server.busy == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: server.busy == 0)
            assert (await engine.generate(request())).finish == "stop"

    run(test)


def test_closing_ends_what_waits() -> None:
    async def test() -> None:
        async with serving(rule="slow", concurrency=1) as (server, engine):
            waiting = [asyncio.create_task(engine.generate(request())) for _ in range(3)]
            await until(lambda: server.busy == 1)
            await engine.close()
            for task in waiting:
                with pytest.raises(EngineGone, match="closed"):
                    await task
            with pytest.raises(EngineGone, match="closed"):
                await engine.generate(request())

    run(test)


def test_closing_ends_what_waits_behind_a_pause() -> None:
    async def test() -> None:
        async with serving() as (_, engine):
            await engine.pause()
            waiting = asyncio.create_task(engine.generate(request()))
            await asyncio.sleep(0.01)
            await engine.close()
            with pytest.raises(EngineGone, match="closed"):
                await waiting

    run(test)


# -- keys and addresses ---------------------------------------------------------------------------


def test_each_endpoint_gets_its_key() -> None:
    async def test() -> None:
        async with serving(keys=("api-key", "admin-key")) as (server, engine):
            await engine.generate(request())
            await engine.pause()
            usual = {"/generate", "/server_info", "/model_info"}
            for path, sent in server.keys.items():
                assert sent == f"Bearer {'api-key' if path in usual else 'admin-key'}", path
            assert "/pause_generation" in server.keys

    run(test)


def test_one_key_opens_everything_and_none_is_sent_without() -> None:
    async def test() -> None:
        for keys, sent in ((("one", None), {"Bearer one"}), ((None, None), {""})):
            async with serving(keys=keys) as (server, engine):
                await engine.pause()
                assert set(server.keys.values()) == sent

    run(test)


def test_no_key_is_ever_shown() -> None:
    async def test() -> None:
        async with FaultyServer(api_key="api-key", admin_api_key="admin-key") as server:
            server.info.pop("version")
            for keys in (("api-key", "admin-key"), (None, None)):
                with pytest.raises(EngineError, match="version") as error:
                    await client(server.url, keys=keys).start()
                assert str(error.value).count("***") == 2
                assert "-key" not in str(error.value)

    run(test)


def test_no_proxy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)

    async def test() -> None:
        async with serving() as (_, engine):
            assert (await engine.generate(request())).ids == [7, 8, 9]

    run(test)


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://host", "http://", "http://me:key@host"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(EngineRefused, match="http://HOST:PORT") as error:
        Http(url)
    assert "key@" not in str(error.value)


# -- start ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": "0.6.0"}, "SGLang 0.6.0 is not known"),
        ({"version": "0.4.9"}, "0.5.17 to 0.5.23"),
        ({"version": "0.7.0", "vireo": "0.1"}, "vireo serve 0.7.0"),
    ],
)
def test_an_unknown_version_is_refused(change: dict[str, Any], said: str) -> None:
    async def test() -> None:
        async with FaultyServer(**change) as server:
            engine = client(server.url)
            with pytest.raises(EngineRefused, match=said):
                await engine.start()

    run(test)


def test_another_model_is_refused() -> None:
    async def test() -> None:
        async with FaultyServer() as server:
            for change, said in (
                ({"model_type": "qwen3"}, "type qwen3 .*trainer has qwen2_5_vl"),
                ({"has_image_understanding": False}, "sees no image"),
            ):
                server.model |= change
                engine = client(server.url)
                with pytest.raises(EngineRefused, match=said):
                    await engine.start()
                server.model["model_type"] = FAMILY

    run(test)


def test_a_family_that_a_stock_server_gets_wrong_is_refused_there_alone() -> None:
    async def test() -> None:
        for info, refused in (({}, True), ({"vireo": "0.1"}, False)):
            async with FaultyServer(**info) as server:
                server.model["model_type"] = "llava"
                engine = SglangEngine(Http(server.url), renderer("llava"))
                if refused:
                    with pytest.raises(EngineRefused, match=r"first image.*--engine embedded"):
                        await engine.start()
                else:
                    await engine.start()
                    assert engine.form == "embedded"
                await engine.close()

    run(test)


def test_a_server_that_is_not_there_is_said_to_be_dead() -> None:
    async def test() -> None:
        async with FaultyServer() as server:
            engine = client(server.url)
        with pytest.raises(EngineGone, match="is dead"):
            await engine.start()
        health = await engine.health()
        assert not health.ready
        assert server.url in health.why

    run(test)


def test_a_server_that_was_left_paused_goes_on() -> None:
    async def test() -> None:
        async with FaultyServer() as server:
            server.paused = True
            async with client(server.url) as engine:
                assert (await engine.generate(request())).finish == "stop"

    run(test)


def test_health_tells_of_the_server() -> None:
    async def test() -> None:
        for info, name in (({}, "SGLang 0.5.23"), ({"vireo": "0.1.0"}, "vireo serve 0.1.0")):
            async with FaultyServer(**info) as server, client(server.url) as engine:
                server.update("seven")
                health = await engine.health()
                assert (health.ready, health.state, health.server) == (True, "running", name)
                assert health.weights == "seven"
                await engine.pause()
                assert not (await engine.health()).ready

    run(test)


# -- what is sent ---------------------------------------------------------------------------------


def test_seeds_are_sent_where_they_are_honoured() -> None:
    """A stock server gives every request without a seed the same one, so each gets its own."""

    async def test() -> None:
        for info, honoured in (
            ({}, False),
            ({"enable_deterministic_inference": True}, True),
            ({"vireo": "0.1.0"}, True),
        ):
            async with FaultyServer(**info) as server, client(server.url) as engine:
                await engine.generate(request(seed=5))
                for _ in range(2):
                    await engine.generate(request())
                sent = [body["sampling_params"].get("sampling_seed") for body in server.bodies]
                assert engine.seeds == honoured
                assert sent[0] == (5 if honoured else None)
                drawn = honoured and "vireo" not in info
                assert (sent[1] is not None and sent[1] != sent[2]) == drawn

    run(test)


def test_a_picture_is_sent_again_and_one_grey_level_is_another_picture() -> None:
    """What a probe for embeddings of old weights needs."""

    async def test() -> None:
        async with serving() as (server, engine):
            server.expand = lambda ids: prompt(shade=100).expanded
            bridge = VLMRolloutEngine(engine, renderer(FAMILY))
            for shade in (100, 100, 101):
                await bridge.samples(prompt(shade=shade), Sampling(3), group="probe")
            sent = [body["image_data"] for body in server.bodies]
            assert sent[0] == sent[1] != sent[2]
            assert [len(urls) for urls in sent] == [1, 1, 1]
            assert server.bodies[0]["input_ids"] == prompt(shade=100).ids

    run(test)


FORMS = [  # family, server, what the bridge goes by, what is sent
    ("qwen2_5_vl", {}, "sglang", "input_ids"),
    ("internvl", {}, "sglang", "text"),
    ("internvl", {"vireo": "0.1.0"}, "embedded", "input_ids"),
    ("gemma3", {"vireo": "0.1.0"}, "sglang", "text"),
]


@pytest.mark.parametrize(("family", "info", "form", "sent"), FORMS)
def test_each_server_gets_the_form_of_prompt_that_it_expands_as_the_processor_does(
    family: str, info: dict[str, Any], form: str, sent: str
) -> None:
    made = renderer(family).rollout(row(user(0, "What?"), images=[noise(56, 56)]))

    async def test() -> None:
        async with FaultyServer(**info) as server:
            server.model["model_type"] = family
            async with SglangEngine(Http(server.url), renderer(family)) as engine:
                await engine.generate(request(made))
                assert engine.form == form
                assert {"text", "input_ids"} & server.bodies[0].keys() == {sent}

    run(test)


def test_many_pictures_fit_into_a_request() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (1024, 1024, 3), dtype=np.uint8)
    png = io.BytesIO()
    PIL.Image.fromarray(noise).save(png, "PNG")

    async def test() -> None:
        async with serving() as (server, engine):
            made = prompt(shade=100)
            large = Prompt(made.example, made.ids, made.text, [made.pictures[0]] * 4)
            large.pngs = [png.getvalue()] * 4
            await engine.generate(request(large))
            assert sum(map(len, server.bodies[0]["image_data"])) > 12_000_000

    run(test)


def test_spans_are_told_as_the_server_tells_them() -> None:
    async def test() -> None:
        async with serving() as (server, engine):
            made = server._made

            def mixed(body: dict[str, Any], aborted: bool) -> dict[str, Any]:
                answer = made(body, aborted)
                answer["meta_info"]["weight_version"] = "two"
                answer["meta_info"]["weight_versions"] = [
                    {"version": "default", "start": 0, "end": 2},
                    {"version": "two", "start": 2, "end": 3},
                ]
                return answer

            server._made = mixed  # type: ignore[method-assign]
            with pytest.raises(EngineError, match="weights 'two'"):
                await engine.generate(request())
            engine._versions.append("two")
            with pytest.raises(EngineError, match="weights 'default'"):
                await engine.generate(request())
            engine._versions.append("default")  # as if these came in while it was computed
            engine._versions.append("two")
            waiting = asyncio.create_task(engine.generate(request()))
            await until(lambda: len(server.bodies) == 3)
            next(iter(engine._calls._all.values())).first = 0
            assert (await waiting).spans == [("default", 2), ("two", 1)]

    run(test)


def test_a_rounding_above_zero_is_zero() -> None:
    async def test() -> None:
        async with serving() as (server, engine):
            made = server._made

            def rounded(body: dict[str, Any], aborted: bool) -> dict[str, Any]:
                answer = made(body, aborted)
                answer["meta_info"]["output_token_logprobs"][1][0] = 5e-7
                return answer

            server._made = rounded  # type: ignore[method-assign]
            assert (await engine.generate(request())).logprobs == [-0.5, 0.0, -0.5]

    run(test)


# -- pause, abort, sleep --------------------------------------------------------------------------


def test_a_pause_ends_all_that_was_asked_and_holds_what_comes() -> None:
    async def test() -> None:
        async with serving("slow", "slow", concurrency=2) as (server, engine):
            before = [asyncio.create_task(engine.generate(request())) for _ in range(4)]
            await until(lambda: server.busy == 2)
            await engine.pause()
            got = await asyncio.gather(*before)
            assert sorted(len(one.ids) for one in got) == [0, 0, 2, 2]
            after = asyncio.create_task(engine.generate(request()))
            await asyncio.sleep(0.05)
            assert not after.done()
            assert len(server.bodies) == 2
            await engine.pause()
            await engine.resume()
            await engine.resume()
            assert (await after).finish == "stop"

    run(test)


def test_a_request_that_comes_in_behind_the_pause_ends_too() -> None:
    """Else whoever waits for all of them before going on would wait for ever."""

    async def test() -> None:
        async with serving("slow") as (server, engine):
            server.paused = True  # as if the pause had overtaken it
            late = asyncio.create_task(engine.generate(request()))
            await until(lambda: any(call.sent for call in engine._calls._all.values()))
            await asyncio.sleep(0.02)
            await engine.pause()
            got = await late
            assert (got.ids, got.finish) == ([], "abort")

    run(test)


def test_abort_ends_those_alone() -> None:
    async def test() -> None:
        async with serving("slow", "slow") as (server, engine):
            one, two = request(), request()
            tasks = [asyncio.create_task(engine.generate(r)) for r in (one, two)]
            await until(lambda: server.busy == 2)
            await engine.abort([one.rid, "unknown"])
            assert (await tasks[0]).finish == "abort"
            assert not tasks[1].done()
            await engine.abort()
            assert (await tasks[1]).ids == [7, 8]
            assert {body["rid"] for _, body in server.calls} == {one.rid, two.rid}

    run(test)


def test_a_request_is_not_sent_again_once_it_is_aborted() -> None:
    async def test() -> None:
        async with serving(rule=(503, {"Retry-After": "0"}), retries=1000) as (server, engine):
            asked = request()
            task = asyncio.create_task(engine.generate(asked))
            await until(lambda: len(server.bodies) > 2)
            await engine.abort([asked.rid])
            assert (await task).finish == "abort"

    run(test)


def test_sleep_waits_until_the_server_is_idle_and_tells_each_tag_once() -> None:
    async def test() -> None:
        async with serving() as (server, engine):
            with pytest.raises(WrongOrder):
                await engine.sleep()
            await engine.pause()
            server.words["/flush_cache"] = [(400, "busy"), (400, "busy")]
            await engine.sleep(["kv_cache"])
            await engine.sleep()
            await engine.sleep()
            with pytest.raises(WrongOrder):
                await engine.generate(request())
            assert [call for call in server.calls if "release" in call[0]] == [
                ("/release_memory_occupation", {"tags": ["kv_cache"]}),
                ("/release_memory_occupation", {"tags": ["weights"]}),
            ]
            assert [path for path, _ in server.calls].count("/flush_cache") == 3
            await engine.wake(["kv_cache"])
            await engine.wake(["kv_cache"])
            assert server.calls[-2] == ("/resume_memory_occupation", {"tags": ["kv_cache"]})
            assert server.calls[-1][0] == "/flush_cache"
            assert engine.state.name == "released"

    run(test)


def test_a_server_that_never_gets_idle_is_not_put_to_sleep() -> None:
    async def test() -> None:
        async with serving(timeout=0.4) as (server, engine):
            await engine.pause()
            server.words["/flush_cache"] = [(400, "busy")] * 1000
            with pytest.raises(EngineError, match="not idle"):
                await engine.sleep()
            assert engine.state.name == "paused"
            assert not any("release" in path for path, _ in server.calls)

    run(test)


def test_a_stock_server_that_would_keep_its_memory_is_not_put_to_sleep() -> None:
    async def test() -> None:
        server = FaultyServer(enable_memory_saver=False)
        async with server, client(server.url) as engine:
            await engine.pause()
            with pytest.raises(EngineRefused, match="--sglang-enable-memory-saver"):
                await engine.sleep()
            assert engine.state.name == "paused"

    run(test)


@pytest.mark.parametrize(("status", "said"), [(500, "500: 'lost'"), (0, "connection broke")])
def test_a_control_call_that_may_have_been_done_is_not_sent_again(status: int, said: str) -> None:
    """A second release would kill a stock server."""

    async def test() -> None:
        async with serving() as (server, engine):
            await engine.pause()
            server.words["/release_memory_occupation"] = [(status, "lost")]
            with pytest.raises(EngineError, match=said):
                await engine.sleep()
            assert [path for path, _ in server.calls].count("/release_memory_occupation") == 1

    run(test)


def test_a_control_call_that_found_no_room_is_sent_again() -> None:
    async def test() -> None:
        async with serving() as (server, engine):
            server.words["/pause_generation"] = [(503, "busy")]
            await engine.pause()
            assert server.calls == [("/pause_generation", {"mode": "abort"})] * 2

    run(test)


# -- weights --------------------------------------------------------------------------------------


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """`vireo.weights.push` is one call that the server sees, or the exception in this list."""
    fails: list[Any] = []

    async def push(weights: Any, version: str, *, sessions: bool, post: Any, expected: Any) -> None:
        assert expected == {"a": (1,)}
        if fails and isinstance(fails[0], InputError):
            raise fails.pop()
        await post("/update_weights_from_disk", {"weight_version": version, "open": sessions})
        if fails:
            raise fails.pop()

    stand_in = types.SimpleNamespace(push=push, shapes=lambda folder: {"a": (1,)})
    monkeypatch.setitem(sys.modules, "vireo.weights.push", stand_in)
    monkeypatch.setitem(sys.modules, "vireo.weights.named", stand_in)
    return fails


def test_new_weights_come_when_nothing_runs_and_empty_the_caches(pushed: list[Any]) -> None:
    async def test() -> None:
        async with serving("slow") as (server, engine):
            running = asyncio.create_task(engine.generate(request()))
            await until(lambda: server.busy == 1)
            update = asyncio.create_task(engine.update_weights(Folder("f"), "two"))
            later = asyncio.create_task(engine.generate(request()))
            await asyncio.sleep(0.05)
            assert server.calls == []
            await engine.abort()
            await update
            assert [path for path, _ in server.calls[-2:]] == [
                "/update_weights_from_disk",
                "/flush_cache?timeout=1".partition("?")[0],
            ]
            assert (await running).spans == [("default", 2)]
            assert (await later).finish == "abort"
            assert (await engine.generate(request())).spans == [("two", 3)]
            assert (engine.weights, engine.state.name) == ("two", "running")

    run(test)


def test_frozen_responses_keep_their_tokens_over_an_update(pushed: list[Any]) -> None:
    async def test() -> None:
        async with serving("slow", timeout=1.0) as (server, engine):
            running = asyncio.create_task(engine.generate(request()))
            await until(lambda: server.busy == 1)
            await engine.pause("in_place")
            server.words["/flush_cache"] = [(400, "busy")] * 1000
            await engine.update_weights(Folder("f"), "two")
            await engine.resume()
            await engine.abort()
            assert (await running).spans == [("two", 2)]

    run(test)


def test_a_refused_update_changes_nothing(pushed: list[Any]) -> None:
    async def test() -> None:
        async with serving() as (_, engine):
            pushed.append(InputError("no such name"))
            with pytest.raises(InputError, match="no such name"):
                await engine.update_weights(Folder("f"), "two")
            assert (engine.weights, engine.state.name) == ("default", "running")
            assert (await engine.generate(request())).spans == [("default", 3)]

    run(test)


@pytest.mark.parametrize("fault", ["push", "version", "answer"])
def test_a_failed_update_closes_the_engine_until_another_succeeds(
    pushed: list[Any], fault: str
) -> None:
    async def test() -> None:
        async with serving() as (server, engine):
            if fault == "push":
                pushed.append(EngineError("half of it"))
            elif fault == "version":
                server.update = lambda version: None  # type: ignore[method-assign]
            else:
                server.words["/update_weights_from_disk"] = [(400, "no")]
            with pytest.raises(EngineError):
                await engine.update_weights(Folder("f"), "two")
            with pytest.raises(WrongOrder):
                await engine.generate(request())
            server.update = lambda version: server.model.update(weight_version=version)  # type: ignore[method-assign]
            await engine.update_weights(Folder("f"), "three")
            await engine.resume()
            assert (await engine.generate(request())).spans == [("three", 3)]

    run(test)


def test_weights_come_before_the_cache_after_a_sleep(pushed: list[Any]) -> None:
    async def test() -> None:
        async with serving() as (server, engine):
            await engine.pause()
            await engine.sleep()
            await engine.wake(["weights"])
            pushed.append(InputError("no such name"))
            with pytest.raises(InputError):
                await engine.update_weights(Folder("f"), "two")
            with pytest.raises(WrongOrder):
                await engine.resume()
            await engine.update_weights(Folder("f"), "two")
            await engine.wake(["kv_cache"])
            await engine.resume()
            assert [path.strip("/") for path, _ in server.calls] == [
                *("pause_generation", "flush_cache", "release_memory_occupation"),
                *("resume_memory_occupation", "update_weights_from_disk"),
                *("resume_memory_occupation", "flush_cache", "continue_generation"),
            ]

    run(test)


def test_checksums_of_a_stock_server_are_told_by_its_gpus() -> None:
    own, said = {"vireo": "0.1.0"}, [{"checksums": {"a": "0f"}}, {"checksums": {"a": "1f"}}]

    async def test() -> None:
        for info, shown in (({}, {"rank0/a": "0f", "rank1/a": "1f"}), (own, {"a": "0f"})):
            async with FaultyServer(**info) as server, client(server.url) as engine:
                server.words["/weights_checker"] = [(200, {"ranks": said})]
                assert await engine.checksums() == shown
                for wrong in ([{"sums": {}}], ["a"], 3):
                    server.words["/weights_checker"] = [(200, {"ranks": wrong})]
                    with pytest.raises(EngineError, match="another shape"):
                        await engine.checksums()
                server.words["/weights_checker"] = [(401, {"error": "Unauthorized"})]
                assert await engine.checksums() == {}

    run(test)


# -- several servers ------------------------------------------------------------------------------


@asynccontextmanager
async def pair(*scripts: list[Word], **options: Any):
    async with FaultyServer(*scripts[0]) as one, FaultyServer(*scripts[1]) as two:
        engine = SeveralEngines([client(server.url, **options) for server in (one, two)])
        async with engine:
            yield one, two, engine


def grouped(group: str) -> Request:
    made = request()
    made.group = group
    return made


async def all_of(engine: RolloutEngine, requests: list[Request]) -> list[Generation]:
    return await asyncio.gather(*map(engine.generate, requests))


def test_a_group_stays_on_one_server_and_groups_are_spread() -> None:
    async def test() -> None:
        async with pair([], []) as (one, two, engine):
            asked = [grouped(str(i // 4)) for i in range(32)]
            await all_of(engine, asked)
            homes = [{b["rid"] for b in server.bodies} for server in (one, two)]
            for start in range(0, 32, 4):
                group = {r.rid for r in asked[start : start + 4]}
                assert group <= homes[0] or group <= homes[1]
            assert [len(home) for home in homes] == [16, 16]

    run(test)


def test_what_a_dead_server_had_goes_to_another_once() -> None:
    async def test() -> None:
        async with pair(["ok", "ok", "die"], []) as (one, two, engine):
            got = await all_of(engine, [grouped(str(i)) for i in range(24)])
            assert [g.ids for g in got] == [[7, 8, 9]] * 24
            assert max((one.answered + two.answered).values()) <= 2
            before = len(one.bodies)
            await all_of(engine, [grouped(f"more{i}") for i in range(4)])
            assert len(one.bodies) == before
            health = await engine.health()
            assert health.ready
            assert one.url in health.why
            await engine.pause()
            assert engine.state.name == "paused"
            assert one.calls[-1][0] != "/pause_generation" == two.calls[-1][0]

    run(test)


def test_a_hanging_server_is_left_too() -> None:
    async def test() -> None:
        async with pair(["hang"], [], timeout=0.4) as (_, two, engine):
            got = await all_of(engine, [grouped("a"), grouped("b")])
            assert [g.finish for g in got] == ["stop", "stop"]
            assert len(two.bodies) == 2

    run(test)


def test_without_any_server_left_the_error_names_them() -> None:
    async def test() -> None:
        async with pair(["die"], ["die"]) as (one, two, engine):
            with pytest.raises(EngineGone):
                await engine.generate(grouped("a"))
            with pytest.raises(EngineGone, match="no server is left") as error:
                await engine.generate(grouped("b"))
            assert one.url in str(error.value)
            assert two.url in str(error.value)
            assert not (await engine.health()).ready
            for server in (one, two):
                server.script.clear()
                await server.listen(int(server.url.rpartition(":")[2]))
            await engine.start()
            assert (await engine.generate(grouped("c"))).finish == "stop"

    run(test)


def test_control_calls_go_to_every_server(pushed: list[Any]) -> None:
    async def test() -> None:
        async with pair([], []) as (one, two, engine):
            await engine.update_weights(Folder("f"), "two")
            await engine.pause()
            await engine.sleep(["kv_cache"])
            await engine.wake(["kv_cache"])
            await engine.resume()
            assert one.calls == two.calls
            assert len(one.calls) > 5
            assert (engine.weights, engine.state.name) == ("two", "running")
            got = await all_of(engine, [grouped("a"), grouped("b")])
            assert [g.spans for g in got] == [[("two", 3)]] * 2

    run(test)


def test_servers_with_different_weights_answer_nothing() -> None:
    async def test() -> None:
        async with FaultyServer() as one, FaultyServer() as two:
            two.update("older")
            async with SeveralEngines([client(one.url), client(two.url)]) as engine:
                with pytest.raises(EngineError, match="different weights"):
                    await engine.generate(request())

    run(test)


assert tiny_models  # one thread for torch
