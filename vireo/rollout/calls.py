"""Requests on their way to a server: which of them it has, and how they are ended early."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vireo.rollout.engine import EngineGone, State
from vireo.rollout.http import Aborted
from vireo.rollout.sample import new_rid

T = TypeVar("T")

_STEP_S = 0.02  # until a server is asked again to end what it has; then twice as long, to 1 s
_LIMIT_S = 30.0  # what it has not ended by then is given up


@dataclass
class Call:
    """One request. `sent`: its name at the server, while it may be there. `ended`: why it is not
    sent again. `first`: number of weight versions that the server had had when it was sent."""

    sent: str = ""
    ended: str = ""
    first: int = 0
    task: asyncio.Task[Any] = field(init=False)
    _again: bool = False

    def left(self) -> str:
        """Its name at the server, which may still compute what nobody will read."""
        before, self.sent = self.sent, ""
        return before

    async def begin(self, rid: str, state: State, versions: Sequence[str]) -> None:
        """Waits until it may be sent, and names it: `rid`, then a new name each time. Aborted: it
        was ended meanwhile."""
        self.sent = ""
        await state.for_request()
        if self.ended:
            raise Aborted("aborted before it was sent again")
        self.sent, self.first = new_rid() if self._again else rid, len(versions) - 1
        self._again = True


class Calls:
    """The requests that wait for an answer, by the caller's rid."""

    def __init__(self) -> None:
        self._all: dict[str, Call] = {}

    async def run(self, rid: str, send: Callable[[Call], Coroutine[Any, Any, T]]) -> T | None:
        """What `send` returns. None: the request was ended before. EngineGone: `close` ended it."""
        call = Call()
        call.task = asyncio.create_task(send(call))
        self._all[rid] = call
        try:
            return await call.task
        except Aborted:
            return None
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if not call.ended or (own is not None and own.cancelling()):
                raise  # the caller's own
            if call.ended == "closed":
                raise EngineGone("the engine was closed") from None
            return None
        finally:
            del self._all[rid]

    async def end(
        self,
        abort: Callable[[list[str]], Awaitable[Any]],
        rids: Collection[str] | None = None,
    ) -> None:
        """End these (None: all) now, and return once they have ended. `abort` has the server end
        those that it has, by their names there: several times, because a request whose pictures are
        still being read is not known yet."""
        calls = [call for rid, call in self._all.items() if rids is None or rid in rids]
        for call in calls:
            call.ended = "abort"
            if not call.sent:
                call.task.cancel()
        until, step = time.monotonic() + _LIMIT_S, _STEP_S
        while left := [call for call in calls if call.sent and not call.task.done()]:
            if time.monotonic() > until:
                for call in left:
                    call.task.cancel()
                return
            await abort([call.sent for call in left])
            await asyncio.wait([call.task for call in left], timeout=step)
            step = min(2 * step, 1.0)

    async def answered(self) -> None:
        """Until the server has none. One that is to be sent again may wait for what comes next."""
        while any(call.sent for call in self._all.values()):
            await asyncio.sleep(_STEP_S)

    def close(self) -> None:
        for call in self._all.values():
            call.ended = "closed"
            call.task.cancel()
