"""A reward that another program computes, over HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import cache
from typing import Any

import aiohttp

from vireo.errors import InputError, VireoError, first_line
from vireo.rollout.sample import Sample

_TRIES = 4
_WAIT_S = 0.5  # before the second try, then twice as long each time
_PASSING = (429, 500, 502, 503, 504)


async def remote(sample: Sample, *, url: str) -> float:
    """Posts {"prompt", "response", "label", "extra"} as JSON to --reward_url; the answer is a
    number, or an object with one as "reward" or "score". Asked again where nobody answers, and on
    429 and passing 5xx. Columns that JSON cannot hold are sent as text, and a note says which."""
    row = sample.conversation
    extra = {name: _sent(name, value) for name, value in row.extra.items()}
    body = {
        "prompt": "\n".join(turn.text for turn in row.turns if turn.role == "user"),
        "response": sample.text,
        "label": extra.get("answer") if sample.answer is None else sample.answer,
        "extra": extra,
    }
    problem = ""
    async with aiohttp.ClientSession() as session:
        for turn in range(_TRIES):
            if turn:
                await asyncio.sleep(_WAIT_S * 2 ** (turn - 1))
            try:
                async with session.post(url, json=body) as answer:
                    if answer.status == 200:
                        return _number(await answer.json(content_type=None), url)
                    problem = f"status {answer.status}: {(await answer.text())[:200]}"
                    if answer.status not in _PASSING:
                        break
            except (aiohttp.ClientError, ValueError) as error:
                problem = first_line(error)
    raise VireoError(f"--reward_url {url} gives no reward: {problem}")


def _sent(column: str, value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
        return value
    except (TypeError, ValueError, RecursionError):
        _note(column, type(value).__name__)
        return str(value)


@cache  # once for each
def _note(column: str, kind: str) -> None:
    print(
        f"note: reward remote: column {column!r} ({kind}) holds what JSON cannot; it is sent as "
        "text",
        file=sys.stderr,
    )


def _number(answer: object, url: str) -> float:
    value = answer
    if isinstance(answer, dict):
        value = answer.get("reward", answer.get("score"))
    if not isinstance(value, int | float):
        raise InputError(
            f'--reward_url {url} answered {answer!r:.100}, expected a number or {{"reward": n}}'
        )
    return value
