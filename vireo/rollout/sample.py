"""What goes to an engine, what comes back, and the sample that is made of both."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any, Literal

from vireo.data.conversation import Conversation
from vireo.data.prompt import Prompt

Finish = Literal["stop", "length", "abort"]
Status = Literal["new", "partial", "done"]


def new_rid() -> str:
    """A request's name: of fixed width, because engines abort by prefix."""
    return secrets.token_hex(16)


@dataclass(frozen=True)
class Sampling:
    """How a response is sampled.

    Log-probabilities are those of softmax(logits / temperature) over the tokens that are not
    banned, before `top_p` and `top_k` cut it off (SGLang's definition); greedy (`temperature` 0)
    has those of temperature 1. `top_k` 0: all. `seed`: with it, the same prompt has the same
    response from engines that honour seeds, whatever else they compute at the time.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    @property
    def softmax_temperature(self) -> float:
        return self.temperature or 1.0


@dataclass
class Request:
    """One response wanted. `response`: tokens of it that are already there, to go on from.

    Requests of one `group` share a prompt and go to one server. `stop_ids` end a response (the
    token is kept); `banned` ids have no probability.
    """

    prompt: Prompt
    sampling: Sampling
    stop_ids: tuple[int, ...]
    banned: tuple[int, ...]
    group: str = ""
    response: list[int] = field(default_factory=list)
    rid: str = field(default_factory=new_rid)

    @property
    def left(self) -> int:
        """Tokens that may still come: `max_new_tokens` counts the whole response."""
        return self.sampling.max_new_tokens - len(self.response)


@dataclass
class Generation:
    """What an engine returned for a request: only new tokens, not `Request.response`.

    `logprobs` [tokens] are the engine's (see Sampling). `prompt_ids`: the expanded prompt as the
    engine saw it, `Request.response` included; None if it does not say. `spans`: (weight version,
    number of tokens) in order, as far as the engine tells.
    """

    ids: list[int]
    logprobs: list[float]
    finish: Finish
    spans: list[tuple[str, int]]
    prompt_ids: list[int] | None = None
    matched: Any = None  # what stopped it, as the engine says
    images: int | None = None  # image tokens that the engine counted
    seconds: float = 0.0


@dataclass
class Sample:
    """One response to a prompt, with everything that training and a person need of it.

    `prompt_ids` are expanded; `response_ids`, `logprobs` and `mask` [response] are aligned, `mask`
    is 1 where the policy wrote the token. `spans`: (weight version, tokens) over the response.
    Samples of one prompt share `group`; `index` counts them. `rewards`: by name; `reward`: their
    weighted sum, None before it is known. `status`: new, partial (aborted: can go on) or done.
    """

    group: str
    index: int
    conversation: Conversation
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    finish: Finish | None = None
    spans: list[tuple[str, int]] = field(default_factory=list)
    status: Status = "new"
    text: str = ""
    answer: str | None = None  # the expected text, if the row has one
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"sample {self.index} of group {self.group} ({self.conversation.where or 'no row'})"

    @property
    def version(self) -> str | None:
        """The oldest weights that a token of it came from."""
        return self.spans[0][0] if self.spans else None
