"""What a response must be, the states of an engine, and the bridge that checks both."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import PIL.Image
import pytest

from tests.tiny_models import renderer
from vireo.data.conversation import Conversation, Text, Turn
from vireo.errors import InputError, RowError
from vireo.rollout import VLMRolloutEngine
from vireo.rollout.bridge import own_seed
from vireo.rollout.contract import ContractError, check
from vireo.rollout.engine import EngineRefused, Health, RolloutEngine, State, WrongOrder
from vireo.rollout.protocol import Version, generate_body
from vireo.rollout.sample import Generation, Request, Sampling

WORDS = 384


def request(**changes: Any) -> Request:
    prompt = renderer("qwen2_5_vl").rollout(
        Conversation((Turn("user", (Text("Hello"),)),), where="row 7")
    )
    made = Request(prompt, Sampling(max_new_tokens=4), stop_ids=(2,), banned=(9,))
    return replace(made, **changes)


def good(made: Request) -> Generation:
    ids = [5, 6, 2]
    spans = [("v1", 3)]
    return Generation(ids, [-0.5, -0.1, 0.0], "stop", spans, made.prompt.expanded + made.response)


def test_a_right_response_passes() -> None:
    check("s", request(), good(request()), WORDS, {"v1"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": [1, 2]}, "saw another prompt: 2 tokens, the trainer has"),
        ({"prompt_ids": None}, "does not say which prompt ids"),
        ({"logprobs": [-0.5, -0.1]}, "2 log-probabilities for 3 tokens"),
        ({"logprobs": [-0.5, float("nan"), 0.0]}, "response token 1 is nan"),
        ({"logprobs": [-0.5, 0.2, 0.0]}, "response token 1 is 0.2"),
        ({"logprobs": [-0.5, float("-inf"), 0.0]}, "response token 1 is -inf"),
        ({"finish": "eos"}, "finished by 'eos'"),
        ({"ids": [5, 9, 2]}, "response token 1 is 9, which only a processor"),
        ({"ids": [5, WORDS, 2]}, "the model has 384 tokens"),
        ({"ids": [5, 2, 2]}, "stop token 2, and more tokens follow"),
        ({"ids": [5, 6, 7]}, "the last token is no stop"),
        ({"finish": "length"}, "3 response tokens, finished by 'length', with a limit of 4"),
        ({"spans": [("v1", 2)]}, "weight versions of 2 of 3 tokens"),
        ({"spans": [("v0", 1), ("v1", 2)]}, "1 tokens are of weights 'v0'"),
    ],
)
def test_a_wrong_response_is_named(changes: dict[str, Any], message: str) -> None:
    made = request()
    with pytest.raises(ContractError, match=message) as caught:
        check("sample 3 of group g", made, replace(good(made), **changes), WORDS, {"v1"})
    assert str(caught.value).startswith("sample 3 of group g: ")


def test_more_tokens_than_asked_for_are_refused() -> None:
    made = request(sampling=Sampling(max_new_tokens=2))
    with pytest.raises(ContractError, match="with a limit of 2"):
        check("s", made, good(made), WORDS)


def test_a_continued_response_is_compared_with_its_first_part() -> None:
    made = request(response=[5], sampling=Sampling(max_new_tokens=4))
    check("s", made, good(made), WORDS)
    with pytest.raises(ContractError, match="another prompt"):
        check("s", made, replace(good(made), prompt_ids=made.prompt.expanded), WORDS)
    assert generate_body(made, "ids")["sampling_params"]["max_new_tokens"] == 3


# -- states -------------------------------------------------------------------------------------


def drive(*calls: str) -> State:
    """The state after these calls, as `sleep weights` or `end ok`."""
    state = State()
    for call in calls:
        name, *rest = call.split()
        if name == "end":
            state.end_update(rest == ["ok"])
        elif name in ("sleep", "wake"):
            getattr(state, name)(rest or ["kv_cache", "weights"])
        else:
            {"pause": state.pause, "resume": state.resume, "begin": state.begin_update}[name]()
    return state


@pytest.mark.parametrize(
    ("calls", "name"),
    [
        (("pause", "pause"), "paused"),
        (("pause", "resume", "resume"), "running"),
        (("begin", "end ok"), "running"),
        (("pause", "begin", "end ok"), "paused"),
        (("pause", "sleep", "sleep"), "released"),
        (("pause", "sleep kv_cache", "wake kv_cache"), "paused"),
        (("pause", "sleep", "wake weights"), "resumed"),
        (("pause", "sleep", "wake weights", "begin", "end ok"), "released"),
        (("pause", "sleep", "wake weights", "begin", "end ok", "wake kv_cache"), "paused"),
        (("pause", "sleep", "wake", "begin", "end ok"), "paused"),
        (("begin", "end failed"), "resumed"),
        (("begin", "end failed", "begin", "end ok", "resume"), "running"),
    ],
)
def test_states(calls: tuple[str, ...], name: str) -> None:
    assert drive(*calls).name == name


@pytest.mark.parametrize(
    "calls",
    [
        ("sleep",),  # a request could be on its way
        ("wake",),
        ("pause", "sleep", "resume"),
        ("pause", "sleep", "pause"),
        ("pause", "sleep", "begin"),
        ("pause", "sleep", "wake weights", "resume"),  # no weights are in it
        ("pause", "sleep", "wake weights", "sleep"),
        ("begin", "pause"),
        ("begin", "begin"),
        ("end ok",),
        ("begin", "end failed", "resume"),
    ],
)
def test_wrong_orders_are_refused(calls: tuple[str, ...]) -> None:
    drive(*calls[:-1])
    with pytest.raises(WrongOrder):
        drive(*calls)


def test_each_tag_is_released_and_resumed_once() -> None:
    state = drive("pause", "sleep kv_cache")
    assert state.sleep(["kv_cache", "weights"]) == ["weights"]
    assert state.wake(["weights", "cuda_graph"]) == ["weights"]
    assert state.name == "resumed"


def test_requests_wait_refuse_or_go() -> None:
    async def story() -> None:
        state = State()
        await state.for_request()
        state.pause()
        waiting = asyncio.create_task(state.for_request())
        await asyncio.sleep(0)
        assert not waiting.done()
        state.resume()
        await asyncio.wait_for(waiting, 1)
        state.pause()
        waiting = asyncio.create_task(state.for_request())
        await asyncio.sleep(0)
        state.sleep(["weights"])
        with pytest.raises(WrongOrder, match="wake it and send weights"):
            await asyncio.wait_for(waiting, 1)

    asyncio.run(story())


# -- protocol -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["0.5.17", "0.5.23", "0.5.17.post1", "0.5.20rc1"])
def test_known_versions(text: str) -> None:
    assert Version.of(text).sessions == (text == "0.5.23")


@pytest.mark.parametrize("text", ["0.5.16", "0.5.24", "0.6.0", "0.5", "", "0.5.170", "nightly"])
def test_other_versions_are_refused(text: str) -> None:
    with pytest.raises(EngineRefused, match=r"runs 0\.5\.17 to 0\.5\.23"):
        Version.of(text)


# -- the bridge ---------------------------------------------------------------------------------


class Scripted(RolloutEngine):
    """Answers by a function, and keeps the requests."""

    form = "embedded"

    def __init__(self, answer: Any):
        super().__init__()
        self.answer, self.requests = answer, []

    async def generate(self, request: Request) -> Generation:
        self.requests.append(request)
        return self.answer(request)

    async def start(self) -> None: ...
    async def close(self) -> None: ...
    async def update_weights(self, weights: Any, version: str) -> None: ...
    async def sleep(self, tags: Any = ()) -> None: ...
    async def wake(self, tags: Any = ()) -> None: ...
    async def pause(self, mode: Any = "abort") -> None: ...
    async def resume(self) -> None: ...
    async def abort(self, rids: Any = None) -> None: ...
    async def health(self) -> Health:
        return Health(True, "running", "v1")


def stops(asked: Request) -> Generation:
    ids = [40, asked.stop_ids[0]]
    seen = asked.prompt.expanded + asked.response
    return Generation(ids, [-1.0, -0.5], "stop", [("v1", 2)], seen)


def test_the_bridge_makes_a_sample_of_pictures_and_text() -> None:
    engine = Scripted(stops)
    rollouts = VLMRolloutEngine(engine, renderer("qwen2_5_vl"))
    picture = PIL.Image.new("RGB", (60, 60), "red")
    sample = asyncio.run(rollouts.generate([picture, picture], "What is it?"))
    assert (sample.status, sample.finish, sample.version) == ("done", "stop", "v1")
    assert sample.prompt_ids == engine.requests[0].prompt.expanded
    assert (sample.mask, sample.logprobs) == ([1, 1], [-1.0, -0.5])
    assert len(engine.requests[0].prompt.pngs) == 2


def test_a_partial_sample_goes_on() -> None:
    def cut(asked: Request) -> Generation:
        whole = stops(asked)
        if asked.response:
            return whole
        return replace(whole, ids=[41], logprobs=[-2.0], finish="abort", spans=[("v0", 1)])

    engine = Scripted(cut)
    render = renderer("qwen2_5_vl")
    rollouts = VLMRolloutEngine(engine, render)
    prompt = render.rollout(Conversation((Turn("user", (Text("Hi"),)),)))

    async def story() -> None:
        (first,) = await rollouts.samples(prompt, Sampling(seed=1), group="a")
        assert (first.status, first.response_ids) == ("partial", [41])
        whole = await rollouts.fill(prompt, first)
        assert whole.status == "done"
        assert whole.response_ids == [41, 40, render.stop_ids[0]]
        assert whole.spans == [("v0", 1), ("v1", 2)]
        assert engine.requests[1].response == [41]
        assert engine.requests[1].sampling == engine.requests[0].sampling

    asyncio.run(story())


def test_a_broken_contract_names_the_sample() -> None:
    engine = Scripted(lambda asked: replace(stops(asked), prompt_ids=[1]))
    rollouts = VLMRolloutEngine(engine, renderer("qwen2_5_vl"))
    with pytest.raises(ContractError, match="sample 0 of group 00000001"):
        asyncio.run(rollouts.generate(None, "Hi"))


def test_samples_of_a_group_have_their_own_seeds_and_one_prompt() -> None:
    engine = Scripted(stops)
    render = renderer("qwen2_5_vl")
    prompt = render.rollout(Conversation((Turn("user", (Text("Hi"),)),)))
    asyncio.run(VLMRolloutEngine(engine, render).samples(prompt, Sampling(seed=4), 3, group="g"))
    seeds = [asked.sampling.seed for asked in engine.requests]
    assert seeds == [own_seed(4, "g", i) for i in range(3)]
    assert len(set(seeds)) == 3
    assert all(asked.prompt is prompt for asked in engine.requests)
    assert len({asked.rid for asked in engine.requests}) == 3


def test_images_by_url_and_paths_elsewhere_are_refused(tmp_path: Any) -> None:
    rollouts = VLMRolloutEngine(Scripted(stops), renderer("qwen2_5_vl"))
    with pytest.raises(InputError, match="by URL are not fetched"):
        asyncio.run(rollouts.generate("http://127.0.0.1/a.png", "Hi"))
    outside = tmp_path / "a.png"
    PIL.Image.new("RGB", (60, 60)).save(outside)
    inside = tmp_path / "data"
    inside.mkdir()
    with pytest.raises(RowError):
        asyncio.run(rollouts.generate(str(outside), "Hi", image_root=str(inside)))
    asyncio.run(rollouts.generate(outside, "Hi"))  # a Path is the program's own word
    asyncio.run(rollouts.generate("a.png", "Hi", image_root=str(tmp_path)))


def test_an_engine_that_cannot_start_is_closed() -> None:
    closed: list[bool] = []

    class Broken(Scripted):
        async def start(self) -> None:
            raise EngineRefused("another model")

        async def close(self) -> None:
            closed.append(True)

    async def story() -> None:
        async with VLMRolloutEngine(Broken(stops), renderer("qwen2_5_vl")):
            pass

    with pytest.raises(EngineRefused, match="another model"):
        asyncio.run(story())
    assert closed == [True]
