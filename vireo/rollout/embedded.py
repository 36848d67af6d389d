"""The embedded engine: transformers' own models generate in this process, on any device.

Requests that wait are computed together, in one thread, by a decoding loop of our own inside
transformers' `generate`. Between two steps the loop does what was asked for in the meantime.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig

from vireo.data.ragged import TRAINER_KEYS, Batch
from vireo.data.render import Renderer
from vireo.data.response import with_response
from vireo.errors import InputError, first_line
from vireo.models.build import whole_model
from vireo.models.lora import ADAPTER_CONFIG, add_adapters, base_of, fill_adapters, read_adapter
from vireo.models.policy import Policy
from vireo.rollout import engine as base
from vireo.rollout.engine import EngineError, EngineGone, PauseMode, RolloutEngine, Tag, WrongOrder
from vireo.rollout.room import rows_at_once
from vireo.rollout.sample import Finish, Generation, Request
from vireo.rollout.sampler import Sampler
from vireo.weights.source import Broadcast, Folder, Shared, Weights

_LEAVE = 4  # finished rows leave a batch once they are one in so many


@dataclass(eq=False)
class _Row:
    """A request on its way. `order`: what the loop is to do with it after its step."""

    request: Request
    answer: asyncio.Future[Generation]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int]] = field(default_factory=list)
    finish: Finish | None = None
    order: Literal["", "abort", "retract"] = ""
    began: float = field(default_factory=time.perf_counter)

    @property
    def response(self) -> list[int]:
        return self.request.response + self.ids

    def take(self, token: int, logprob: float, version: str) -> None:
        if not math.isfinite(logprob):
            raise EngineError(f"a log-probability is {logprob}: the weights are of no use")
        self.ids.append(token)
        self.logprobs.append(logprob)
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, 0))
        self.spans[-1] = (version, self.spans[-1][1] + 1)
        if token in self.request.stop_ids:
            self.finish = "stop"
        elif len(self.ids) >= self.request.left:
            self.finish = "length"

    def end(self, finish: Finish) -> None:
        """Gives the caller what there is."""
        self.finish = self.finish or finish
        if not self.answer.done():
            prompt = self.request.prompt.example.fields["input_ids"].tolist()
            made = Generation(self.ids, self.logprobs, self.finish, self.spans)
            made.prompt_ids = prompt + self.request.response
            made.matched = self.ids[-1] if self.finish == "stop" else None
            made.seconds = time.perf_counter() - self.began
            self.answer.set_result(made)


class EmbeddedEngine(RolloutEngine):
    """Computes up to `max_rows` requests together (default: what `rows_at_once` says).

    `shares_weights`: the policy is one in training, so its weights are always there: sleep and wake
    leave them alone, an update (`Shared`) only names them, and nobody may train while requests are
    on their way. `receiver` writes other weights into the model (default: one of its own).
    `autocast`: what a policy that is not sharded computes in, if not in the type of its weights.
    """

    form = "embedded"

    def __init__(
        self,
        policy: Policy,
        renderer: Renderer,
        device: torch.device | str,
        *,
        max_rows: int | None = None,
        shares_weights: bool = False,
        receiver: Any = None,
        autocast: torch.dtype | None = None,
    ):
        super().__init__()
        self.policy, self.renderer, self.device = policy, renderer, torch.device(device)
        self.max_rows, self.shares_weights = max_rows, shares_weights
        self._receiver, self._autocast = receiver, autocast
        self._sizes: list[torch.Size] = []  # of parameters that are released
        self._queue: list[_Row] = []
        self._batch: list[_Row] = []
        self._turn = threading.Condition()  # of orders, which the loop reads between two steps
        self._frozen = False  # between two steps
        self._computing = False  # a step, or on the way to one
        self._thread: ThreadPoolExecutor | None = None  # None: not started, or closed

    @classmethod
    def of_folder(
        cls,
        folder: str,
        renderer: Renderer,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> EmbeddedEngine:
        """Of a model or adapter folder, in its own `dtype` and on the GPU, if there is one, unless
        they are given. `options`: the constructor's."""
        family, adapter = renderer.family, None
        if (Path(folder) / ADAPTER_CONFIG).exists():
            adapter, folder = folder, base_of(folder)
        if family.remote:
            hf = whole_model(renderer.config, family, folder, dtype or renderer.config.dtype)
        else:
            auto = getattr(transformers, family.auto_class)
            hf = auto.from_pretrained(folder, dtype=dtype or "auto")
        if adapter is not None:
            add_adapters(hf, family, read_adapter(adapter))
            fill_adapters(hf, adapter)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return cls(Policy(hf.to(device), family, None), renderer, device, **options)

    # -- the interface -------------------------------------------------------------------------

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._one = asyncio.Lock()  # of whoever computes
        self._news = asyncio.Event()  # queue or state have changed
        self._thread = ThreadPoolExecutor(1, "embedded")
        self._server = asyncio.create_task(self._serve())

    async def close(self) -> None:
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        for row in [*self._queue, *self._batch]:
            if not row.answer.done():
                row.answer.set_exception(EngineGone("the embedded engine was closed"))
        self._end([*self._queue, *self._batch])
        self._tell("", [], frozen=False)
        async with self._one:
            self._server.cancel()
        thread.shutdown()

    async def generate(self, request: Request) -> Generation:
        """InputError: prompt and response may become longer than the limit."""
        if self.state.name in ("released", "resumed"):
            await self.state.for_request()  # which refuses; elsewhere requests wait in the queue
        self._check_open()
        length, most = len(request.prompt.example), request.sampling.max_new_tokens
        if length + most > self.renderer.max_length:
            raise InputError(
                f"a prompt of {length} tokens and max_new_tokens {most} are more than the limit of "
                f"{self.renderer.max_length}: lower max_new_tokens or leave the row out"
            )
        row = _Row(request, self._loop.create_future())
        if request.left > 0:
            self._queue.append(row)
            self._news.set()
        else:
            row.end("length")
        try:
            return await row.answer
        except asyncio.CancelledError:
            self._end([row])
            raise

    async def update_weights(self, weights: Weights, version: str) -> None:
        """Requests that are computed end first, unless the engine is paused."""
        if self.shares_weights != isinstance(weights, Shared) or isinstance(weights, Broadcast):
            raise base.EngineRefused(
                f"the embedded engine {'shares' if self.shares_weights else 'has'} its weights in "
                f"this process: found {type(weights).__name__}, expected "
                f"{'Shared' if self.shares_weights else 'Folder or Tensors'}"
            )
        was = self.state.name
        self.state.begin_update()
        try:
            async with self._one if was == "running" else contextlib.nullcontext():
                await asyncio.to_thread(self._write, weights, was == "resumed")
            self.state.end_update(ok=True)
            self.weights = version
        except InputError:  # nothing was written
            self.state.end_update(ok=was != "resumed")
            raise
        except Exception as error:
            self.state.end_update(ok=False)
            raise EngineError(f"the update to {version!r} failed: {first_line(error)}") from error
        finally:
            self._news.set()

    async def sleep(self, tags: Sequence[Tag] = ("kv_cache", "weights")) -> None:
        if self._frozen and self._batch:
            raise WrongOrder("sleep: requests are frozen, pause with abort or retract first")
        if "weights" in self.state.sleep(tags) and not self.shares_weights:
            self._sizes = [parameter.shape for parameter in self.policy.parameters()]
            for parameter in self.policy.parameters():
                parameter.data = parameter.data.new_empty(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    async def wake(self, tags: Sequence[Tag] = ("kv_cache", "weights")) -> None:
        """Takes memory again; weights are NaN until an update."""
        if "weights" in self.state.wake(tags) and not self.shares_weights:
            for parameter, size in zip(self.policy.parameters(), self._sizes):
                parameter.data = parameter.data.new_full(size, torch.nan)

    async def pause(self, mode: PauseMode = "abort") -> None:
        self.state.pause()
        if mode == "in_place":
            self._tell("", [], frozen=True)
            while self._computing:  # the end of a step, at most
                await asyncio.sleep(0.001)
            return
        if mode == "abort":
            self._end(self._queue)
        self._tell(mode, self._batch, frozen=False)
        async with self._one:
            return

    async def resume(self) -> None:
        self.state.resume()
        self._tell("", [], frozen=False)
        self._news.set()

    async def abort(self, rids: Sequence[str] | None = None) -> None:
        rows = [r for r in [*self._queue, *self._batch] if rids is None or r.request.rid in rids]
        self._end(rows)
        if rows:
            await asyncio.wait([row.answer for row in rows])

    async def health(self) -> base.Health:
        state = self.state.name if self._thread else "closed"
        software = f"embedded, transformers {transformers.__version__}"
        why = "" if state == "running" else f"it is {state}"
        return base.Health(not why, state, self.weights, software, why)

    async def look(self, request: Request) -> dict[str, Any]:
        """All of it, as the model gets it. WrongOrder: the engine is not running."""
        self._check_open()
        async with self._one:
            if self.state.name != "running":
                raise WrongOrder(f"look: the engine is {self.state.name}, expected running")
            return await self._compute(self._seen, request)

    async def checksums(self) -> dict[str, str]:
        return await asyncio.to_thread(lambda: self._received().checksums())

    # -- in the event loop ---------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._thread is None:
            raise EngineGone("the embedded engine is not started, or was closed")

    async def _serve(self) -> None:
        """Computes what waits, a batch after the other."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._queue and self.state.name == "running":
                await asyncio.sleep(0)  # for those who ask at the same time
                async with self._one:
                    if self._queue and self.state.name == "running":
                        await self._run()

    async def _run(self) -> None:
        """The oldest rows that can be computed together."""
        mix = self.renderer.family.can_mix
        kinds = [0 if mix else row.request.prompt.example.images for row in self._queue]
        rows = [row for row, kind in zip(self._queue, kinds) if kind == kinds[0]]
        rows = rows[: self.max_rows or self._room(rows)]
        self._queue, self._batch = [row for row in self._queue if row not in set(rows)], rows
        try:
            await self._compute(self._generate, rows)
        except Exception as error:
            for row in rows:
                if not row.answer.done():
                    failure = EngineError(f"generation failed: {type(error).__name__}: {error}")
                    failure.__cause__ = error
                    row.answer.set_exception(failure)
        self._batch = []
        self._queue[:0] = [row for row in rows if not row.answer.done()]
        self._end([row for row in rows if row.order == "abort"])  # said while the others left
        for row in self._queue:
            row.order = ""

    def _room(self, rows: Sequence[_Row]) -> int:
        longest = max(
            len(row.request.prompt.example) + row.request.sampling.max_new_tokens for row in rows
        )
        size = (self._autocast or next(self.policy.parameters()).dtype).itemsize
        return rows_at_once(self.policy.hf.config, size, longest, self.device)

    async def _compute(self, call: Any, argument: Any) -> Any:
        """Runs in the one thread; who calls it holds the lock."""
        self._computing = True
        try:
            self._check_open()
            return await self._loop.run_in_executor(self._thread, call, argument)
        finally:
            self._computing = False

    def _tell(self, order: Any, rows: Sequence[_Row], frozen: bool | None = None) -> None:
        with self._turn:
            for row in rows:
                row.order = row.order if row.order == "abort" else order
            self._frozen = self._frozen if frozen is None else frozen
            self._turn.notify()

    def _end(self, rows: Sequence[_Row]) -> None:
        """Those in the queue now, those in the batch after its step."""
        waiting = set(rows).intersection(self._queue)
        self._queue = [row for row in self._queue if row not in waiting]
        for row in waiting:
            row.end("abort")
        self._tell("abort", [row for row in rows if row not in waiting])

    def _received(self) -> Any:
        if self._receiver is None:
            from vireo.weights.receive import Receiver

            self._receiver = Receiver(self.policy.hf, self.policy.family)
        return self._receiver

    def _write(self, weights: Any, whole: bool) -> None:
        """InputError: nothing was written."""
        if isinstance(weights, Folder):
            self._received().from_disk(weights.path)
        elif not isinstance(weights, Shared):
            shapes = {name: tuple(tensor.shape) for name, tensor in weights.named()}
            self._received().check(shapes, whole=whole)
            try:
                self._received().named(weights.named())
            except InputError as error:
                raise EngineError(str(error)) from error

    # -- in the thread -------------------------------------------------------------------------

    def _generate(self, rows: list[_Row]) -> dict[str, Tensor]:
        """Computes the rows until each has ended or has been told to go; their model inputs.

        Positions are the trainer's own, so the model makes none and leaves none behind.
        """
        positions = self.renderer.positions
        examples = [
            with_response(example, row.response, positions) if row.response else example
            for row, example in ((row, row.request.prompt.example) for row in rows)
        ]
        inputs = Batch.of(examples).pad(self.renderer.pad_id, left=True)
        mrope = self.renderer.family.positions == "mrope"
        inputs["position_ids"] = inputs["positions"] if mrope else inputs["positions"][0]
        inputs = {n: v.to(self.device) for n, v in inputs.items() if n not in TRAINER_KEYS}

        def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **state):
            self._steps(rows, model, input_ids, state)
            return input_ids

        self.policy.eval()
        # Each row has its own max_new_tokens.
        common = {"use_cache": True, "cache_implementation": "dynamic", "max_new_tokens": 1}
        options = GenerationConfig(**common, pad_token_id=self.renderer.pad_id)
        enabled = self._autocast is not None
        with torch.autocast(self.device.type, self._autocast, enabled=enabled):
            self.policy.generate(**inputs, generation_config=options, custom_generate=loop)
        return inputs

    def _steps(self, rows: list[_Row], model: Any, ids: Tensor, state: dict[str, Any]) -> None:
        starts = [len(row.response) for row in rows]
        sampler = Sampler([row.request for row in rows], starts, self.device)
        pictures = [n for n, key in self.policy.family.keys.items() if key.kind != "token"]
        gone, first = {"inputs_embeds", "mm_encoder_outputs", *pictures}, True
        while going := self._between(rows):
            if not first and (len(rows) - len(going)) * _LEAVE >= len(rows):
                at = torch.tensor(going, device=self.device)
                rows, ids = [rows[i] for i in going], ids.index_select(0, at)
                sampler.select(at)
                state = _select(state, at)
            length = None if first else 1
            inputs = model.prepare_inputs_for_generation(
                ids, next_sequence_length=length, is_first_iteration=first, **state
            )
            out = model(**inputs, return_dict=True)
            state = model._update_model_kwargs_for_generation(out, state, is_encoder_decoder=False)
            if first:  # what was made of pictures is in the cache
                state, first = {n: v for n, v in state.items() if n not in gone}, False
            tokens, logprobs = sampler(out.logits[:, -1])
            ids = tokens[:, None]
            for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist()):
                if row.finish is None:
                    row.take(token, logprob, self.weights)
                    if row.finish is not None:
                        self._loop.call_soon_threadsafe(row.end, row.finish)

    def _between(self, rows: list[_Row]) -> list[int]:
        """The places of the rows that go on; waits while they are frozen."""
        with self._turn:
            while True:
                for row in rows:
                    if row.finish is None and row.order == "abort":
                        row.finish = "abort"
                        self._loop.call_soon_threadsafe(row.end, row.finish)
                going = [i for i, row in enumerate(rows) if not (row.finish or row.order)]
                self._computing = not self._frozen
                if self._computing or not going:
                    return going
                self._turn.wait()

    def _seen(self, request: Request) -> dict[str, Any]:
        hf, family, seen = self.policy.hf, self.policy.family, dict[str, Any]()
        sampling = replace(request.sampling, max_new_tokens=len(request.response) + 1)
        row = _Row(replace(request, sampling=sampling), self._loop.create_future())
        words = hf.get_submodule(family.parts["embeddings"][0])
        stack = hf.get_submodule(family.parts["language"][0])
        stack = getattr(stack, "model", stack)
        hooks = [
            words.register_forward_hook(lambda _m, _i, out: seen.update(words=out.clone())),
            stack.register_forward_pre_hook(lambda _m, _i, k: seen.update(k), with_kwargs=True),
        ]
        try:
            inputs = self._generate([row])
        finally:
            for hook in hooks:
                hook.remove()
        found = {n: v for n, v in inputs.items() if n in family.keys}
        found = {n: v if family.keys[n].kind == "packed" else v[0] for n, v in found.items()}
        positions = seen["position_ids"]
        found["positions"] = positions[:, 0] if positions.dim() == 3 else positions
        if request.prompt.pictures:
            features = seen.get("cross_attention_states")
            if features is None:  # they stand in the place of words
                features = seen["inputs_embeds"][(seen["inputs_embeds"] != seen["words"]).any(-1)]
            found["embeddings"] = features.flatten(0, -2)
        found = {n: v.cpu() for n, v in found.items()}
        return {"prompt_ids": inputs["input_ids"][0].tolist(), **found}


def _select(state: dict[str, Any], at: Tensor) -> dict[str, Any]:
    """What a model keeps between two steps, of the rows at these places alone."""
    state["past_key_values"].reorder_cache(at)
    return {
        n: v.index_select(-2 if n == "position_ids" else 0, at) if isinstance(v, Tensor) else v
        for n, v in state.items()
    }
