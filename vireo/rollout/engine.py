"""The interface of rollout engines, the state each is in, and the errors they raise."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vireo.errors import InputError, VireoError
from vireo.rollout.sample import Generation, Request
from vireo.weights.source import Weights

PauseMode = Literal["abort", "in_place", "retract"]
Tag = Literal["kv_cache", "weights", "cuda_graph"]


class EngineError(VireoError):
    """An engine failed, or answered something that it must not."""


class EngineGone(EngineError):
    """The engine's server is dead or hangs: nothing more will come from it."""


class EngineRefused(InputError):
    """A setting, a version or a pair of engine and model that Vireo does not run."""


class WrongOrder(EngineError):
    """A call that the engine's state does not allow."""


@dataclass(frozen=True)
class Health:
    """`ready`: a request would be answered now. `weights`: version of the weights it has."""

    ready: bool
    state: str
    weights: str
    server: str = ""  # name and version of the software
    why: str = ""


class State:
    """Where an engine stands, and which calls are allowed there. `name` is one of:

    running   requests are answered
    paused    requests wait
    released  its memory is given back (sleep); requests are refused
    resumed   memory for weights is back, but no weights are in it; requests are refused
    updating  weights are coming in; requests wait

    pause and resume, sleep and wake may be repeated. A sleep needs a paused engine, so that no
    request is on its way; a wake with weights needs an update before anything else.
    """

    def __init__(self) -> None:
        self.name = "running"
        self.released: frozenset[str] = frozenset()
        self._before_update = "running"
        self._open = asyncio.Event()
        self._open.set()

    async def for_request(self) -> None:
        """Waits while requests have to wait. WrongOrder: they are refused in this state."""
        while self.name != "running":
            if self.name in ("released", "resumed"):
                raise WrongOrder(f"generate: the engine is {self.name}; wake it and send weights")
            await self._open.wait()

    def pause(self) -> None:
        self._allow("pause", "running", "paused")
        self._to("paused")

    def resume(self) -> None:
        self._allow("resume", "paused", "running")
        self._to("running")

    def sleep(self, tags: Sequence[Tag]) -> list[Tag]:
        """The tags that are to be released now: not those that are already."""
        self._allow("sleep", "paused", "released")
        new = [tag for tag in tags if tag not in self.released]
        self.released |= set(new)
        if self.released:
            self._to("released")
        return new

    def wake(self, tags: Sequence[Tag]) -> list[Tag]:
        """The tags that are to be resumed now: not those that were never released."""
        self._allow("wake", "released", "resumed", "paused")
        back = [tag for tag in tags if tag in self.released]
        self.released -= set(back)
        if "weights" in back:
            self._to("resumed")
        elif not self.released and self.name == "released":
            self._to("paused")
        return back

    def begin_update(self) -> None:
        self._allow("update_weights", "running", "paused", "resumed")
        self._before_update = "running" if self.name == "running" else "paused"
        self._to("updating")

    def end_update(self, ok: bool) -> None:
        """Back to where it was. After a failed update its weights are unknown: nothing is allowed
        but another update (from `resumed`)."""
        self._allow("end of update", "updating")
        if not ok:
            self._to("resumed")
        elif self.released:
            self._to("released")
        else:
            self._to(self._before_update)

    def _allow(self, call: str, *states: str) -> None:
        if self.name not in states:
            raise WrongOrder(f"{call}: the engine is {self.name}, expected {' or '.join(states)}")

    def _to(self, name: str) -> None:
        self.name = name
        if name in ("paused", "updating"):
            self._open.clear()
        else:
            self._open.set()


class RolloutEngine(ABC):
    """An engine that answers requests. Use: `async with engine: await engine.generate(request)`.

    `form` names it in `Family.forms`. Calls may come from one event loop only; many requests may be
    on their way at once, and engines batch them.
    """

    form: str

    def __init__(self) -> None:
        self.state = State()
        self.weights = "default"  # version of the weights that it has

    async def __aenter__(self) -> RolloutEngine:
        try:
            await self.start()
        except BaseException:  # a session, or a server that was started, would stay
            await self.close()
            raise
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.close()

    @abstractmethod
    async def start(self) -> None:
        """Connect or start what is needed. EngineRefused: a version or model that does not run."""

    @abstractmethod
    async def close(self) -> None:
        """Stop what `start` started; waiting requests end with EngineGone."""

    @abstractmethod
    async def generate(self, request: Request) -> Generation:
        """The response to one request. Waits while the engine is paused."""

    @abstractmethod
    async def update_weights(self, weights: Weights, version: str) -> None:
        """New weights, known as `version` from here on. Names and shapes are checked before the
        first call (InputError); any failure after it leaves the engine unusable until an update
        succeeds (EngineError)."""

    @abstractmethod
    async def sleep(self, tags: Sequence[Tag] = ("kv_cache", "weights")) -> None:
        """Give memory back. Only while paused."""

    @abstractmethod
    async def wake(self, tags: Sequence[Tag] = ("kv_cache", "weights")) -> None:
        """Take memory again; after `weights`, an update must follow."""

    @abstractmethod
    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stop answering. `abort`: what is on its way ends now, as partial; `in_place`: it is
        frozen; `retract`: it goes back to the queue and is computed again from its tokens."""

    @abstractmethod
    async def resume(self) -> None:
        """Answer again after a pause."""

    @abstractmethod
    async def abort(self, rids: Sequence[str] | None = None) -> None:
        """End these requests (None: all) now; they return what they have, finish `abort`."""

    @abstractmethod
    async def health(self) -> Health:
        """Never raises for a server that is gone: `ready` is False then, and `why` says it."""

    async def look(self, request: Request) -> dict[str, Any]:
        """What the engine's model computes of a prompt, as far as the engine can show it. Keys:
        `prompt_ids` (list), the processor's own keys (tensors), `positions` (as Example's),
        `embeddings` (vision features as the language model gets them, [image tokens, H])."""
        return {}

    async def checksums(self) -> dict[str, str]:
        """A hash of each tensor of its weights, as `Receiver.checksums`; of a stock server by names
        of its own, of use only beside another one's or its own of before; {} if it shows none."""
        return {}
