"""Servers that Vireo starts: their command lines and keys, and their lives as child processes."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from vireo.rollout import watch
from vireo.rollout.engine import EngineError, EngineGone, EngineRefused
from vireo.rollout.http import Http

_LAST = 15  # lines of a log in a message
_STEP_S = 0.2  # between looks at a server that starts

# The cache of image embeddings knows no weights: it would keep those of old ones. A health check
# that generates cannot be answered while the server is paused.
SGLANG_ENV = {
    "SGLANG_VLM_CACHE_SIZE_MB": "0",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
}
# The endpoints for weights, pauses and sleep; and nobody is told what runs here.
VLLM_ENV = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}


class Keys(NamedTuple):
    """Keys of a server, made for it alone."""

    api: str
    admin: str

    @classmethod
    def new(cls) -> Keys:
        # Not token_urlsafe: one in 64 of those begins with a dash, as a flag does.
        return cls(secrets.token_hex(32), secrets.token_hex(32))


def sglang_command(
    model: str,
    port: int,
    keys: Keys,
    passthrough: Mapping[str, str],
    *,
    host: str = "127.0.0.1",
    **ours: str,
) -> list[str]:
    """Stock SGLang. `passthrough`: its own settings, as given by --sglang-NAME; `ours`: more
    of them, which those replace."""
    fixed = {"model-path": model, "host": host, "port": str(port)}
    fixed |= {"api-key": keys.api, "admin-api-key": keys.admin}
    ours = {
        "enable-memory-saver": "",  # or sleep gives nothing back
        "skip-server-warmup": "",  # it sends a picture of its own, and dies if that fails
        "sampling-backend": "pytorch",
        **ours,
    }
    head = [sys.executable, "-m", "sglang.launch_server"]
    return head + _flags("sglang", fixed, ours, passthrough)


def vllm_command(
    model: str,
    port: int,
    keys: Keys,
    passthrough: Mapping[str, str],
    *,
    host: str = "127.0.0.1",
    **ours: str,
) -> list[str]:
    """As `sglang_command`. vLLM has one key, and it does not guard the control endpoints."""
    fixed = {"model": model, "host": host, "port": str(port), "api-key": keys.api}
    ours = {"enable-scale-out": "", "logprobs-mode": "processed_logprobs", **ours}
    head = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return head + _flags("vllm", fixed, ours, passthrough)


def serve_command(
    model: str,
    port: int,
    keys: Keys,
    passthrough: Mapping[str, str],
    *,
    host: str = "127.0.0.1",
    **ours: str,
) -> list[str]:
    """As `sglang_command`, for `vireo serve`."""
    fixed = {"model": model, "host": host, "port": str(port)}
    fixed |= {"api-key": keys.api, "admin-api-key": keys.admin}
    return [sys.executable, "-m", "vireo", "serve", *_flags("sglang", fixed, ours, passthrough)]


def _flags(
    engine: str, fixed: dict[str, str], ours: dict[str, str], passthrough: Mapping[str, str]
) -> list[str]:
    given = {name.replace("_", "-"): value for name, value in passthrough.items()}
    if taken := sorted(given.keys() & fixed.keys()):
        raise EngineRefused(
            f"--{engine}-{taken[0]}: Vireo sets it for the server that it starts; leave it out, or "
            f"start the server yourself and give --{engine}_url"
        )
    ours = {name.replace("_", "-"): value for name, value in ours.items()}
    words = []
    for name, value in {**fixed, **ours, **given}.items():
        if value.lower() != "false":
            words += [f"--{name}"] if value.lower() in ("", "true") else [f"--{name}", value]
    return words


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A server as a child process, in a process group of its own, ended with this process.

    Its output goes to the file `log`, which is removed when a server that did not fail is closed.
    `limit`: seconds until it must be ready; `grace`: seconds that it has to end by itself.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        *,
        env: Mapping[str, str] | None = None,
        keys: Keys | None = None,
        limit: float = 1800.0,
        grace: float = 20.0,
    ):
        self.name, self.command, self.limit, self.grace = name, command, limit, grace
        self.log: Path | None = None
        self._env, self._keys = {**os.environ, **(env or {})}, keys or ()
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, http: Http) -> None:
        """Ready when `http` gets an answer. EngineGone: it died, or took too long."""
        await self.close()
        handle, path = tempfile.mkstemp(prefix=f"vireo-{self.name}-", suffix=".log")
        self.log = Path(path)
        watcher = [sys.executable, "-I", watch.__file__, str(os.getpid()), str(self.grace)]
        self._process = subprocess.Popen(
            [*watcher, *self.command],
            stdin=subprocess.DEVNULL,
            stdout=handle,
            stderr=subprocess.STDOUT,
            env=self._env,
            start_new_session=True,
        )
        os.close(handle)
        until = time.monotonic() + self.limit
        while self._process.poll() is None and time.monotonic() < until:
            try:
                await http.get(http.alive, timeout=5.0)
                return
            except EngineError:
                await asyncio.sleep(_STEP_S)
        code = self._process.poll()
        await self._end()
        found = f"is not ready after {self.limit:g} s" if code is None else f"ended: code {code}"
        raise EngineGone(f"{self.name} {found}{self.last_words()}")

    async def close(self) -> None:
        if await self._end() and self.log is not None:
            self.log.unlink(missing_ok=True)

    async def _end(self) -> bool:
        """False: it had ended by itself, or never begun."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return False
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, self.grace + 5.0)
        except subprocess.TimeoutExpired:
            process.kill()
        return True

    def last_words(self) -> str:
        """The end of a message about this server: its log, and the last lines there."""
        if self.log is None:
            return ""
        text = "\n".join(self.log.read_text(errors="replace").splitlines()[-_LAST:])
        for key in self._keys:
            text = text.replace(key, "***")
        return f"; the end of its log {self.log}:\n{text}"
