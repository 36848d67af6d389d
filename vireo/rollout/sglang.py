"""The client of one SGLang server: a stock one, or `vireo serve`."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from vireo.data.render import Renderer
from vireo.rollout import protocol
from vireo.rollout.calls import Call, Calls
from vireo.rollout.engine import (
    EngineError,
    EngineRefused,
    Health,
    PauseMode,
    RolloutEngine,
    State,
    Tag,
)
from vireo.rollout.http import Http
from vireo.rollout.launch import Server
from vireo.rollout.protocol import Version
from vireo.rollout.sample import Generation, Request
from vireo.weights.source import Weights

_STEP_S = 0.02  # between looks at a server until it is idle
_ROUNDING = 1e-6  # a log-probability may be above 0 by so much
_CLOSED = (401, 403)  # of a control endpoint to which the key was not given


class SglangEngine(RolloutEngine):
    """Requests go to `http`'s server, which `server`, if given, starts. `renderer` is the
    trainer's: the server must have its model.

    `seeds`: the server honours seeds; elsewhere they are not sent. A stock server does so if it was
    started with --enable-deterministic-inference.
    """

    form = "sglang"

    def __init__(self, http: Http, renderer: Renderer, server: Server | None = None):
        super().__init__()
        self.http, self.renderer, self.server = http, renderer, server
        self.seeds = True
        self._software = ""
        self._wire = ""  # ids or text
        self._stock = True
        self._sleeps = True
        self._mode: PauseMode = "abort"  # of the last pause
        self._touched = False  # weights of the server may have been changed
        self._calls = Calls()
        self._versions: list[str] = []  # every one that the server had

    async def start(self) -> None:
        await self.close()
        try:
            await self._connect()
        except BaseException:
            await self.close()
            raise

    async def _connect(self) -> None:
        await self.http.open()
        if self.server is not None:
            await self.server.start(self.http)
            self.http.note = self.server.last_words
        path = protocol.SERVER_INFO
        info = self.http.fields(path, (await self.http.get(path))[1], "version")
        self._stock = "vireo" not in info
        name = "SGLang" if self._stock else "vireo serve"
        self.version = Version.of(str(info["version"]), name)
        self._software = f"{name} {info['version' if self._stock else 'vireo']}"
        self.seeds = not self._stock or bool(info.get("enable_deterministic_inference"))
        self._sleeps = not self._stock or bool(info.get("enable_memory_saver"))
        model = await self._check_model()
        self.state, self.weights = State(), str(model["weight_version"])
        self._versions = [self.weights]
        self.http.hold(False)
        # An earlier client may have left it paused. Without a key for that it is only asked.
        await self._control(protocol.CONTINUE, {}, also=_CLOSED)

    async def _check_model(self) -> dict[str, Any]:
        """EngineRefused: the server has another model, or one that it does not run as trained."""
        model, family = await self._model(), self.renderer.family
        found, wanted = model.get("model_type"), self.renderer.config.model_type
        if found != wanted:
            raise EngineRefused(
                f"{self.http.url} has a model of type {found} ({model.get('model_path')}), the "
                f"trainer has {wanted} ({self.renderer.model_path}): start it with that model"
            )
        if family.has_vision and not model.get("has_image_understanding", True):
            raise EngineRefused(f"{self.http.url} runs {found} as a text model: it sees no image")
        engine = "sglang" if self._stock else "embedded"
        if engine not in family.forms:
            raise EngineRefused(
                f"{self.http.url}: {family.refused.get(engine, f'no {engine} form of {found}')}; "
                "use --engine embedded, or give the URL of a `vireo serve`"
            )
        self._wire = family.forms[engine]
        # By its form the bridge knows whether responses can go on: not where it is text.
        self.form = engine if self._wire == "ids" else "sglang"
        return model

    async def close(self) -> None:
        self._calls.close()
        await self.http.close()
        if self.server is not None:
            await self.server.close()

    # -- requests -----------------------------------------------------------------------------

    async def generate(self, request: Request) -> Generation:
        started = time.perf_counter()
        got = await self._calls.run(request.rid, partial(self._ask, request))
        got = got or Generation([], [], "abort", [])
        got.seconds = time.perf_counter() - started
        return got

    async def _ask(self, request: Request, call: Call) -> Generation:
        async def body(arrived: bool) -> dict[str, Any]:
            if arrived:
                await self._control(protocol.ABORT, {"rid": call.left()}, also=_CLOSED)
            await call.begin(request.rid, self.state, self._versions)
            made = protocol.generate_body(replace(request, rid=call.sent), self._wire)
            sampling = made["sampling_params"]
            if not self.seeds:
                sampling.pop("sampling_seed", None)
            elif self._stock:  # which gives all requests without a seed the same one
                sampling.setdefault("sampling_seed", secrets.randbelow(2**31))
            return made

        return self._generation((await self.http.post(protocol.GENERATE, body))[1], call)

    def _generation(self, answer: Any, call: Call) -> Generation:
        """The answer, read strictly. EngineError: it is none that a request can get."""
        name = f"{protocol.GENERATE} (rid {call.sent})"
        fields = self.http.fields(name, answer, "output_ids", "meta_info")
        meta, ids = fields["meta_info"], fields["output_ids"]
        try:
            version, reason = str(meta["weight_version"]), meta["finish_reason"]
            finish, matched = reason["type"], reason.get("matched")
            scored = [(float(one[0]), one[1]) for one in meta.get("output_token_logprobs") or ()]
            parts = meta.get("weight_versions") if self.version.spans else None
            spans = [(str(p["version"]), p["end"] - p["start"]) for p in parts or ()]
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise self._bad(name, f"it has another shape: {self.http.quote(answer)}") from error
        if meta.get("id", call.sent) != call.sent:
            raise self._bad(name, f"it is that to request {meta['id']}")
        if not isinstance(ids, list) or [token for _, token in scored] != ids:
            raise self._bad(name, f"its {len(scored)} log-probabilities are of other tokens")
        if finish not in ("stop", "length", "abort"):
            raise self._bad(name, f"it finished by {finish!r}")
        if matched == "NaN happened":
            raise self._bad(name, "the model computed NaN; its weights are damaged")
        for value, token in scored:
            if not math.isfinite(value) or value > _ROUNDING:
                raise self._bad(name, f"the log-probability of token {token} is {value}")
        spans = spans if parts else [(version, len(ids))]
        known = self._versions[call.first :]
        for version, _ in spans:
            if version not in known:
                raise self._bad(name, f"it is of weights {version!r}, expected {known}")
        return Generation(
            ids,
            [min(value, 0.0) for value, _ in scored],
            finish,
            [span for span in spans if span[1]],
            prompt_ids=fields.get("prompt_token_ids"),
            matched=matched,
            images=meta.get("image_tokens"),
        )

    def _bad(self, name: str, why: str) -> EngineError:
        return EngineError(f"{self.http.url}{name}: a wrong answer: {why}")

    # -- control ------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "abort") -> None:
        again = self.state.name == "paused" and self._mode == "abort"
        self.state.pause()
        self._mode = mode
        self.http.hold(True)
        await self._control(protocol.PAUSE, {"mode": mode})
        if mode == "abort" and not again:  # what arrived behind the pause would wait there
            await self._calls.end(self._abort)

    async def resume(self) -> None:
        self.state.resume()
        await self._control(protocol.CONTINUE, {})
        self.http.hold(False)

    async def abort(self, rids: Sequence[str] | None = None) -> None:
        await self._calls.end(self._abort, rids)

    async def _abort(self, sent: list[str]) -> None:
        await asyncio.gather(*(self._control(protocol.ABORT, {"rid": rid}) for rid in sent))

    async def sleep(self, tags: Sequence[Tag] = ("kv_cache", "weights")) -> None:
        if not self._sleeps:
            raise EngineRefused(
                f"{self.http.url} keeps its memory: start it with --enable-memory-saver "
                "(--sglang-enable-memory-saver where Vireo starts it)"
            )
        if self.state.name == "paused":  # a stock server dies if anything is on its way
            await self._flush()
        if new := self.state.sleep(tags):
            await self._control(protocol.RELEASE, {"tags": new})

    async def wake(self, tags: Sequence[Tag] = ("kv_cache", "weights")) -> None:
        if back := self.state.wake(tags):
            await self._control(protocol.RESUME, {"tags": back})
        if "kv_cache" in back and "weights" not in back:
            await self._flush()

    async def update_weights(self, weights: Weights, version: str) -> None:
        from vireo.hub import local_folder
        from vireo.weights.named import shapes
        from vireo.weights.push import push

        before, done = self.state.name, False
        self.state.begin_update()
        self._touched = False
        self._versions.append(version)
        try:
            if before == "running":
                await self._calls.answered()
            await push(
                weights,
                version,
                sessions=self.version.sessions,
                post=self._update,
                expected=shapes(local_folder(self.renderer.model_path)),
            )
            if "kv_cache" not in self.state.released:
                await self._flush(frozen=before == "paused" and self._mode != "abort")
            found = (await self._model())["weight_version"]
            if found != version:
                raise EngineError(f"{self.http.url}: weights {found!r} after those of {version!r}")
            self.weights, done = version, True
        finally:
            if not self._touched:
                self._versions.pop()
            self.state.end_update(done or (not self._touched and before != "resumed"))

    async def _update(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """For `push`, which looks at `success` itself."""
        self._touched = True
        answer = await self._control(path, body, also=(400,))
        return self.http.fields(path, answer, "success")

    async def _flush(self, frozen: bool = False) -> None:
        """Empty the caches, as soon as nothing is on its way. `frozen`: requests may be, whose
        computed tokens stay."""
        until = time.monotonic() + self.http.timeout
        path = f"{protocol.FLUSH}?timeout=1"
        while (await self.http.post(path, {}, control=True, also=(400,)))[0] != 200:
            if frozen:
                return
            if time.monotonic() > until:
                raise EngineError(f"{self.http.url} is not idle; pause it with mode abort")
            await asyncio.sleep(_STEP_S)

    async def health(self) -> Health:
        try:
            weights = str((await self._model())["weight_version"])
        except EngineError as error:
            return Health(False, self.state.name, self.weights, self._software, str(error))
        return Health(self.state.name == "running", self.state.name, weights, self._software)

    async def checksums(self) -> dict[str, str]:
        """Those of a stock server have names and a hash of its own (of q, k and v together, say),
        and a name for each of its GPUs: `rank0/NAME`. {} without the key for them."""
        path, body = protocol.CHECKSUM, {"action": "checksum"}
        status, answer = await self.http.post(path, body, control=True, also=_CLOSED)
        if status in _CLOSED:
            return {}
        answer = self.http.fields(path, answer, "ranks")
        try:
            ranks = [dict(one["checksums"]) for one in answer["ranks"]]
            if not self._stock:
                return ranks[0]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise self._bad(path, f"it has another shape: {self.http.quote(answer)}") from error
        return {f"rank{i}/{name}": sums[name] for i, sums in enumerate(ranks) for name in sums}

    async def _model(self) -> dict[str, Any]:
        path = protocol.MODEL_INFO
        return self.http.fields(path, (await self.http.get(path))[1], "weight_version")

    async def _control(self, path: str, body: dict[str, Any], also: tuple[int, ...] = ()) -> Any:
        return (await self.http.post(path, body, control=True, also=also))[1]
