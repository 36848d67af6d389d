"""The control endpoints of `vireo serve`: pauses, memory and weights of its one engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, get_args

from vireo.errors import InputError
from vireo.rollout import protocol
from vireo.rollout.engine import EngineError, PauseMode, RolloutEngine, WrongOrder
from vireo.rollout.incoming import Schema, field, texts
from vireo.weights.push import in_thread

_GROUP = "weight_update_group"
Body = dict[str, Any]


class Control:
    """Which requests may run, and the calls that change it: a control endpoint is the method of its
    name, which takes and returns JSON objects.

    `receiver` writes weights into the engine's model (`vireo.weights.receive.Receiver`).
    `flights`: rids of requests, each `waiting`, `running` (the engine has it) or `aborted`.
    """

    def __init__(self, engine: RolloutEngine, receiver: Any, model_path: str):
        self.engine, self.receiver, self.model_path = engine, receiver, model_path
        self.flights: dict[str, str] = {}
        self._turn = asyncio.Condition()  # anything that somebody may wait for has changed
        self._order = asyncio.Lock()  # one call that changes the engine's state at a time
        self._pause: PauseMode | None = None
        self._updating = self._session = False

    async def notify(self) -> None:
        async with self._turn:
            self._turn.notify_all()

    async def until(self, true: Callable[[], bool]) -> None:
        async with self._turn:
            await self._turn.wait_for(true)

    @property
    def open(self) -> bool:
        """Whether requests need not wait."""
        return self._pause is None and not self._updating

    @property
    def idle(self) -> bool:
        """Whether nothing is computed: what a pause put back into the queue is not."""
        return self._pause == "retract" or not self._running()

    def _running(self) -> bool:
        return "running" in self.flights.values()

    async def abort(self, rids: Sequence[str]) -> None:
        running = [rid for rid in rids if self.flights[rid] == "running"]
        self.flights |= {rid: "aborted" for rid in rids if rid not in running}
        await self.notify()
        await self.engine.abort(running)

    async def pause_generation(self, body: Body) -> Body:
        mode: Any = field(body, "mode", str, "abort")
        if mode not in get_args(PauseMode):
            raise Schema(f"mode: found {mode!r}, expected one of {', '.join(get_args(PauseMode))}")
        async with self._order:
            self._pause = mode  # before: what came in between would run behind the pause
            if self.engine.state.name in ("running", "paused"):  # elsewhere nothing runs
                await self.engine.pause(mode)
            if mode == "abort":
                await self.until(lambda: not self._running())
        return {"status": "ok", "message": "paused"}

    async def continue_generation(self, body: Body) -> Body:
        async with self._order:
            if self.engine.state.name == "updating":  # a session was left open
                self.engine.state.end_update(ok=True)
            await self.engine.resume()
            self._pause = None
        return {"status": "ok", "message": "continued"}

    async def release_memory_occupation(self, body: Body) -> None:
        tags = _tags(body)
        async with self._order:
            if twice := [tag for tag in tags if tag in self.engine.state.released]:
                raise WrongOrder(f"{', '.join(twice)} is released already: stock would crash")
            if not self.idle:
                raise WrongOrder("requests are on their way: stock would crash")
            await self.engine.sleep(tags)

    async def resume_memory_occupation(self, body: Body) -> None:
        tags = _tags(body)
        async with self._order:
            if never := [tag for tag in tags if tag not in self.engine.state.released]:
                raise WrongOrder(f"{', '.join(never)} is not released: stock would crash")
            await self.engine.wake(tags)

    async def begin_weight_update(self, body: Body) -> Body:
        if self._session:
            raise WrongOrder(f"a weight update is already open: {protocol.END_UPDATE} ends it")
        self._session = True
        return _done("weight update begun")

    async def end_weight_update(self, body: Body) -> Body:
        async with self._order:
            self._check_session()
            self._session = False
            if self.engine.state.name == "updating":
                await self._updated(ok=True)
        return _done("weight update ended")

    async def update_weights_from_disk(self, body: Body) -> Body:
        path = field(body, "model_path", str)
        answer = await self._update(body, lambda: self.receiver.from_disk(path), session=False)
        self.model_path = path
        return answer | {"num_paused_requests": 0}

    async def update_weights_from_tensor(self, body: Body) -> Body:
        payloads = texts(body, "serialized_named_tensors")[:1]  # of tensor-parallel rank 0
        return await self._update(body, lambda: self.receiver.from_tensors(payloads))

    async def update_weights_from_distributed(self, body: Body) -> Body:
        named = texts(body, "names"), texts(body, "dtypes"), field(body, "shapes", list)
        group = field(body, "group_name", str, _GROUP)
        return await self._update(body, lambda: self.receiver.from_group(*named, group))

    async def init_weights_update_group(self, body: Body) -> Body:
        where = field(body, "master_address", str), field(body, "master_port", int)
        ranks = field(body, "rank_offset", int), field(body, "world_size", int)
        kind = field(body, "group_name", str, _GROUP), field(body, "backend", str, "nccl")
        await in_thread(lambda: self.receiver.init_group(*where, *ranks, *kind))
        return _done("joined the group")

    async def destroy_weights_update_group(self, body: Body) -> Body:
        name = field(body, "group_name", str, _GROUP)
        await in_thread(lambda: self.receiver.destroy_group(name))
        return _done("left the group")

    async def weights_checker(self, body: Body) -> Body:
        if (action := field(body, "action", str, "checksum")) != "checksum":
            raise InputError(f"action {action!r}: vireo serve only has checksum")
        if "weights" in self.engine.state.released:
            raise WrongOrder("the weights are released: they have no checksums")
        sums = await in_thread(self.receiver.checksums)
        whole = hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()
        rank = {"checksums": sums, "per_gpu_checksum": whole}
        return _done("") | {"ranks": [rank], "per_engine_checksum": whole}

    def _check_session(self) -> None:
        if not self._session:
            raise WrongOrder(f"no weight update is open: {protocol.BEGIN_UPDATE} begins one")

    async def _update(self, body: Body, write: Callable[[], object], session: bool = True) -> Body:
        """Runs `write` once no request runs, or at once while paused. What a session writes while
        paused is one update of the engine, which ends with the session."""
        version = field(body, "weight_version", str, None)
        flush = field(body, "flush_cache", bool, True)
        if (found := field(body, "load_format", str, "auto")) != "auto":
            raise InputError(f"load_format {found!r}: vireo serve only has the default one")
        if field(body, "abort_all_requests", bool, False):
            await self.abort([*self.flights])
        state = self.engine.state
        async with self._order:
            if session:
                self._check_session()
            self._updating = True
            try:
                if state.name == "running":
                    await self.until(lambda: not self._running())
                if (was := state.name) != "updating":
                    state.begin_update()
                try:
                    await in_thread(write)
                except InputError:  # before anything was written
                    if was != "updating":
                        await self._updated(ok=was != "resumed")
                    raise
                except BaseException:
                    await self._updated(ok=False)
                    raise
                if not session or was == "running":
                    await self._updated(ok=True)
            finally:
                self._updating = False
            if flush and not self.idle:
                raise EngineError("the weights are new, but flush_cache finds requests running")
            if version is not None:
                self.engine.weights = version
        return _done("weights updated")

    async def _updated(self, ok: bool) -> None:
        self.engine.state.end_update(ok)
        if self.engine.state.name == "paused" and self._pause is None:  # after one that failed
            await self.engine.resume()


def _tags(body: Body) -> list[Any]:
    tags = field(body, "tags", list, []) or list(protocol.TAGS)
    if wrong := [tag for tag in tags if tag not in protocol.TAGS]:
        raise Schema(f"tags: found {wrong}, expected some of {', '.join(protocol.TAGS)}")
    return tags


def _done(message: str) -> Body:
    return {"success": True, "message": message}
