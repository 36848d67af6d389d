"""The processes of one bundle of GPUs: started, watched and ended on their machine.

`Host` is made a Ray actor by `run.py`; it is plain Python, so that it can be tried without Ray.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vireo.rollout import watch

_LAST = 15  # lines of a log in a message
_CLOSE_S = 10.0  # that children have at the end, before they are killed


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    log: Path
    secrets: tuple[str, ...]
    told: int = 0  # bytes of the log that were given away

    def new(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self.told)
            text = file.read()
            self.told = file.tell()
        return text.decode(errors="replace")

    def last(self) -> str:
        text = "\n".join(self.log.read_text(errors="replace").splitlines()[-_LAST:])
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


@dataclass
class Host:
    """Children by name; each ends with this process, however that ends (`rollout/watch.py`)."""

    gpus: list[str]  # ids, as CUDA_VISIBLE_DEVICES takes them; empty: this machine has none
    address: str
    children: dict[str, _Child] = field(default_factory=dict)
    folder: str = field(default_factory=lambda: tempfile.mkdtemp(prefix="vireo-host-"))

    def about(self) -> dict[str, Any]:
        return {"address": self.address, "gpus": self.gpus, "name": socket.gethostname()}

    def free_port(self) -> int:
        """A port that nobody has at this machine's address. OSError: it is another's."""
        with socket.socket() as probe:
            probe.bind((self.address, 0))
            return probe.getsockname()[1]

    def keep(self, name: str, text: str) -> str:
        """Write a file that this user alone can read, and return its path."""
        path = Path(self.folder) / name
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        return str(path)

    def start(
        self,
        name: str,
        command: list[str],
        env: dict[str, str],
        *,
        gpus: tuple[int, int] | None = None,
        grace: float = 20.0,
        folder: str | None = None,
        secrets: tuple[str, ...] = (),
    ) -> None:
        """Start a child in the place of an earlier one. Its first word, python, is this one.

        gpus: (first, how many) of the bundle's that it sees; None: all. grace: seconds that it has
        to end by itself when told to. secrets: left out of what is told of its log.
        """
        self.stop(name)
        log = Path(self.folder) / f"{name}.log"
        environment = {**os.environ, **env}
        if self.gpus:
            first, count = gpus or (0, len(self.gpus))
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[first : first + count])
        watcher = [sys.executable, "-I", watch.__file__, str(os.getpid()), str(grace)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*watcher, sys.executable, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder if folder and Path(folder).is_dir() else None,
                start_new_session=True,
            )
        self.children[name] = _Child(process, log, secrets)

    def look(self) -> dict[str, tuple[int | None, str]]:
        """(exit code, None while it runs; what it has said since the last look) by name."""
        return {name: (one.process.poll(), one.new()) for name, one in self.children.items()}

    def last_words(self, name: str) -> str:
        return self.children[name].last()

    def answers(self, url: str, key: str) -> bool:
        """Whether a server of this machine answers."""
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def tell_to_stop(self, name: str) -> None:
        """SIGTERM: it has its grace, which a second one ends. Nothing if it is not there."""
        if name in self.children and self.children[name].process.poll() is None:
            self.children[name].process.terminate()

    def stop(self, name: str) -> None:
        """As `tell_to_stop`, and wait for it."""
        self.tell_to_stop(name)
        if name in self.children:
            self.children[name].process.wait()

    def close(self) -> None:
        """Nothing is left running: what does not end soon is killed."""
        for _ in range(2):
            for name in self.children:
                self.tell_to_stop(name)
            until = time.monotonic() + _CLOSE_S
            for child in self.children.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.0, until - time.monotonic()))
        shutil.rmtree(self.folder, ignore_errors=True)
