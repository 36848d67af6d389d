"""Servers that Vireo starts, and the engine that the settings ask for."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch import ROOT, environment
from tests.tiny_models import noise, renderer, row, scratch, tiny, user
from vireo import __version__
from vireo.rollout import launch
from vireo.rollout import open as opening
from vireo.rollout.embedded import EmbeddedEngine
from vireo.rollout.engine import EngineGone, EngineRefused
from vireo.rollout.http import Http
from vireo.rollout.launch import Keys, Server, free_port
from vireo.rollout.open import open_engine
from vireo.rollout.sample import Request, Sampling
from vireo.rollout.several import SeveralEngines
from vireo.rollout.sglang import SglangEngine
from vireo.settings.rollout import EngineSettings

KEYS = Keys("secret-api", "secret-admin")
FAMILY = "qwen2_5_vl"


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs are in `tmp_path`."""
    scratch()
    monkeypatch.setattr(launch.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(launch, "_STEP_S", 0.05)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes a stand-in server, not started, and the way to it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made: list[Server] = []

    def make(*words: str, **options: Any) -> tuple[Server, Http]:
        port = free_port()
        command = [sys.executable, "-m", "tests.faulty_server", str(port), *words]
        server = Server("sglang", command, keys=KEYS, **options)
        made.append(server)
        return server, Http(f"http://127.0.0.1:{port}", timeout=5.0, backoff=0.01)

    yield make
    for server in made:
        if server._process is not None and server._process.poll() is None:
            server._process.kill()


def run(test: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(test(), 240))


def below(pid: int) -> set[int]:
    """The ids of the processes that `pid` started, and of theirs."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().split(") ")[1][2:].split()[0]
                )
            except (OSError, IndexError):
                continue
    found = {child for child, parent in parents.items() if parent == pid}
    return found.union(*(below(child) for child in found))


def gone(pids: set[int], within: float = 10.0) -> bool:
    until = time.monotonic() + within
    while time.monotonic() < until:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False


def test_a_server_lives_from_start_to_close(stand_in: Callable[..., Any], tmp_path: Path) -> None:
    async def test() -> None:
        server, http = stand_in("parent")
        await http.open()
        await server.start(http)
        assert (await http.get("/model_info"))[0] == 200
        (log,) = tmp_path.iterdir()
        assert log == server.log
        assert log.stat().st_mode & 0o077 == 0
        assert server._process is not None
        pids = {server._process.pid, *below(server._process.pid)}
        assert len(pids) == 3  # the watcher, the server and what that started
        assert os.getpgid(server._process.pid) not in {os.getpgid(0)}
        await server.close()
        await server.close()
        assert gone(pids, 0.5)
        assert list(tmp_path.iterdir()) == []
        await http.close()

    run(test)


def test_a_server_that_dies_at_start_says_why(stand_in: Callable[..., Any]) -> None:
    async def test() -> None:
        server, http = stand_in()
        server.command[-1] = f"no-port-{KEYS.api}"
        await http.open()
        with pytest.raises(EngineGone, match=r"sglang ended: code 1; the end of its log") as error:
            await server.start(http)
        assert str(server.log) in str(error.value)
        assert "ValueError: invalid literal for int()" in str(error.value)
        assert "no-port-***" in str(error.value)
        assert KEYS.api not in str(error.value)
        assert server.log.exists()
        await http.close()

    run(test)


def test_a_server_that_is_never_ready_is_ended(stand_in: Callable[..., Any]) -> None:
    async def test() -> None:
        server, http = stand_in("deaf", limit=0.6, grace=0.1)
        http.url = f"http://127.0.0.1:{free_port()}"
        await http.open()
        started = asyncio.create_task(server.start(http))
        while server._process is None:
            await asyncio.sleep(0.01)
        pid = server._process.pid
        while not below(pid):
            await asyncio.sleep(0.01)
        pids = {pid, *below(pid)}
        with pytest.raises(EngineGone, match=r"not ready after 0.6 s; the end of its log"):
            await started
        assert gone(pids, 0.5)
        await http.close()

    run(test)


def test_a_server_deaf_to_sigterm_is_killed(stand_in: Callable[..., Any]) -> None:
    async def test() -> None:
        server, http = stand_in("deaf", "parent", grace=0.2)
        await http.open()
        await server.start(http)
        assert server._process is not None
        pids = {server._process.pid, *below(server._process.pid)}
        before = time.monotonic()
        await server.close()
        assert time.monotonic() - before >= 0.2
        assert gone(pids, 0.5)
        await http.close()

    run(test)


PARENT = """
import asyncio, sys, time
from vireo.rollout.http import Http
from vireo.rollout.launch import Server

async def main():
    command = [sys.executable, "-m", "tests.faulty_server", sys.argv[1], "deaf", "parent"]
    http, server = Http(f"http://127.0.0.1:{sys.argv[1]}"), Server("sglang", command, grace=0.1)
    await http.open()
    # In a thread that ends: a signal of the kernel would come with it.
    await asyncio.to_thread(asyncio.run, started(server, sys.argv[1]))
    print(server._process.pid, flush=True)
    time.sleep(60)

async def started(server, port):
    http = Http(f"http://127.0.0.1:{port}")
    await http.open()
    await server.start(http)
    await http.close()

asyncio.run(main())
"""


def test_a_server_ends_with_its_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(free_port())],
        env=environment(TMPDIR=str(tmp_path)),
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
    )
    try:
        assert parent.stdout is not None
        watcher = int(parent.stdout.readline())
        pids = {watcher, *below(watcher)}
        assert len(pids) == 3
        assert all(map(alive, pids))
        parent.kill()
        parent.wait()
        assert gone(pids, 5.0)
    finally:
        parent.kill()
        parent.wait()


def test_an_engine_starts_its_server_and_tells_of_its_log(stand_in: Callable[..., Any]) -> None:
    async def test() -> None:
        server, http = stand_in("--api-key", KEYS.api)
        made = renderer(FAMILY).rollout(row(user("What?")))
        request = Request(made, Sampling(3), (9,), ())
        async with SglangEngine(http, renderer(FAMILY), server) as engine:
            assert (await engine.generate(request)).ids == [7, 8, 9]
            assert server._process is not None
            for pid in below(server._process.pid):
                os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(server._process.wait)
            with pytest.raises(EngineGone, match="is dead") as error:
                await engine.generate(request)
            assert f"the end of its log {server.log}" in str(error.value)
            assert KEYS.api not in str(error.value)
            assert "ready" in str(error.value)
            died = server.log
            await engine.start()
            assert (await engine.generate(request)).ids == [7, 8, 9]
            assert server.log != died
            assert died.exists()

    run(test)


@pytest.mark.slow
def test_vireo_serve_is_started_like_any_other(tmp_path: Path) -> None:
    port, keys = free_port(), Keys.new()
    command = launch.serve_command(tiny(FAMILY), port, keys, {"max_rows": "2"}, dtype="fp32")
    server = Server("vireo-serve", command, env=environment(), keys=keys, grace=5.0)
    http = Http(f"http://127.0.0.1:{port}", api_key=keys.api, admin_key=keys.admin)
    made = renderer(FAMILY).rollout(row(user(0, "What?"), images=[noise(56, 56)]))
    greedy = Request(made, Sampling(3, 0.0), (), renderer(FAMILY).banned_ids)

    async def test() -> None:
        async with SglangEngine(http, renderer(FAMILY), server) as engine:
            assert (await engine.health()).server == f"vireo serve {__version__}"
            got = await engine.generate(greedy)
            assert (len(got.ids), got.finish, got.prompt_ids) == (3, "length", made.expanded)
            await engine.pause()
            await engine.resume()
        assert list(tmp_path.iterdir()) == []

    run(test)


def test_a_server_that_is_refused_is_ended(stand_in: Callable[..., Any], tmp_path: Path) -> None:
    async def test() -> None:
        server, http = stand_in()
        engine = SglangEngine(http, renderer("qwen3"), server)
        with pytest.raises(EngineRefused, match="trainer has qwen3"):
            await engine.start()
        assert server._process is None
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(EngineGone, match="closed"):
            await http.get("/model_info")

    run(test)


# -- command lines --------------------------------------------------------------------------------


def test_the_command_of_a_stock_server() -> None:
    got = launch.sglang_command("M", 5, KEYS, {"mem-fraction-static": "0.5"}, dtype="bfloat16")
    assert got == [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", "M"),
        *("--host", "127.0.0.1", "--port", "5"),
        *("--api-key", "secret-api", "--admin-api-key", "secret-admin"),
        *("--enable-memory-saver", "--skip-server-warmup", "--sampling-backend", "pytorch"),
        *("--dtype", "bfloat16", "--mem-fraction-static", "0.5"),
    ]
    assert launch.SGLANG_ENV["SGLANG_VLM_CACHE_SIZE_MB"] == "0"


def test_settings_of_the_server_win_over_those_of_vireo() -> None:
    given = {
        "sampling_backend": "flashinfer",
        "enable-memory-saver": "false",
        "enable-deterministic-inference": "",
        "disable-cuda-graph": "true",
    }
    got = launch.sglang_command("M", 5, KEYS, given)
    assert got[got.index("--sampling-backend") + 1] == "flashinfer"
    assert got.count("--sampling-backend") == 1
    assert "--enable-memory-saver" not in got
    assert got[-2:] == ["--enable-deterministic-inference", "--disable-cuda-graph"]


@pytest.mark.parametrize("name", ["port", "host", "api-key", "admin_api_key", "model-path"])
def test_what_vireo_must_know_is_not_passed_through(name: str) -> None:
    with pytest.raises(EngineRefused, match=f"--sglang-{name.replace('_', '-')}.*--sglang_url"):
        launch.sglang_command("M", 5, KEYS, {name: "x"})


def test_keys_are_new_each_time() -> None:
    one, two = Keys.new(), Keys.new()
    assert len({*one, *two}) == 4
    assert min(map(len, (*one, *two))) >= 40


def test_no_key_looks_like_a_flag() -> None:
    assert not [key for _ in range(1000) for key in Keys.new() if key.startswith("-")]


# -- the engine that the settings ask for ---------------------------------------------------------


def opened(family: str = FAMILY, args: dict[str, str] | None = None, **settings: Any) -> Any:
    passed = {f"{settings.get('engine', 'vllm')}-{name}": v for name, v in (args or {}).items()}
    made = EngineSettings.model_validate(settings | {"server_args": passed})
    return open_engine(made, tiny(family), renderer(family))


def test_the_engine_of_this_process() -> None:
    assert isinstance(opened(engine="embedded"), EmbeddedEngine)


def test_servers_by_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIREO_API_KEY", "from-env")
    one = opened(engine="sglang", sglang_url="http://a:1", engine_concurrency=7, engine_timeout=3.0)
    assert isinstance(one, SglangEngine)
    assert one.server is None
    assert (one.http.url, one.http.timeout, one.http._slots._value) == ("http://a:1", 3.0, 7)
    assert (one.http._api_key, one.http._admin_key) == ("from-env", "from-env")
    two = opened(
        engine="sglang",
        sglang_url="http://a:1,http://b:2",
        engine_api_key="k",
        engine_admin_key="a",
    )
    assert isinstance(two, SeveralEngines)
    assert [engine.http.url for engine in two.engines] == ["http://a:1", "http://b:2"]
    assert (two.engines[1].http._api_key, two.engines[1].http._admin_key) == ("k", "a")


def test_a_server_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "find_spec", lambda name: object())
    engine = opened(engine="sglang", args={"tp-size": "2"})
    assert isinstance(engine, SglangEngine)
    command = engine.server.command
    assert command[3:5] == ["--model-path", tiny(FAMILY)]
    assert command[-2:] == ["--tp-size", "2"]
    assert engine.http.url.endswith(":" + command[command.index("--port") + 1])
    assert engine.http._admin_key == command[command.index("--admin-api-key") + 1]
    assert engine.server._env["SGLANG_VLM_CACHE_SIZE_MB"] == "0"


def test_a_server_that_is_not_installed_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "find_spec", lambda name: None)
    with pytest.raises(EngineRefused, match=r"vireo-vl\[sglang\].*--sglang_url"):
        opened(engine="sglang")


def test_a_pair_that_the_family_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EngineRefused, match=r"first image.*--engine embedded or --engine_fallback"):
        opened("llava", engine="sglang")
    assert isinstance(opened("llava", engine="sglang", engine_fallback=True), EmbeddedEngine)
    assert "note: llava with sglang: SGLang shows" in capsys.readouterr().err
    # Behind a URL may be `vireo serve`, which runs it: the client finds out when it starts.
    assert isinstance(opened("llava", engine="sglang", sglang_url="http://a:1"), SglangEngine)
    with pytest.raises(EngineRefused, match="vLLM has not had this model"):
        opened("mllama", engine="vllm")


@pytest.mark.parametrize("settings", [{"engine": "embedded"}, {"sglang_url": "http://a:1"}])
def test_settings_of_a_server_that_is_not_started_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(EngineRefused, match="mem-fraction-static: only for a server that Vireo"):
        opened(args={"mem-fraction-static": "0.5"}, **{"engine": "sglang", **settings})
