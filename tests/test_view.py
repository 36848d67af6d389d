"""`vireo view`: the page in a browser, as a file and served; what data holds is never run."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import PIL.Image
import pytest

from tests import browser
from tests.launch import environment
from vireo import cli
from vireo.data.conversation import Conversation, Image, ImageRef, Text, Turn
from vireo.report.view import Run, spread
from vireo.rollout import dump
from vireo.rollout.sample import Sample

NASTY = "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 2'>"
PIECES = ["A", " b\n", NASTY, "\x1b[31m\u202e", "\ufffd"]
ENGINE = [-0.5, -1.0, -0.1, -2.0, -0.3]
TRAINER = [-0.4, -2.0, -0.1, -2.001, -0.3]


def sample(group: str, index: int, reward: float, picture: Path | None) -> Sample:
    parts = (Image(0), Text(f"What? {NASTY}")) if picture else (Text("2 + 2?"),)
    images = (ImageRef(str(picture)),) if picture else ()
    return Sample(
        group,
        index,
        Conversation((Turn("user", parts),), images, where=f"p.jsonl {NASTY}"),
        response_ids=[1, 2, 3, 4, 5],
        logprobs=ENGINE,
        mask=[1] * 5,
        finish="stop",
        spans=[("step-1", 2), ("step-2", 3)],
        status="done",
        text="".join(PIECES),
        answer=NASTY,
        reward=reward,
        rewards={"exact_match": reward},
        metadata={"pieces": PIECES, "trainer_logprobs": TRAINER, "advantage": reward - 0.5},
    )


def add_step(run: Path, step: int) -> None:
    rewards = {"a": (0.0, 1.0, 0.0), "b": (1.0, 1.0, 1.0)}
    samples = [
        sample(group, i, reward, run.parent / "picture.png" if group == "a" else None)
        for group, of in rewards.items()
        for i, reward in enumerate(of)
    ]
    (run / "rollouts").mkdir(exist_ok=True)
    dump.append(run / "rollouts" / f"step-{step}.jsonl", samples)
    record = {"step": step, "reward": step / 4, "loss": None, "groups/mixed": 0.5, "kl": step}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    PIL.Image.new("RGB", (60, 40), "red").save(tmp_path / "picture.png")
    folder = tmp_path / "run"
    folder.mkdir()
    for step in (1, 2, 3):
        add_step(folder, step)
    return folder


class Tab:
    """A page in chromium, driven by its debugging protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self.socket, self.count, self.events = socket, 0, list[dict[str, Any]]()

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.count += 1
        await self.socket.send_json({"id": self.count, "method": method, "params": params})
        while True:
            got = await self.socket.receive_json(timeout=20)
            if got.get("id") == self.count:
                return got["result"]
            self.events.append(got)

    async def js(self, code: str) -> Any:
        asked = {"expression": code, "returnByValue": True, "awaitPromise": True}
        got = await self.call("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in got, got
        return got["result"].get("value")

    async def until(self, code: str) -> None:
        for _ in range(100):
            if await self.js(code):
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"never true: {code}")

    def faults(self) -> list[dict[str, Any]]:
        bad = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event for event in self.events if event["method"] in bad]


def driven(url: str, use: Callable[[Tab], Coroutine[Any, Any, None]]) -> None:
    async def drive() -> None:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            flags = ["--headless", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
            flags += ["--remote-debugging-port=0"]
            flags += ["--no-sandbox"] if os.geteuid() == 0 else []
            process = subprocess.Popen(
                [browser.CHROMIUM, *flags, f"--user-data-dir={profile}", "about:blank"],
                env={**os.environ, "HOME": profile, "XDG_CONFIG_HOME": profile},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                place = Path(profile) / "DevToolsActivePort"
                while not place.exists() or "\n" not in place.read_text():
                    assert process.poll() is None
                    await asyncio.sleep(0.1)
                at = f"http://127.0.0.1:{place.read_text().split()[0]}/json"
                async with aiohttp.ClientSession() as session:
                    pages = await (await session.get(at)).json()
                    (page,) = [page for page in pages if page["type"] == "page"]
                    async with session.ws_connect(page["webSocketDebuggerUrl"]) as socket:
                        tab = Tab(socket)
                        for domain in ("Runtime", "Log", "Network", "Page"):
                            await tab.call(f"{domain}.enable")
                        await tab.call("Page.navigate", url=url)
                        await tab.until("document.querySelectorAll('.chart').length > 0")
                        await use(tab)
                        assert await tab.js("window.ran") is None
                        assert tab.faults() == []
            finally:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    asyncio.run(asyncio.wait_for(drive(), 60))


def rgba(colour: str) -> list[float]:
    return [float(part) for part in colour.removeprefix("rgba(").rstrip(")").split(",")]


async def check_groups(tab: Tab) -> None:
    await tab.until("document.querySelectorAll('article').length === 2")
    assert await tab.js("document.getElementById('step').textContent") == "3"
    charts = "[...document.querySelectorAll('.chart')].map(c => c.dataset.name)"
    assert await tab.js(charts) == ["reward", "loss", "kl"]
    assert "L" in await tab.js(
        "document.querySelector('[data-name=reward] path').getAttribute('d')"
    )
    await tab.until("document.querySelector('article img').naturalWidth === 60")
    spans = "[...document.querySelector('.sample .tokens').children]"
    text = await tab.js(f"{spans}.map(s => s.textContent)")
    assert text == ["A", " b\u21b5\n", NASTY, "\\x1b[31m\\x202e", "\ufffd"]
    colours = await tab.js(f"{spans}.map(s => s.style.backgroundColor)")
    # log10(0.1 / 0.001) / 3 and 1 of the strongest, 0.85: engine below and above the trainer
    near = pytest.approx
    assert rgba(colours[0]) == near([40, 120, 235, 0.85 * 2 / 3], abs=0.004)  # alphas have 8 bits
    assert rgba(colours[1]) == near([235, 120, 20, 0.85], abs=0.004)
    assert colours[2] == ""
    title = await tab.js(f"{spans}[1].title")
    assert title == '" b\\n"\nengine -1\ntrainer -2\ndifference 1\nadvantage -0.5'
    hover = "const s = document.querySelector('[data-name=reward] svg');"
    hover += "const at = s.getBoundingClientRect();"
    hover += "s.dispatchEvent(new MouseEvent('mousemove', {clientX: at.left + 6}));"
    await tab.js("{" + hover + "}")
    caption = "document.querySelector('[data-name=reward] figcaption').textContent"
    assert await tab.js(caption) == "reward: step 1: 0.25"
    choose = "const c = document.getElementById('{}'); c.value = '{}';"
    choose += "c.dispatchEvent(new Event('change'))"
    await tab.js("{" + choose.format("colour", "probability") + "}")
    colours = await tab.js(f"{spans}.map(s => s.style.backgroundColor)")
    assert rgba(colours[0]) == near([150, 80, 220, 1 - math.exp(-0.4)], abs=0.004)
    assert rgba(colours[1]) == near([150, 80, 220, 1 - math.exp(-2)], abs=0.004)
    await tab.js("{" + choose.format("kind", "right") + "}")
    kinds = "[...document.querySelectorAll('article')].map(a => a.dataset.kind)"
    assert await tab.js(kinds) == ["right"]
    await tab.js("{" + choose.format("kind", "") + "}")
    key = "document.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}))"
    await tab.js(key)
    assert await tab.js("document.getElementById('step').textContent") == "2"
    assert await tab.js("document.getElementById('slider').value") == "1"


@browser.needs_browser
def test_the_file_shows_the_run_without_a_request_and_runs_nothing_of_it(run, tmp_path, capsys):
    out = tmp_path / "view.html"
    assert cli.main(["view", str(run), "--html", str(out)]) == 0
    assert "3 of 3 steps" in capsys.readouterr().out
    assert out.read_text().count("data:image/webp") == 1  # in three steps

    async def use(tab: Tab) -> None:
        await check_groups(tab)
        sent = [e for e in tab.events if e["method"] == "Network.requestWillBeSent"]
        urls = {event["params"]["request"]["url"].partition(":")[0] for event in sent}
        assert urls <= {"file", "data"}

    driven(out.as_uri(), use)
    bare = browser.with_scripts(out, tmp_path / "bare.html")  # without the policy that forbids it
    driven(bare.as_uri(), check_groups)


@browser.needs_browser
def test_the_server_follows_a_run_for_this_machine_alone(run):
    command = [sys.executable, "-m", "vireo", "view", str(run)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = next(w for w in process.stdout.readline().split() if w.startswith("http://127.0.0.1"))

        async def use(tab: Tab) -> None:
            await check_groups(tab)
            add_step(run, 4)
            await tab.until("document.getElementById('slider').max === '3'")
            caption = "document.querySelector('[data-name=reward] figcaption').textContent"
            await tab.until(f"{caption} === 'reward: 1'")
            assert await tab.js("document.getElementById('step').textContent") == "2"

        driven(url, use)
        asyncio.run(check_refusals(url))
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


async def check_refusals(url: str) -> None:
    from yarl import URL

    async with aiohttp.ClientSession() as session:
        for path in ("step/9", "step/../metrics.jsonl", "step/%2e%2e%2fsettings.yaml", "run.yaml"):
            async with session.get(URL(url + path, encoded=True)) as answer:
                assert answer.status == 404, path
        async with session.get(url, headers={"Host": "evil.example:80"}) as answer:
            assert answer.status == 403


@browser.needs_browser
def test_a_run_without_rollouts_has_its_curves(tmp_path):
    lines = [{"step": i, "loss": 1 / i, "lr": 0.1} for i in (1, 2)] + [{"step": 2, "eval_loss": 3}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    out = tmp_path / "view.html"
    assert cli.main(["view", str(tmp_path), "--html", str(out)]) == 0
    dom = browser.dump_dom(out)
    assert 'data-name="loss"' in dom
    assert 'data-name="eval_loss"' in dom
    assert "other (1)" in dom


def test_news_skip_a_line_cut_off_until_it_is_whole_and_name_broken_ones(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(b'{"step": 1, "loss": NaN, "name": "x"}\n{"st\xff\n{"step": 2, "lo')
    found = Run(str(tmp_path)).news()
    assert found["curves"] == {"loss": [[1, None]]}
    assert found["broken"] == [2]
    with metrics.open("a") as file:
        file.write('ss": 0.5}\n')
    more = Run(str(tmp_path)).news(found["at"])
    assert (more["curves"], more["broken"], more["reset"]) == ({"loss": [[2, 0.5]]}, [], False)
    metrics.write_text('{"step": 1, "loss": 2}\n')  # shorter: a run that went on from before
    again = Run(str(tmp_path)).news(more["at"])
    assert (again["curves"], again["reset"]) == ({"loss": [[1, 2]]}, True)


def test_a_broken_sample_and_a_missing_picture_are_said(run, tmp_path):
    from vireo.report.view import Pictures

    (run / "rollouts" / "step-2.jsonl").write_text("{")
    assert "step-2.jsonl: sample 0" in Run(str(run)).step(2, Pictures())["error"]
    part = Pictures().part(ImageRef(str(tmp_path / "gone.png")))
    assert "gone.png' is not found" in part["text"]


def test_steps_are_spread_evenly_over_the_run():
    assert spread(range(1, 101), 4) == [1, 34, 67, 100]
    assert spread([5, 6], 4) == [5, 6]
    assert spread([5, 6], 1) == [6]


def test_what_is_no_run_folder_is_refused(tmp_path, capsys):
    assert cli.main(["view", str(tmp_path)]) == 2
    assert "expected metrics.jsonl, settings.yaml or rollouts/" in capsys.readouterr().err
    assert cli.main(["view", str(tmp_path / "gone")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
