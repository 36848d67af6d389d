"""Helper processes for rewards that evaluate what a model wrote: limited, and ended when they hang.

They are no sandbox: a helper is this user's process. But it has little memory and time, Python
refuses it files, processes and the network, and it gets none of the secrets that stand in the
environment (docs/rewards.md).
"""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import vireo
from vireo.errors import VireoError

if TYPE_CHECKING:
    from vireo.rollout.sample import Sample

CALL_S = 5.0
_START_S = 120.0
_MOST = 8
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "LANG", "LC_ALL")
_Helper = subprocess.Popen[bytes]


class _Unscored(Exception):
    """Why a question has no answer."""


class Helpers:
    """At most 8 processes of one `kind` (helper.py), as many as there are cores; the first question
    starts the first. They end with this process. For any number of threads."""

    def __init__(self, kind: str):
        self.kind = kind
        self._noted = threading.Lock()
        # A helper, or None in the place of one to start; last in, first out: few are started.
        self._free: queue.LifoQueue[_Helper | None] = queue.LifoQueue()
        for _ in range(min(_MOST, len(os.sched_getaffinity(0)))):
            self._free.put(None)

    def score(self, sample: Sample, **question: Any) -> float:
        """The helper's score. One that hangs, dies or fails over this sample's question gives 0 and
        `metadata["unscored"]`, which says why; the first one prints a note. VireoError: no helper
        starts. Waits for a free one."""
        try:
            return self._ask(question)
        except _Unscored as error:
            sample.metadata["unscored"] = f"{self.kind}: {error}"
            if self._noted.acquire(blocking=False):
                print(
                    f"note: {sample.name}: reward {self.kind!r} has no score ({error}) and counts "
                    'as 0; so do more like it, which only metadata["unscored"] of a sample tells',
                    file=sys.stderr,
                )
            return 0.0

    def _ask(self, question: dict[str, Any]) -> float:
        helper, fit = self._free.get(), False
        try:
            if helper is None or helper.poll() is not None:
                helper = _start(self.kind)
            answer = _told(helper, question)
            fit = True
        finally:
            if helper is not None and not fit:
                _end(helper)
            self._free.put(helper if fit else None)
        if "error" in answer:
            raise _Unscored(answer["error"])
        return answer["score"]


def _start(kind: str) -> _Helper:
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    helper = subprocess.Popen(
        [sys.executable, "-m", "vireo.rewards.helper", kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(vireo.__file__).parent.parent,  # where -m finds this very package
        # One thread each: they are many, and each thread takes address space.
        env=kept | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        start_new_session=True,  # Ctrl-C is for the parent
    )
    if _line(helper, _START_S):
        return helper
    _end(helper)
    raise VireoError(
        f"the helper process of reward {kind!r} does not start (exit code {helper.returncode}); "
        f"what it said is above; try it: python -m vireo.rewards.helper {kind}"
    )


def _told(helper: _Helper, question: dict[str, Any]) -> dict[str, Any]:
    try:
        _pipe(helper.stdin).write(json.dumps(question).encode() + b"\n")
        _pipe(helper.stdin).flush()
        line = _line(helper, CALL_S)
    except BrokenPipeError:
        line = b""
    if line is None:
        raise _Unscored(f"no result after {CALL_S:g} s")
    if not line:
        raise _Unscored(f"its process ended with code {helper.wait()}")
    return json.loads(line)


def _line(helper: _Helper, seconds: float) -> bytes | None:
    """Its next line; empty: it ended; None: it took too long."""
    ready = select.poll()
    ready.register(_pipe(helper.stdout), select.POLLIN)
    return _pipe(helper.stdout).readline() if ready.poll(seconds * 1000) else None


def _end(helper: _Helper) -> None:
    helper.kill()
    helper.wait()
    for pipe in (helper.stdin, helper.stdout):
        with suppress(BrokenPipeError):  # what was left to write has no reader
            _pipe(pipe).close()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None  # both are pipes, see _start
    return pipe
