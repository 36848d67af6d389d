"""Built-in rewards, and what becomes of those that misbehave."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import Any

import pytest
from aiohttp import web

from tests.launch import ROOT, environment, vireo
from vireo.data.conversation import Conversation, Text, Turn
from vireo.errors import InputError, VireoError
from vireo.named import named
from vireo.rewards import REWARDS, Rewards
from vireo.rewards import remote as remote_module
from vireo.rollout.sample import Sample


def sample(text: str, answer: Any = None, index: int = 0) -> Sample:
    extra = {} if answer is None else {"answer": answer}
    row = Conversation((Turn("user", (Text("Why?"),)),), where="f row 3", extra=extra)
    return Sample("7", index, row, text=text)


def value(name: str, text: str, answer: Any) -> float:
    return named("reward", name, REWARDS)(sample(text, answer))


@pytest.mark.parametrize(
    ("name", "text", "answer", "expected"),
    [
        ("exact_match", " a b\n", "a b", 1),
        ("exact_match", "A b", "a b", 0),
        ("alnum_match", "The-Cat, 9!", "the cat 9", 1),
        ("alnum_match", "<think>no</think><answer>4 cm</answer>", "4cm", 1),
        ("alnum_match", "", "x", 0),
        ("last_integer", "3 + 4 is 7.", 7, 1),
        ("last_integer", "7, not 8", "7", 0),
        ("last_integer", "it is 1,234", "1234", 1),
        ("last_integer", "minus five: \N{MINUS SIGN}5", "-5", 1),
        ("last_integer", "7 and 3.5", "7", 1),
        ("last_integer", "2.7", "7", 0),
        ("last_integer", "none", "7", 0),
        ("boxed", r"so \boxed{3}, no: \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),
        ("boxed", r"\boxed{ 1 0 }", "$10$", 1),
        ("boxed", r"\boxed{5", "5", 0),
        ("boxed", "5", "5", 0),
        ("choice", "(B)", "B", 1),
        ("choice", "The answer is C.", "C", 1),
        ("choice", r"\boxed{D}", "(D)", 1),
        ("choice", "(A) or (B)", "B", 0),
        ("choice", "A dog", "A", 0),
        ("choice", "B. because", "b", 1),
        ("format_tags", "<think>a\nb</think>\n<answer>c</answer> ", "c", 1),
        ("format_tags", "<think>a</think><answer>c</answer> d", "c", 0),
        ("format_tags", "<think>a<think></think><answer>c</answer>", "c", 0),
        ("format_tags", "", "c", 0),
        ("box_iou", "[0, 0, 2, 2]", [1, 0, 3, 2], 1 / 3),
        ("box_iou", "<answer>(1, 0), (3, 2)</answer>", "[1, 0, 3, 2]", 1),
        ("box_iou", "[0, 0, 2]", [1, 0, 3, 2], 0),
        ("box_iou", "[2, 0, 0, 2]", [1, 0, 3, 2], 0),
        ("box_giou", "[0, 0, 1, 1]", [2, 0, 3, 1], -1 / 3),  # union 2, the box round both 3
        ("box_giou", "nothing", [2, 0, 3, 1], -1),
    ],
)
def test_values_by_hand(name: str, text: str, answer: Any, expected: float) -> None:
    assert value(name, text, answer) == pytest.approx(expected)


def test_an_answer_is_needed() -> None:
    for name in set(REWARDS) - {"format_tags", "remote"}:
        with pytest.raises(InputError, match=r"7 \(f row 3\).*nothing to compare with.*label_key"):
            value(name, "[0, 0, 1, 1] (A)", None)
    with pytest.raises(InputError, match=r"expects a label \[x1.*found \[1, 2\]"):
        value("box_iou", "[0, 0, 1, 1]", [1, 2])


def lengths(samples: list[Sample]) -> list[float]:
    return [float(len(one.text)) for one in samples]


def short(samples: list[Sample]) -> list[float]:
    return [1.0]


def nan(one: Sample) -> float:
    return float("nan")


def word(one: Sample) -> str:
    return "1"


def broken(samples: list[Sample]) -> list[float]:
    raise KeyError("x")


def hangs(one: Sample) -> float:
    time.sleep(3600)
    return 0.0


async def waits(one: Sample) -> float:
    await asyncio.sleep(3600)
    return 0.0


def given(name: str) -> str:
    return name if name in REWARDS else f"tests.test_rewards:{name}"


def test_a_group_is_scored_at_once_and_weighted() -> None:
    group = [sample("ab", "ab"), sample("abc", "ab", 1)]
    asyncio.run(Rewards(["exact_match", given("lengths")], [2.0, 0.5])(group))
    assert [one.rewards["exact_match"] for one in group] == [1.0, 0.0]
    assert [one.reward for one in group] == [3.0, 1.5]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("short", InputError, r"group 7: .*short' returned 1 scores for 2 samples"),
        ("nan", InputError, r"sample 0 of group 7.*returned nan, expected a finite number"),
        ("word", InputError, r"returned '1', expected a finite number"),
        ("broken", KeyError, "x"),
        ("hangs", InputError, r"hangs' has no result after 0.2 s.*--reward_timeout"),
        ("waits", InputError, r"waits' has no result after 0.2 s"),
    ],
)
def test_a_reward_that_misbehaves(name: str, error: type, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        asyncio.run(Rewards([given(name)], timeout=0.2)([sample("a"), sample("b", index=1)]))
    if error is KeyError:
        assert "broken' of group 7" in caught.value.__notes__[0]


def test_one_that_hangs_does_not_keep_the_program_from_ending() -> None:
    code = (
        "import asyncio\nfrom tests.test_rewards import given, sample\n"
        "from vireo.rewards import Rewards\n"
        "asyncio.run(Rewards([given('hangs')], timeout=0.2)([sample('a')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), timeout=60, capture_output=True
    )
    assert b"has no result after" in done.stderr


def test_a_remote_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "_WAIT_S", 0.01)
    seen: list[Any] = []
    answers: list[Any] = [web.Response(status=429), {"reward": 0.5}, 2, {"what": 1}]

    async def reply(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        answer = answers.pop(0) if answers else web.Response(status=404, text="gone")
        return answer if isinstance(answer, web.Response) else web.json_response(answer)

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/", reply)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        rewards = Rewards(["remote"], url=f"http://127.0.0.1:{port}/")
        one = sample("so", [1, 2])
        await rewards([one])
        assert one.reward == 0.5
        await rewards([one])
        assert one.reward == 2
        with pytest.raises(InputError, match="expected a number or"):
            await rewards([one])
        with pytest.raises(VireoError, match="gives no reward: status 404: gone"):
            await rewards([one])
        await runner.cleanup()

    asyncio.run(run())
    assert seen[0] == {
        "prompt": "Why?",
        "response": "so",
        "label": [1, 2],
        "extra": {"answer": [1, 2]},
    }
    with pytest.raises(InputError, match="needs --reward_url"):
        Rewards(["remote"])


def test_the_command_lists_them_all() -> None:
    done = vireo("rewards")
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(REWARDS)
