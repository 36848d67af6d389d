"""What every response of an engine must be: checked before anything is made of it."""

from __future__ import annotations

import math
from collections.abc import Container

from vireo.rollout.engine import EngineError
from vireo.rollout.sample import Generation, Request

FINISHES = ("stop", "length", "abort")


class ContractError(EngineError):
    """Engine and trainer do not see the same: the sample cannot be trained on."""


def check(
    name: str, request: Request, got: Generation, words: int, weights: Container[str] | None = None
) -> None:
    """ContractError, which begins with the sample's `name`, unless `got` keeps the contract.

    The expanded prompt is the trainer's, token by token; ids and log-probs are aligned and the
    latter finite and at most 0; no id is banned or `words` (the number of tokens) or more; only the
    last may be a stop id, and it is one just where the engine says that it stopped; the finish is
    known; the weights are one of `weights` (None: any).
    """
    if problem := _problem(request, got, words, weights):
        raise ContractError(f"{name}: {problem}")


def _problem(
    request: Request, got: Generation, words: int, weights: Container[str] | None
) -> str | None:
    expected = request.prompt.expanded + request.response
    unseen = got.finish == "abort" and not got.ids  # it may have ended before it had begun
    if got.prompt_ids is None and not unseen:
        return "the engine does not say which prompt ids it saw, so they cannot be compared"
    if got.prompt_ids is not None and got.prompt_ids != expected:
        return _other_prompt(got.prompt_ids, expected)
    if len(got.logprobs) != len(got.ids):
        return f"{len(got.logprobs)} log-probabilities for {len(got.ids)} tokens"
    for place, value in enumerate(got.logprobs):
        if not math.isfinite(value) or value > 0:
            return f"the log-probability of response token {place} is {value}"
    if got.finish not in FINISHES:
        return f"finished by {got.finish!r}, expected one of {', '.join(FINISHES)}"
    banned, stops = set(request.banned), set(request.stop_ids)
    for place, token in enumerate(got.ids):
        if token in banned:
            return f"response token {place} is {token}, which only a processor may write"
        if not 0 <= token < words:
            return f"response token {place} is {token}, the model has {words} tokens"
        if token in stops and place < len(got.ids) - 1:
            return f"response token {place} is the stop token {token}, and more tokens follow it"
    if got.finish == "stop" and (not got.ids or got.ids[-1] not in stops):
        return f"the engine says that it stopped, at {got.matched!r}, and the last token is no stop"
    limit, length = request.sampling.max_new_tokens, len(request.response) + len(got.ids)
    if length > limit or (got.finish == "length" and length < limit):
        return f"{length} response tokens, finished by {got.finish!r}, with a limit of {limit}"
    if sum(count for _, count in got.spans) != len(got.ids):
        return f"weight versions of {sum(n for _, n in got.spans)} of {len(got.ids)} tokens"
    if weights is not None:
        for version, count in got.spans:
            if version not in weights:
                return f"{count} tokens are of weights {version!r}, expected {weights}"
    return None


def _other_prompt(got: list[int], expected: list[int]) -> str:
    pairs = enumerate(zip(got, expected))
    place = next((i for i, (a, b) in pairs if a != b), min(len(got), len(expected)))
    return (
        f"the engine saw another prompt: {len(got)} tokens, the trainer has {len(expected)}, and "
        f"from token {place} on it has {got[place : place + 5]}, the trainer "
        f"{expected[place : place + 5]}"
    )
