"""A helper process: reads questions about text that a model wrote, one JSON object a line, and
answers each with {"score"} or {"error"}. `python -m vireo.rewards.helper KIND`; it ends with its
standard input. What starts it and keeps time is helpers.py.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import warnings
from collections.abc import Callable
from typing import Any

CPU_S = 10  # for one question; the parent's patience ends sooner, if the parent still lives
MEMORY = 4 << 30  # bytes of address space
# What evaluated text has no business with, by the names of Python's audit events: files (but for
# reading), processes, the network, C.
_REFUSED = ("os.", "subprocess.", "socket.", "shutil.", "tempfile.", "ctypes.", "pty.", "mmap.")
_IMPORTS = ("os.listdir", "os.scandir")


def math_equal() -> Callable[..., float]:
    """Whether two texts are equal as mathematics, by the library math-verify."""
    from math_verify import parse, verify

    def score(response: str, whole: bool, label: str) -> float:
        """`whole`: the response is nothing but an expression, as the label always is; else its
        last one counts. ValueError: the label is none."""
        expected = parse(f"\\boxed{{{label}}}", parsing_timeout=None)
        if not expected:
            raise ValueError("the label holds no expression")
        text = f"\\boxed{{{response}}}" if whole else response
        found = parse(text, parsing_timeout=None)
        return float(verify(expected, found, timeout_seconds=None))

    score("1", True, "1")  # loads the grammars
    return score


def reasoning_gym() -> Callable[..., float]:
    """What a task of the library reasoning-gym scores an answer with."""
    from ast import literal_eval
    from functools import cache

    from reasoning_gym.factory import get_score_answer_fn

    scorer = cache(get_score_answer_fn)

    def score(response: str, task: str, answer: str | None, metadata: str) -> float:
        return scorer(task)(response, {"answer": answer, "metadata": literal_eval(metadata)})

    return score


KINDS = {"math": math_equal, "reasoning_gym": reasoning_gym}


def main(kind: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    logging.disable()
    warnings.simplefilter("ignore")
    score = KINDS[kind]()
    _limit(resource.RLIMIT_AS, MEMORY)
    _limit(resource.RLIMIT_CORE, 0)
    sys.dont_write_bytecode = True
    sys.addaudithook(_refuse)
    print("{}", file=answers, flush=True)  # ready
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + CPU_S)
        try:
            answer: dict[str, Any] = {"score": float(score(**json.loads(line)))}
        except Exception as error:  # the parent says whose question it was
            answer = {"error": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps(answer), file=answers, flush=True)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    if writes or (event.startswith(_REFUSED) and event not in _IMPORTS):
        raise PermissionError(f"{event} is refused in a helper process")


def _limit(what: int, most: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main(sys.argv[1])
