"""Built-in rewards, and what becomes of those that misbehave."""

from __future__ import annotations

import asyncio
import datetime
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web

from tests.launch import ROOT, environment, vireo
from vireo.data.conversation import Conversation, Text, Turn
from vireo.data.readers import open_rows
from vireo.data.reasoning import write_reasoning_gym
from vireo.data.rows import Allowed
from vireo.errors import InputError, VireoError
from vireo.named import named
from vireo.rewards import REWARDS, Rewards, helpers
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
        ("last_integer", "7, then 1,234.5", "7", 1),  # no integer stands in 1,234.5
        ("last_integer", "version 1.2.3, .5", "3", 0),
        ("last_integer", "(3,-4)", "-4", 1),
        ("last_integer", "3-4", "4", 1),
        ("last_integer", "007", 7, 1),
        ("last_integer", "9" * 5000, "9" * 5000, 1),  # int() refuses more than 4,300 digits
        ("last_integer", "9" * 5000, 9, 0),
        ("boxed", r"so \boxed{3}, no: \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),
        ("boxed", r"\boxed{ 1 0 }", "$10$", 1),
        ("boxed", r"\boxed{5", "5", 0),
        ("boxed", "5", "5", 0),
        ("boxed", r"\boxed{\text{B}}", "B", 1),
        ("boxed", r"\boxed {{\mathrm{B}}}", "B", 1),
        ("boxed", r"\boxed{\textbf{\text{5 cm}}}", "5cm", 1),
        ("boxed", r"\boxed{{a}+{b}}", "{a}+{b}", 1),
        ("boxed", r"\boxed{{a}+{b}}", "a}+{b", 0),
        ("boxed", r"\boxed{\{1, 2)}", r"\{1,2)", 1),
        ("boxed", r"\boxed{" + "{" * 9000 + "}" * 9001, "B", 0),
        ("choice", "(B)", "B", 1),
        ("choice", "The answer is C.", "C", 1),
        ("choice", r"\boxed{D}", "(D)", 1),
        ("choice", "(A) or (B)", "B", 0),
        ("choice", "A dog", "A", 0),
        ("choice", "B. because", "b", 1),
        ("choice", "**B**", "B", 1),
        ("choice", "**(B)** since it is red", "B", 1),
        ("choice", "The answer is **B**.", "B", 1),
        ("choice", "**Answer:** B", "B", 1),
        ("choice", "**A** or **B**", "B", 0),
        ("choice", r"$\boxed{\text{B}}$", "B", 1),
        ("choice", r"\boxed{{B}}", r"\boxed{B}", 1),
        ("choice", r"\boxed{\textbf{(B)}\ 5}", "B", 1),
        ("format_tags", "<think>a\nb</think>\n<answer>c</answer> ", "c", 1),
        ("format_tags", "<think>a</think><answer>c</answer> d", "c", 0),
        ("format_tags", "<think>a<think></think><answer>c</answer>", "c", 0),
        ("format_tags", "", "c", 0),
        ("box_iou", "[0, 0, 2, 2]", [1, 0, 3, 2], 1 / 3),
        ("box_iou", "<answer>(1, 0), (3, 2)</answer>", "[1, 0, 3, 2]", 1),
        ("box_iou", "[0, 0, 2]", [1, 0, 3, 2], 0),
        ("box_iou", "[2, 0, 0, 2]", [1, 0, 3, 2], 0),
        ("box_iou", '{"bbox_2d": [0, 0, 2, 2]}', [1, 0, 3, 2], 1 / 3),
        ("box_iou", '[{"bbox_2d": [1, 0, 3, 2], "label": "number 7"}]', [1, 0, 3, 2], 1),
        ("box_iou", "[1, 0, 3, 2]", '{"bbox_2d": [1, 0, 3, 2]}', 1),
        ("box_iou", "x1=0 y1=0 x2=.5 y2=1.", [0, 0, 0.5, 1], 1),
        ("box_iou", f"[0, 0, {'9' * 400}, 2]", [1, 0, 3, 2], 0),
        ("box_iou", f"[0, 0, 1{'0' * 200}, 1{'0' * 200}]", [1, 0, 3, 2], 0),  # its area overflows
        ("box_giou", f"[0, 0, {'9' * 400}, 2]", [1, 0, 3, 2], -1),
        ("math", r"so \boxed{\frac{2}{4}}", "0.5", 1),
        ("math", r"first \boxed{12}, no: \boxed{13}", "13", 1),
        ("math", r"first \boxed{12}, no: \boxed{13}", "12", 0),
        ("math", r"\boxed{(x+1)^2}", "x^2+2x+1", 1),
        ("math", r"\boxed{2\sqrt{2}}", r"$\sqrt{8}$", 1),
        ("math", r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1),
        ("math", "12 and 30 make 42.", 42, 1),
        ("math", "12 and 30 make 42.", 30, 0),
        ("math", r"<think>\boxed{1}</think><answer>\frac{1}{3}</answer>", "1/3", 1),
        ("math", "<answer>The sum is $5$</answer>", "<answer> 5 </answer>", 1),
        ("math", "no idea", "5", 0),
        ("math", "9" * 5000, "9", 0),
        ("dapo_math", "so\nAnswer: $1,234$.", "1234", 1),
        ("dapo_math", "Answer: 3\nor Answer: 4", "4", 1),
        ("dapo_math", "Answer: 3\nor Answer: 4", "3", -1),
        ("dapo_math", r"answer: x = \boxed{5}\text{ cm}^2", "5", 1),
        ("dapo_math", r"Answer: 90^{\circ}", "90 degrees", 1),
        ("dapo_math", r"Answer: \frac12", r"$\frac{1}{2}$", 1),
        ("dapo_math", "Answer: 0.5", r"\frac{1}{2}", -1),  # no mathematics, only texts
        ("dapo_math", "5", "5", -1),
        ("dapo_math", "Answer: 5\n" + "x" * 300, "5", -1),
        ("box_giou", "[0, 0, 1, 1]", [2, 0, 3, 1], -1 / 3),  # union 2, the box round both 3
        ("box_giou", "nothing", [2, 0, 3, 1], -1),
    ],
)
def test_values_by_hand(name: str, text: str, answer: Any, expected: float) -> None:
    assert value(name, text, answer) == pytest.approx(expected)


def test_an_answer_is_needed() -> None:
    for name in set(REWARDS) - {"format_tags", "reasoning_gym", "remote"}:
        with pytest.raises(InputError, match=r"7 \(f row 3\).*nothing to compare with.*label_key"):
            value(name, "[0, 0, 1, 1] (A)", None)
    with pytest.raises(InputError, match=r"expects a label \[x1.*found \[1, 2\]"):
        value("box_iou", "[0, 0, 1, 1]", [1, 2])
    with pytest.raises(InputError, match=r"expects a label \[x1"):
        value("box_iou", "[0, 0, 1, 1]", [0, 0, 10**400, 1])


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


def huge(one: Sample) -> int:
    return 10**5000


def stops(one: Sample) -> float:
    return next(iter(()))


async def stops_waiting(one: Sample) -> float:
    return next(iter(()))


def leaves(one: Sample) -> float:
    sys.exit()


async def leaves_waiting(one: Sample) -> float:
    sys.exit()


def late(one: Sample) -> float:
    raise TimeoutError("the judge is busy")


async def late_waiting(one: Sample) -> float:
    raise TimeoutError("the judge is busy")


async def cancels(one: Sample) -> float:
    raise asyncio.CancelledError


def array(samples: list[Sample]) -> Any:
    return np.array([len(one.text) for one in samples], np.float32)


def tensor(samples: list[Sample]) -> Any:
    return torch.tensor([len(one.text) for one in samples])


def made(one: Sample) -> Any:
    return one.answer


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
        ("huge", InputError, r"huge' returned a huge int, expected a finite number"),
        ("stops", RuntimeError, r"raised StopIteration"),
        ("stops_waiting", RuntimeError, r"raised StopIteration"),
        ("leaves", RuntimeError, r"raised SystemExit"),
        ("leaves_waiting", RuntimeError, r"raised SystemExit"),
        ("late", TimeoutError, r"the judge is busy"),
        ("late_waiting", TimeoutError, r"the judge is busy"),
        ("cancels", RuntimeError, r"cancels' of sample 0 of group 7 .*cancelled itself"),
    ],
)
def test_a_reward_that_misbehaves(name: str, error: type, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        asyncio.run(Rewards([given(name)], timeout=0.2)([sample("a"), sample("b", index=1)]))
    if error is not InputError and name != "cancels":
        whose = "group 7" if name == "broken" else "sample 0 of group 7"
        assert f"{name}' of {whose}" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (True, 1.0),
        (np.bool_(True), 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.array(2.5), 2.5),
        (torch.tensor(0.25, dtype=torch.bfloat16, requires_grad=True), 0.25),
        (torch.tensor(7), 7.0),
    ],
)
def test_numbers_of_every_kind_are_scores(returned: Any, expected: float) -> None:
    one = sample("a")
    one.answer = returned
    asyncio.run(Rewards([given("made")])([one]))
    assert one.reward == expected
    assert type(one.reward) is float


@pytest.mark.parametrize("returned", [np.float32("nan"), np.array([1.0]), "1", None, 1j])
def test_what_is_no_number_is_refused(returned: Any) -> None:
    one = sample("a")
    one.answer = returned
    with pytest.raises(InputError, match=r"sample 0 of group 7.*made' returned .*a finite number"):
        asyncio.run(Rewards([given("made")])([one]))


@pytest.mark.parametrize("name", ["array", "tensor"])
def test_scores_of_a_group_may_be_an_array(name: str) -> None:
    group = [sample("ab"), sample("abc", index=1)]
    asyncio.run(Rewards([given(name)])(group))
    assert [one.reward for one in group] == [2.0, 3.0]


HANGS = r"\boxed{9^{9^{9^9}}}"


def test_mathematics_that_hangs_counts_0_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vireo.rewards.mathematics._HELPERS", helpers.Helpers("math"))
    monkeypatch.setattr(helpers, "CALL_S", 2.0)
    group = [sample(text, "5", i) for i, text in enumerate((HANGS, r"\boxed{5}", HANGS, "6"))]
    asyncio.run(Rewards(["math"], timeout=0.01)(group))  # which is not for waiting in line
    assert [one.reward for one in group] == [0, 1, 0, 0]
    reason = {"unscored": "math: no result after 2 s"}
    assert [one.metadata for one in group] == [reason, {}, reason, {}]
    assert capsys.readouterr().err.count("reward 'math' has no score (no result after 2 s)") == 1


def test_a_label_without_an_expression_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    one = sample("5", "$$")
    assert named("reward", "math", REWARDS)(one) == 0
    assert one.metadata["unscored"] == "math: ValueError: the label holds no expression"


def test_a_helper_that_died_is_replaced() -> None:
    pool = helpers.Helpers("math")
    question = {"response": "5", "whole": True, "label": "5"}
    assert pool.score(sample(""), **question) == 1
    helper = pool._free.queue[-1]
    assert helper is not None
    helper.kill()
    helper.wait()
    one = sample("")
    assert (pool.score(one, **question), one.metadata) == (1, {})


def test_helpers_that_do_not_start_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VireoError, match="helper process of reward 'none' does not start"):
        helpers.Helpers("none").score(sample(""))


def gone(pid: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_helpers_end_with_their_parent_and_see_none_of_its_secrets() -> None:
    code = (
        "import time\nfrom vireo.rewards.helpers import Helpers\n"
        "from tests.test_rewards import sample\npool = Helpers('math')\n"
        "pool.score(sample(''), response='5', whole=True, label='5')\n"
        "print(pool._free.queue[-1].pid, flush=True)\ntime.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment(HF_TOKEN="secret"),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        seen = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"PATH=" in seen
        assert b"secret" not in seen
        limits = Path(f"/proc/{pid}/limits").read_text()
        assert f"address space         {4 << 30}" in limits
    finally:
        parent.kill()
        parent.wait()
    assert gone(pid, 20)


def test_a_helper_without_a_parent_runs_out_of_time() -> None:
    code = "from vireo.rewards import helper; helper.CPU_S = 1; helper.main('math')"
    question = {"response": HANGS[7:-1], "whole": True, "label": "5"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        input=json.dumps(question),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "{}\n"  # ready, and no answer
    assert done.returncode == -signal.SIGXCPU


def test_a_helper_has_little_memory_and_no_say(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, socket, subprocess\nfrom vireo.rewards import helper\n"
        "helper.KINDS['math'] = lambda: lambda do: (print('no answer'), eval(do))[1]\n"
        "helper.main('math')"
    )
    (tmp_path / "old").write_text("kept")
    refused = {
        f"open({str(tmp_path / 'new')!r}, 'w')": "open",
        f"open({str(tmp_path / 'old')!r}, 'a')": "open",
        f"os.remove({str(tmp_path / 'old')!r})": "os.remove",
        "os.system('true')": "os.system",
        "subprocess.run(['true'])": "subprocess.Popen",
        "os.fork()": "os.fork",
        "socket.socket()": "socket.__new__",
    }
    questions = ["len(bytes(5 << 30))", *refused, "2 + 2"]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        input="".join(json.dumps({"do": one}) + "\n" for one in questions),
        capture_output=True,
        text=True,
        timeout=60,
    )
    ready, memory, *errors, four = map(json.loads, done.stdout.splitlines())
    assert ready == {}
    assert memory["error"].startswith("MemoryError")
    said = [
        f"PermissionError: {event} is refused in a helper process" for event in refused.values()
    ]
    assert [one["error"] for one in errors] == said
    assert four == {"score": 4.0}
    assert [file.name for file in tmp_path.iterdir()] == ["old"]


def test_tasks_of_reasoning_gym_are_written_and_scored(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    # countdown: several answers are right; arc_1d and rearc: scored by tuples, which JSON has not.
    for task in ("countdown", "knights_knaves", "rearc", "leg_counting"):
        path = write_reasoning_gym(tmp_path, task=task, rows=3, seed=1)
        assert path == tmp_path / f"{task}.jsonl"
        before = path.read_bytes()
        rows = open_rows(str(path), allowed=Allowed(prompts=True))
        group = [Sample("7", i, rows[i], text=str(rows[i].extra["answer"])) for i in range(3)]
        group[1].text = f"<think>1</think><answer>{group[1].text}</answer>"
        group[2].text = "what?"
        asyncio.run(Rewards(["reasoning_gym"])(group))
        rewards = [one.reward for one in group]
        assert rewards[:2] == [1, 1]
        assert rewards[2] is not None
        assert rewards[2] < 0.5
        write_reasoning_gym(tmp_path, task=task, rows=3, seed=1)
        assert path.read_bytes() == before
    # The library evaluates an answer to countdown as Python, whatever it is.
    row = open_rows(str(tmp_path / "countdown.jsonl"), allowed=Allowed(prompts=True))[0]
    written = tmp_path / "written"
    one = Sample("7", 0, row, text=f"__import__('pathlib').Path({str(written)!r}).write_text('x')")
    assert named("reward", "reasoning_gym", REWARDS)(one) < 0.5
    assert not written.exists()
    with pytest.raises(InputError, match="did you mean countdown"):
        write_reasoning_gym(tmp_path, task="cuontdown")
    with pytest.raises(InputError, match="--rows: found 0"):
        write_reasoning_gym(tmp_path, task="countdown", rows=0)
    done = vireo("data", "reasoning-gym", str(tmp_path / "cli"), "--task", "countdown", "--rows=2")
    assert done.stdout == f"wrote {tmp_path}/cli/countdown.jsonl\n"
    assert len((tmp_path / "cli" / "countdown.jsonl").read_text().splitlines()) == 2


def test_reasoning_gym_needs_its_library_and_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vireo.data.reasoning.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'vireo-vl\[reasoning\]'"):
        write_reasoning_gym("runs/none", task="countdown")
    one = sample("5", "5")
    with pytest.raises(InputError, match=r"f row 3.*column 'reasoning_gym'.*found None"):
        named("reward", "reasoning_gym", REWARDS)(one)
    one.conversation.extra["reasoning_gym"] = {"task": "countdown", "metadata": "{}"}
    with pytest.raises(InputError, match=r"pip install 'vireo-vl\[reasoning\]'"):
        named("reward", "reasoning_gym", REWARDS)(one)


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


def test_a_remote_reward(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote_module, "_WAIT_S", 0.01)
    seen: list[Any] = []
    odd = {"at": datetime.date(2026, 12, 1), "nan": float("nan")}
    odd |= {"object": {"a": [None, True]}, "none": None}
    answers: list[Any] = [web.Response(status=429), {"reward": 0.5}, 2, True, {"what": 1}]

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
        one.conversation.extra.update(odd)
        await rewards([one])
        assert one.reward == 1
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
    plain = {"at": "2026-12-01", "nan": "nan", "object": {"a": [None, True]}, "none": None}
    assert seen[3]["extra"] == {"answer": [1, 2], **plain}
    said = capsys.readouterr().err.splitlines()
    assert [line.split("(")[0] for line in said] == [
        "note: reward remote: column 'at' ",
        "note: reward remote: column 'nan' ",
    ]
    with pytest.raises(InputError, match="needs --reward_url"):
        Rewards(["remote"])


def test_the_command_lists_them_all() -> None:
    done = vireo("rewards")
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(REWARDS)
