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
from vireo.families import FAMILIES

# `make test` runs what is said of every family on these four, `make test-all` on all of them. Each
# family has quicker tests of its own.
QUICK = {"qwen2_5_vl", "mllama", "gemma3", "qwen3"}
OF_EVERY_FAMILY = {
    *("test_every_family", "test_learning", "test_packing", "test_attention", "test_alarms"),
    *("test_check_family", "test_balance", "test_ladder", "test_embedded", "test_conformance"),
    *("test_prompts", "test_weights"),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        given = getattr(getattr(item, "callspec", None), "params", {}).values()
        names = {str(value) for value in given} & FAMILIES.keys()
        if names - QUICK and item.path.stem in OF_EVERY_FAMILY:
            item.add_marker(pytest.mark.slow)


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
