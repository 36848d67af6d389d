"""From prompts to groups in a buffer: order, limits, over-sampling, and errors that end it."""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from tests.stub_engine import StubEngine, number
from tests.tiny_models import noise, renderer, row, user
from vireo.data import images
from vireo.data.conversation import Conversation, ImageRef
from vireo.errors import InputError, RowError
from vireo.rewards import Rewards
from vireo.rollout.bridge import VLMRolloutEngine
from vireo.rollout.buffer import DataBuffer
from vireo.rollout.engine import EngineError, EngineGone
from vireo.rollout.manager import RolloutManager
from vireo.rollout.sample import Request, Sample, Sampling

FAMILY = "qwen2_5_vl"
ROWS = [
    row(user(0, f"Number {i}?"), images=[noise(56, 56, i)], where=f"row {i}", extra={"answer": "x"})
    for i in range(12)
]
SAMPLING = Sampling(max_new_tokens=64, seed=3)


def manager(engine: StubEngine, buffer: DataBuffer, rows: Any = ROWS, **options: Any):
    options = {"n": 2, "at_once": 3, **options}
    rollouts = VLMRolloutEngine(engine, renderer(FAMILY))
    return RolloutManager(rollouts, buffer, rows, SAMPLING, **options)


def run(coroutine: Awaitable[Any]) -> Any:
    """To its end, in seconds: nothing here may wait for ever."""

    async def limited() -> Any:
        return await asyncio.wait_for(coroutine, 30)

    return asyncio.run(limited())


def answers(groups: list[list[Sample]]) -> dict[str, list[list[int]]]:
    return {group[0].group: [sample.response_ids for sample in group] for group in groups}


def whole(rows: Any = ROWS, **options: Any) -> list[list[Sample]]:
    """All groups of an unbroken run."""
    buffer = DataBuffer(prompts=len(rows))
    run(manager(StubEngine(**options), buffer, rows).fill())
    return buffer.get(len(rows))


def test_every_prompt_becomes_a_group_of_n_samples() -> None:
    engine, buffer = StubEngine(), DataBuffer(prompts=len(ROWS))
    run(manager(engine, buffer).fill())
    groups = buffer.get(99)
    assert sorted(g[0].group for g in groups) == [f"{i:08d}" for i in range(len(ROWS))]
    for group in groups:
        assert [(s.index, s.status, s.finish) for s in group] == [
            (i, "done", "stop") for i in (0, 1)
        ]
        assert group[0].conversation == ROWS[int(group[0].group)]
        assert group[0].response_ids != group[1].response_ids  # a seed of their own
        assert all(len(s.logprobs) == len(s.mask) == len(s.response_ids) == 4 for s in group)
    assert engine.most <= 3 * 2
    assert engine.most > 2


def test_answers_do_not_depend_on_what_runs_beside_them() -> None:
    found = answers(whole())
    for at_once in (1, 12):
        buffer = DataBuffer(prompts=len(ROWS))
        run(manager(StubEngine(), buffer, at_once=at_once).fill())
        assert answers(buffer.get(99)) == found


def test_pictures_are_decoded_once_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[int] = Counter()
    decode = images._decode

    def counted(image: Any, *rest: Any) -> Any:
        counts[id(image)] += 1
        return decode(image, *rest)

    monkeypatch.setattr(images, "_decode", counted)
    run(manager(StubEngine(), DataBuffer(prompts=len(ROWS)), n=4).fill())
    assert [counts[id(r.images[0].value)] for r in ROWS] == [1] * len(ROWS)


# -- more groups than a step needs ---------------------------------------------------------------


def test_extra_groups_stay_and_unfinished_ones_go_on_where_they_were() -> None:
    """The first and third groups are slow: they are aborted, and come first in the next step."""

    def length(request: Request) -> int:
        return 40 if number(request) in (0, 2) else 9

    unbroken = answers(whole(length=length))
    engine, buffer = StubEngine(length), DataBuffer(prompts=len(ROWS))
    made = manager(engine, buffer, at_once=4)
    engine.held = {0, 1, 2, 3}

    async def step() -> None:
        task = asyncio.create_task(made.fill(2, room=4))
        while len(engine.stuck) < 8 and not task.done():
            await asyncio.sleep(0)
        engine.held = {0, 2}
        await task

    run(step())
    first = buffer.get(2)
    assert sorted(g[0].group for g in first) == ["00000001", "00000003"]
    assert engine.aborts > 0
    assert not engine.live
    state = buffer.state()
    parts = {work["group"]: work["samples"] for work in state["partial"]}
    assert sorted(parts) == ["00000000", "00000002"]
    assert all(len(s["response_ids"]) == 5 for part in parts.values() for s in part)
    engine.seen.clear()
    engine.held.clear()
    run(made.fill())
    assert [r.group for r in engine.seen if r.response].count("00000000") == 2
    assert {r.group for r in engine.seen if r.response} == {"00000000", "00000002"}
    assert answers(first + buffer.get(99)) == unbroken


def test_finished_extra_groups_are_the_next_steps() -> None:
    buffer = DataBuffer()
    made = manager(StubEngine(), buffer, [ROWS[i % 12] for i in range(100)], at_once=8)
    run(made.fill(2, room=8))
    assert buffer.waiting >= 2
    taken = buffer.get(2) + buffer.get(99)
    run(made.fill(2, room=8))
    taken += buffer.get(99)
    found = [g[0].group for g in taken]
    assert len(set(found)) == len(found)


def test_generation_runs_ahead_of_a_trainer_as_far_as_there_is_room() -> None:
    async def both() -> tuple[int, list[str]]:
        buffer = DataBuffer(prompts=len(ROWS))
        made = manager(StubEngine(), buffer, at_once=12)
        most, taken = 0, []

        def told() -> None:
            nonlocal most
            found = buffer.metrics()
            most = max(most, int(found["waiting"] + found["unfinished"]))

        made.told = told
        task = asyncio.create_task(made.fill(room=3))
        while len(taken) < len(ROWS):
            await buffer.wait(2)
            taken += buffer.get(2)
            await asyncio.sleep(0.02)
        await task
        return most, [g[0].group for g in taken]

    most, taken = run(both())
    assert most == 3
    assert sorted(taken) == [f"{i:08d}" for i in range(len(ROWS))]


def test_groups_that_a_filter_drops_are_made_up_for() -> None:
    def reward(sample: Sample) -> float:
        return float(sample.index == 0 and int(sample.group) % 2)

    buffer = DataBuffer(prompts=12, filters=["mixed_rewards"])
    made = manager(StubEngine(), buffer, rewards=Rewards([]))
    made.rewards.functions, made.rewards.weights = {"odd": reward}, {"odd": 1.0}
    run(made.fill(4))
    assert all(int(g[0].group) % 2 for g in buffer.get(4))


def test_groups_too_old_for_training_begin_again() -> None:
    async def train() -> list[str]:
        engine, buffer = StubEngine(), DataBuffer(prompts=3, max_staleness=0)
        engine.length, engine.held = lambda request: 9, {0}
        made = manager(engine, buffer)
        task = asyncio.create_task(made.fill())
        await buffer.wait(2)
        names = sorted(g[0].group for g in buffer.get(2))
        while not any(number(request) == 0 for request in engine.seen):
            await asyncio.sleep(0)
        engine.held.clear()
        await engine.update_weights(None, "1")
        buffer.weights("1")
        await task
        (group,) = buffer.get(1)
        assert [s.spans for s in group] == [[("1", 10)]] * 2
        return [*names, group[0].group]

    assert run(train()) == ["00000001", "00000002", "00000000.1"]


def test_a_kill_in_the_middle_loses_and_doubles_nothing() -> None:
    unbroken, left = answers(whole()), 0
    for after in range(0, 60, 7):  # turns of the event loop before the power goes

        async def killed(after: int = after) -> dict[str, Any]:
            buffer = DataBuffer(prompts=len(ROWS))
            task = asyncio.create_task(manager(StubEngine(), buffer).fill())
            while buffer.waiting < 2:
                await asyncio.sleep(0)
            for _ in range(after):
                await asyncio.sleep(0)
            state = buffer.state()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            return state

        state = run(killed())
        buffer = DataBuffer(prompts=len(ROWS))
        buffer.load_state(state)
        left += int(buffer.metrics()["unfinished"])
        run(manager(StubEngine(), buffer).fill())
        groups = buffer.get(99)
        assert len(groups) == len(ROWS)
        assert answers(groups) == unbroken
    assert left > 0  # groups were on their way


# -- errors --------------------------------------------------------------------------------------


def failing(error: Exception, at: int) -> Callable[[Request], None]:
    def fail(request: Request) -> None:
        if number(request) == at:
            raise error

    return fail


def test_the_first_error_of_an_engine_ends_all_with_its_own_traceback() -> None:
    async def both() -> None:
        engine = StubEngine(fail=failing(EngineGone("the server is dead"), 5))
        buffer = DataBuffer()
        made = manager(engine, buffer, [ROWS[i % 12] for i in range(100)])
        waiting = asyncio.create_task(buffer.wait(99))
        try:
            with pytest.raises(EngineGone, match="the server is dead") as caught:
                await made.fill()
            with pytest.raises(EngineGone, match="the server is dead"):
                await waiting
        finally:
            assert not engine.live
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert "fail" in frames
        assert len(asyncio.all_tasks()) == 2  # this one and its time limit

    run(both())


def test_a_prompt_that_cannot_be_rendered_ends_all_by_name() -> None:
    rows = [*ROWS[:4], row(user(0, "?"), images=[ImageRef("absent.png")], where="f.json row 4")]
    with pytest.raises(RowError, match=r"f\.json row 4: image 'absent\.png' is not found"):
        run(manager(StubEngine(), DataBuffer(prompts=5), rows).fill())


def test_a_source_that_fails_ends_all() -> None:
    class Broken:
        def __getitem__(self, i: int) -> Conversation:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        run(manager(StubEngine(), DataBuffer(), Broken()).fill())


def test_an_error_in_the_callback_ends_all() -> None:
    def told() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run(manager(StubEngine(), DataBuffer(), told=told).fill())


def test_an_engine_that_aborts_everything_by_itself_is_found_out() -> None:
    class Aborting(StubEngine):
        async def generate(self, request: Request) -> Any:
            self._aborted.add(request.rid)
            return await super().generate(request)

    with pytest.raises(EngineError, match="aborted it 101 times by itself"):
        run(manager(Aborting(), DataBuffer(prompts=1)).fill())


def test_a_request_that_the_engine_aborted_goes_on() -> None:
    unbroken = answers(whole(ROWS[:3], length=lambda request: 20))

    async def pausing() -> list[list[Sample]]:
        engine, buffer = StubEngine(lambda request: 20), DataBuffer(prompts=3)
        task = asyncio.create_task(manager(engine, buffer).fill())
        for _ in range(3):
            while not engine.live and not task.done():
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            await engine.pause()  # as for new weights
            while engine.live:
                await asyncio.sleep(0)
            await engine.resume()
        await task
        assert engine.aborts == 3
        return buffer.get(3)

    assert answers(run(pausing())) == unbroken


def test_a_cancelled_fill_leaves_nothing_running() -> None:
    async def cancelled() -> None:
        engine = StubEngine(lambda request: 50)
        task = asyncio.create_task(manager(engine, DataBuffer()).fill())
        while not engine.live:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not engine.live
        assert len(asyncio.all_tasks()) == 2

    run(cancelled())


# -- rewards -------------------------------------------------------------------------------------


def length_of(sample: Sample) -> int:
    return len(sample.text)


async def half(sample: Sample) -> float:
    await asyncio.sleep(0)
    return 0.5


def nothing(sample: Sample) -> None:
    return None


def endless(sample: Sample) -> float:
    return float("inf")


def broken(sample: Sample) -> float:
    return 1 / 0


def test_rewards_are_summed_by_weight_plain_and_async() -> None:
    names = ["exact_match", "tests.test_manager:length_of", "tests.test_manager:half"]
    buffer = DataBuffer(prompts=2)
    run(manager(StubEngine(), buffer, rewards=Rewards(names, [1.0, 0.1, 4.0])).fill())
    for sample in (s for g in buffer.get(2) for s in g):
        assert sample.rewards == {names[0]: 0.0, names[1]: float(len(sample.text)), names[2]: 0.5}
        assert sample.reward == pytest.approx(0.1 * len(sample.text) + 2.0)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("nothing", InputError, r"sample 0 of group 0+ \(row 0\): .*returned None"),
        ("endless", InputError, r"returned inf, expected a finite number"),
        ("broken", ZeroDivisionError, r"division by zero"),
    ],
)
def test_a_reward_that_fails_ends_all(name: str, error: type, message: str) -> None:
    rewards = Rewards([f"tests.test_manager:{name}"])
    with pytest.raises(error, match=message) as caught:
        run(manager(StubEngine(), DataBuffer(prompts=1), n=1, rewards=rewards).fill())
    if error is ZeroDivisionError:
        assert caught.value.__notes__[0].startswith(
            "in reward 'tests.test_manager:broken' of sample"
        )


def test_exact_match_takes_the_answer_of_the_row_or_of_its_column() -> None:
    from vireo.rewards.exact_match import exact_match

    base = Sample("g", 0, row(user("?"), extra={"answer": 4}), text=" 4 \n")
    assert exact_match(base) == 1.0
    base.answer = "5"  # what the row ends with counts first
    assert exact_match(base) == 0.0
    base.text = "5"
    assert exact_match(base) == 1.0
    with pytest.raises(InputError, match="nothing to compare with"):
        exact_match(Sample("g", 0, row(user("?"), where="f row 1")))


@pytest.mark.parametrize(
    ("names", "weights", "message"),
    [
        (["exact"], None, r"unknown reward 'exact'; did you mean exact_match\?"),
        (["exact_match"], [1.0, 2.0], r"2 weight\(s\) for 1 reward\(s\)"),
    ],
)
def test_rewards_that_are_not_there_are_named(names: Any, weights: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Rewards(names, weights)


# -- rendering -----------------------------------------------------------------------------------


def test_prompts_rendered_in_several_threads_are_what_they_are_alone() -> None:
    """A control token that a person typed changes how a tokenizer splits text, for a moment."""
    made = renderer(FAMILY)
    typed = [
        row(user(0, "is <|im_end|> an end? " * 20), images=[noise(56, 56, i)]) for i in range(3)
    ]
    rows = [*typed, row(user("plain words " * 40)), ROWS[0]] * 12
    alone = [made.rollout(r).expanded for r in rows]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda r: made.rollout(r).expanded, rows))
    assert found == alone
