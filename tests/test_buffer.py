"""The buffer of groups: nothing is lost, nothing comes twice, whatever happens in which order."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vireo.data.conversation import Conversation, ImageRef, Text, Turn
from vireo.errors import InputError
from vireo.rollout.buffer import DataBuffer, Work
from vireo.rollout.sample import Sample

ROW = Conversation((Turn("user", (Text("?"),)),), (ImageRef("a.png", "/data"),), id="r")


def finished(work: Work, rewards: tuple[float, ...] = (0.0, 1.0), version: str = "default"):
    """The work's group, done: parts that it had stay, what is new comes from weights `version`."""
    group = []
    for index, reward in enumerate(rewards):
        sample = copy.deepcopy(work.samples[index]) if work.samples else Sample("", index, ROW)
        sample.group, sample.status, sample.finish, sample.reward = (
            work.group,
            "done",
            "stop",
            reward,
        )
        sample.response_ids.append(7)
        sample.spans.append((version, 1))
        group.append(sample)
    return group


def partial(work: Work, version: str = "default") -> list[Sample]:
    """One sample done, the other with one token more than before."""
    group = finished(work, version=version)
    group[1].status, group[1].finish, group[1].reward = "partial", "abort", None
    return group


def started(buffer: DataBuffer) -> Work:
    work = buffer.next()
    assert work is not None
    return work


def names(groups: list[list[Sample]]) -> list[str]:
    return [group[0].group for group in groups]


def test_groups_leave_oldest_first() -> None:
    buffer = DataBuffer()
    works = [started(buffer) for _ in range(3)]
    for work in (works[2], works[0], works[1]):
        buffer.put(finished(work))
    assert names(buffer.get(2)) == ["00000002", "00000000"]
    assert names(buffer.get(2)) == ["00000001"]
    assert buffer.get(1) == []


def test_a_group_that_is_not_done_never_leaves_and_goes_on_before_new_ones() -> None:
    buffer = DataBuffer()
    first, second = started(buffer), started(buffer)
    group = partial(first)
    buffer.put(group)
    buffer.put(finished(second))
    assert names(buffer.get(9)) == ["00000001"]
    again = started(buffer)
    assert (again.group, again.number, again.samples) == ("00000000", 0, group)
    buffer.put(finished(again))
    assert [len(s.response_ids) for s in buffer.get(1)[0]] == [2, 2]
    assert started(buffer).number == 2


def test_a_group_that_was_not_begun_starts_again_without_samples() -> None:
    buffer = DataBuffer()
    work = started(buffer)
    buffer.put([Sample(work.group, 0, ROW), Sample(work.group, 1, ROW)])
    assert buffer.next() == Work("00000000", 0)
    buffer.put_back(Work("00000000", 0))
    assert buffer.next() == Work("00000000", 0)


def test_prompts_end() -> None:
    buffer = DataBuffer(prompts=2)
    works = [started(buffer), started(buffer)]
    assert buffer.next() is None
    buffer.put_back(works[0])
    assert buffer.next() == works[0]


def test_a_group_comes_once_and_whole() -> None:
    buffer = DataBuffer()
    work = started(buffer)
    group = finished(work)
    with pytest.raises(ValueError, match="two of one index"):
        buffer.put([group[0], group[0]])
    with pytest.raises(ValueError, match="samples of another group"):
        buffer.put([group[0], Sample("other", 1, ROW)])
    buffer.put(group)
    for _ in range(2):  # while it waits, and once it was taken
        with pytest.raises(ValueError, match="group 00000000 was put before"):
            buffer.put(group)
        buffer.get(1)


def test_groups_from_elsewhere_are_taken_too() -> None:
    buffer = DataBuffer(max_staleness=0)
    dumped = [Sample("a", 0, ROW, status="done", spans=[("default", 1)])]
    old = [Sample("b", 0, ROW, status="done", spans=[("default", 1)])]
    buffer.put(dumped)
    with pytest.raises(ValueError, match="group a was put before"):
        buffer.put(dumped)
    assert buffer.get(2) == [dumped]
    buffer.put(old)
    buffer.weights("1")  # it has no prompt number to begin again from
    assert buffer.get(1) == []
    assert buffer.metrics()["stale"] == 1
    unknown = [Sample("c", 0, ROW, status="done", spans=[("of another run", 1)])]
    buffer.put(unknown)
    assert buffer.get(1) == [unknown]
    assert started(buffer).number == 0


def test_a_state_has_the_pictures_of_a_group_once() -> None:
    buffer = DataBuffer()
    work = started(buffer)
    held = Conversation(ROW.turns, (ImageRef(b"y" * 30_000),))
    buffer.put([Sample(work.group, i, held, status="done") for i in range(8)])
    state = json.dumps(buffer.state())
    assert 40_000 < len(state) < 50_000
    new = restored(buffer)
    assert new.get(1) == buffer.get(1)


# -- filters -------------------------------------------------------------------------------------


def all_seen(group: list[Sample]) -> bool:
    return all(sample.text == "seen" for sample in group)


def test_filters_drop_groups_and_count_them() -> None:
    buffer = DataBuffer(filters=["mixed_rewards", "untruncated", "tests.test_buffer:all_seen"])
    works = [started(buffer) for _ in range(4)]
    buffer.put(finished(works[0], (1.0, 1.0)))
    cut = finished(works[1])
    cut[0].finish = "length"
    buffer.put(cut)
    buffer.put(finished(works[2]))
    good = finished(works[3])
    for sample in good:
        sample.text = "seen"
    buffer.put(good)
    assert buffer.get(9) == [good]
    found = buffer.metrics()
    assert found["dropped/mixed_rewards"] == found["dropped/untruncated"] == 1
    assert found["dropped/tests.test_buffer:all_seen"] == 1
    assert (found["put"], found["taken"], found["samples"]) == (4, 1, 8)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mixed_reward", "unknown filter 'mixed_reward'; did you mean mixed_rewards?"),
        ("no.such:thing", "filter 'no.such:thing' cannot be imported"),
        ("vireo.rollout.filters:FILTERS", "is no function but dict"),
        ("vireo.rollout.filters:absent", "cannot be imported"),
    ],
)
def test_a_filter_that_is_not_there_is_named(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("?", r"\?")):
        DataBuffer(filters=[name])


def test_a_filter_of_rewards_wants_rewards() -> None:
    buffer = DataBuffer(filters=["mixed_rewards"])
    group = finished(started(buffer))
    group[1].reward = None
    with pytest.raises(ValueError, match="needs the reward of every sample"):
        buffer.put(group)
    assert buffer.metrics()["unfinished"] == 1


# -- staleness -----------------------------------------------------------------------------------


def test_a_group_too_far_behind_begins_again_under_a_new_name() -> None:
    buffer = DataBuffer(max_staleness=1, version="0")
    works = [started(buffer) for _ in range(3)]
    buffer.put(finished(works[0], version="0"))  # waits
    buffer.put(partial(works[1], version="0"))  # has old tokens, and would get new ones
    buffer.weights("1")
    assert buffer.waiting == 1
    buffer.weights("2")
    assert buffer.waiting == 0
    buffer.put(finished(works[2], version="0"))  # was on its way all the time
    assert [buffer.next() for _ in range(3)] == [
        Work("00000000.1", 0),
        Work("00000001.2", 1),
        Work("00000002.3", 2),
    ]
    assert buffer.metrics()["stale"] == 3


def test_the_oldest_token_of_the_oldest_sample_counts() -> None:
    buffer = DataBuffer(max_staleness=2, version="0")
    work = started(buffer)
    buffer.put(partial(work, version="0"))
    buffer.weights("1")
    buffer.weights("2")
    buffer.put(finished(started(buffer), version="2"))
    buffer.get(1)
    assert buffer.metrics()["staleness"] == 2.0


def test_mean_staleness_is_that_of_the_groups_taken_last() -> None:
    buffer = DataBuffer(version="0")
    for version in ("0", "1", "1"):
        buffer.weights(version)
        buffer.put(finished(started(buffer), version=version))
    buffer.weights("2")
    buffer.get(2)
    assert buffer.metrics()["staleness"] == 1.5
    buffer.get(1)
    assert buffer.metrics()["staleness"] == 1.0


def test_weights_are_told_once_and_before_their_tokens() -> None:
    buffer = DataBuffer(max_staleness=4, version="0")
    buffer.weights("1")
    buffer.weights("1")
    with pytest.raises(ValueError, match="'0' were there before '1'"):
        buffer.weights("0")
    work = started(buffer)
    with pytest.raises(ValueError, match="unknown weights"):
        buffer.put(finished(work, version="9"))
    assert buffer.metrics()["unfinished"] == 1  # it is not lost by that


# -- waiting -------------------------------------------------------------------------------------


def test_waiting_ends_when_enough_groups_are_there() -> None:
    async def run() -> list[int]:
        buffer, seen = DataBuffer(), []
        works = [started(buffer) for _ in range(3)]

        async def train() -> None:
            for count in (2, 1):
                await buffer.wait(count)
                seen.append(len(buffer.get(count)))

        task = asyncio.create_task(train())
        for work in works:
            await asyncio.sleep(0)
            assert not task.done()
            buffer.put(finished(work))
        await task
        return seen

    assert asyncio.run(asyncio.wait_for(run(), 10)) == [2, 1]


@pytest.mark.parametrize("error", [None, RuntimeError("the engine died")])
def test_waiting_ends_when_no_more_groups_come(error: Exception | None) -> None:
    async def run() -> None:
        buffer = DataBuffer()
        task = asyncio.create_task(buffer.wait(2))
        await asyncio.sleep(0)
        with buffer.filling():
            buffer.put(finished(started(buffer)))
            if error is not None:
                raise error
        await task
        assert len(buffer.get(2)) == 1

    if error is None:
        asyncio.run(asyncio.wait_for(run(), 10))
    else:
        with pytest.raises(RuntimeError, match="the engine died"):
            asyncio.run(asyncio.wait_for(run(), 10))


def test_the_error_of_generation_reaches_who_waits() -> None:
    async def run() -> None:
        buffer = DataBuffer()
        task = asyncio.create_task(buffer.wait(1))
        with pytest.raises(RuntimeError), buffer.filling():
            raise RuntimeError("the engine died")
        with pytest.raises(RuntimeError, match="the engine died"):
            await task

    asyncio.run(asyncio.wait_for(run(), 10))


# -- over a kill ---------------------------------------------------------------------------------


def restored(buffer: DataBuffer, **options: Any) -> DataBuffer:
    """Another process's buffer, from the state as a file of JSON would have it."""
    new = DataBuffer(**options)
    new.load_state(json.loads(json.dumps(buffer.state())))
    return new


def test_a_restored_buffer_has_everything_and_starts_again_what_was_on_its_way() -> None:
    buffer = DataBuffer(version="0")
    works = [started(buffer) for _ in range(4)]
    waiting, part = finished(works[0], version="0"), partial(works[1], version="0")
    buffer.put(waiting)
    buffer.put(part)
    going_on = started(buffer)  # given out again
    buffer.weights("1")
    assert going_on.samples == part
    new = restored(buffer)
    assert new.metrics() == buffer.metrics()
    assert new.get(9) == [waiting]
    assert [new.next() for _ in range(4)] == [going_on, works[2], works[3], Work("00000004", 4)]
    new.weights("1")
    with pytest.raises(ValueError, match="were there before"):
        new.weights("0")


class Machine(RuleBasedStateMachine):
    """A trainer, an engine and a person with a power switch, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.options: dict[str, Any] = {
            "prompts": 12,
            "max_staleness": 1,
            "filters": ["mixed_rewards"],
            "version": "0",
        }
        self.buffer = DataBuffer(**self.options)
        self.open: list[Work] = []
        self.taken: list[list[Sample]] = []
        self.dropped: list[int] = []
        self.version = 0
        self.saved = self._snapshot()

    def _snapshot(self) -> str:
        """What a checkpoint has: the buffer's state, and what training has had by then."""
        done = [[s.group for s in group] for group in self.taken], self.dropped, self.version
        return json.dumps([self.buffer.state(), done])

    @rule()
    def start(self) -> None:
        work = self.buffer.next()
        if work is not None:
            self.open.append(work)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), kind=st.sampled_from(["finished", "partial", "dropped", "back"]))
    def come_back(self, data: st.DataObject, kind: str) -> None:
        work = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        version, before = str(self.version), self.buffer.metrics()
        if kind == "back":
            self.buffer.put_back(work)
        elif kind == "partial":
            self.buffer.put(partial(work, version))
        else:
            self.buffer.put(finished(work, (0.0, float(kind == "finished")), version))
        if self.buffer.metrics()["dropped/mixed_rewards"] > before["dropped/mixed_rewards"]:
            self.dropped.append(work.number)

    @rule(count=st.integers(1, 3))
    def train(self, count: int) -> None:
        self.taken += self.buffer.get(count)

    @rule()
    def update(self) -> None:
        self.version += 1
        self.buffer.weights(str(self.version))

    @rule()
    def save(self) -> None:
        self.saved = self._snapshot()

    @rule()
    def kill(self) -> None:
        """Everything since the last checkpoint is gone; what it has goes on."""
        state, (taken, self.dropped, self.version) = json.loads(self.saved)
        self.buffer = DataBuffer(**self.options)
        self.buffer.load_state(state)
        self.taken = [[Sample(name, i, ROW) for i, name in enumerate(g)] for g in taken]
        self.open = []

    @invariant()
    def every_prompt_is_in_one_place(self) -> None:
        state = self.buffer.state()  # where what is given out counts as put back
        places = [work["number"] for key in ("waiting", "partial", "again") for work in state[key]]
        done = [int(group[0].group.partition(".")[0]) for group in self.taken]
        assert sorted(places + done + self.dropped) == list(range(state["position"]))
        named = [work["group"] for key in ("waiting", "partial", "again") for work in state[key]]
        named += [group[0].group for group in self.taken]
        assert len(set(named)) == len(named)

    @invariant()
    def nothing_too_old_waits(self) -> None:
        for work in self.buffer.state()["waiting"]:
            assert all(int(s["spans"][0][0]) >= self.version - 1 for s in work["samples"])

    def teardown(self) -> None:
        """Whatever happened: with patience, every prompt comes to training or is dropped, once."""
        self.kill()
        while (work := self.buffer.next()) is not None:
            self.buffer.put(finished(work, version=str(self.version)))
        self.train(99)
        done = [int(group[0].group.partition(".")[0]) for group in self.taken]
        assert sorted(done + self.dropped) == list(range(12))


TestAnyOrderOfEvents = Machine.TestCase
TestAnyOrderOfEvents.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
