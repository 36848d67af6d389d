"""Fixtures that several test files share."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator

import pytest

from tests.launch import environment

# Where transformers keeps copies of the code that a model brings along: not in the home folder.
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="modules-")
atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)


@pytest.fixture
def running() -> Iterator:
    """Starts commands in process groups of their own and ends them, whatever happens."""
    started: list[subprocess.Popen] = []

    def start(*command: str) -> subprocess.Popen:
        process = subprocess.Popen(
            command, env=environment(), start_new_session=True, stdout=subprocess.DEVNULL
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
