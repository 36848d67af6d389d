"""`vireo check-sync`: whatever way weights reach an engine, it has the same checksums afterwards.

Two sets of weights, the model's and the same turned round, are each loaded by the engine from an
export folder. Then both are sent by each way, and the engine's own checksums must be those that it
had after loading. The turned ones come first: a tensor that a way leaves out keeps the value that
it had, and is named. So nothing has to be known of how an engine names, joins or hashes tensors.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from vireo.data.render import Renderer
from vireo.errors import InputError
from vireo.models.build import whole_model
from vireo.models.load import weight_files
from vireo.rollout.engine import RolloutEngine
from vireo.rollout.open import engine_urls, open_engine
from vireo.rollout.run import open_model
from vireo.settings.rollout import EngineSettings
from vireo.weights.receive import Receiver
from vireo.weights.source import Folder, Weights, sizes_of
from vireo.weights.ways import is_here, packed

Sums = Mapping[str, str]
Pairs = Iterator[tuple[str, Tensor]]

MOST_NAMED = 20  # tensors in one line
ENGINES = ("serve", "sglang")
_RANK = re.compile(r"(rank\d+)/")  # before the names of a stock server


@dataclass(frozen=True)
class Check:
    """`apart`: names of the tensors that are not as they must be. `found`: all of it in words."""

    name: str
    apart: list[str]
    found: str

    def __str__(self) -> str:
        return f"{'FAILED' if self.apart else 'ok':<7}{self.name:<32}{self.found}"


def check_sync(
    *, model: str, engine: EngineSettings, folder: str | None = None, **options: Any
) -> list[Check]:
    """Check an engine that is started, or those at the URLs given, and print a line a check. The
    engine has the model's weights at the end.

    `folder`: where weights are written that the engine reads (default: a temporary one). `options`:
    the renderer's. InputError: no such model, or an engine without checksums. EngineError: an
    update failed.
    """
    if engine.engine not in ENGINES:
        raise InputError(
            f"--engine {engine.engine}: check-sync asks a server for checksums of its weights, "
            f"which {' and '.join(ENGINES)} have; give --engine {' or '.join(ENGINES)}"
        )
    path, renderer = open_model(model, None, engine, **options)
    dtype = renderer.config.dtype or torch.float32
    urls = engine_urls(engine)

    async def run(out: Path) -> list[Check]:
        async with open_engine(engine, path, renderer, dtype=dtype) as opened:
            return await Syncs(opened, renderer, path, out, urls, dtype).run(engine.weight_sync)

    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        return asyncio.run(run(Path(folder)))
    with tempfile.TemporaryDirectory(prefix="vireo-sync-") as out:
        return asyncio.run(run(Path(out)))


class Syncs:
    """The checks of one started engine. `path`: the model; `out`: a folder that the engine sees;
    `urls`: of an engine that was there before; `dtype`: of one that was started for this."""

    def __init__(
        self,
        engine: RolloutEngine,
        renderer: Renderer,
        path: str,
        out: Path,
        urls: list[str],
        dtype: torch.dtype,
        tell: Callable[[str], None] = lambda line: print(line, flush=True),
    ):
        self.engine, self.renderer, self.path, self.out = engine, renderer, path, out
        self.urls, self.dtype, self.tell = urls, dtype, tell
        self.sizes = sizes_of(lambda: stored(path))
        self.checks: list[Check] = []
        self._version = 0

    async def run(self, only: str | None = None) -> list[Check]:
        """All checks, in the order in which they are made; `only`: of this way."""
        at_start = {} if self.urls else await self.engine.checksums()
        own = await self.sent("disk", stored)
        if not own:
            raise InputError("the engine shows no checksums of its weights: give VIREO_ADMIN_KEY")
        if at_start:
            self.same("disk, as at the start", own, at_start)
        await self.of_the_folder(own)
        other = await self.sent("disk", turned)
        self.follows(own, other)
        self.same("disk, the model's again", await self.sent("disk", stored), own)
        for how in self.ways(own, only):
            self.same(f"{how}, turned weights", await self.sent(how, turned), other)
            self.same(f"{how}, the model's again", await self.sent(how, stored), own)
        # Last, so that a server, which tells where its weights are from, tells of no folder that
        # is gone.
        self.same("disk, the model folder", await self.update(Folder(self.path)), own)
        return self.checks

    def ways(self, own: Sums, only: str | None) -> list[str]:
        """Those but `disk` by which this engine can be sent weights, and the one that was asked
        for."""
        if only is not None:
            return [only] if only != "disk" else []
        gpus = len({found[1] for name in own if (found := _RANK.match(name))})
        if gpus > 1:
            self.tell(f"note: an engine of {gpus} GPUs gets weights by disk alone")
            return []
        if not all(map(is_here, self.urls)):
            self.tell("note: an engine of another machine does not share memory with this one")
            return ["group"]
        on_gpu = ["shared (GPU)"] if torch.cuda.is_available() and not self.urls else []
        return ["shared", *on_gpu, "group"]

    async def sent(self, how: str, read: Callable[[str], Pairs]) -> Sums:
        """The engine's checksums after weights were read and sent."""
        way, on_gpu = how.removesuffix(" (GPU)"), how.endswith(" (GPU)")

        def named() -> Pairs:
            return ((name, t.cuda() if on_gpu else t) for name, t in read(self.path))

        weights = await asyncio.to_thread(
            lambda: packed(
                way,
                named,
                f"check-sync-{self._version + 1}",
                urls=self.urls,
                model=self.path,
                folder=self.out,
                sizes=self.sizes,
                on_gpu=on_gpu,
            )
        )
        return await self.update(weights)

    async def update(self, weights: Weights) -> Sums:
        self._version += 1
        await self.engine.pause()
        await self.engine.update_weights(weights, f"check-sync-{self._version}")
        await self.engine.resume()
        return await self.engine.checksums()

    # -- what is compared ---------------------------------------------------------------------

    def same(self, name: str, found: Sums, wanted: Sums) -> None:
        apart = sorted(n for n in {*found, *wanted} if found.get(n) != wanted.get(n))
        self._add(name, apart, f"{len(wanted)} checksums", f"of {len(wanted)} checksums differ")

    async def of_the_folder(self, own: Sums) -> None:
        """With those of the model folder, computed here, where they are by checkpoint names. An
        engine by URL may have any number format: the nearest counts."""
        formats = (self.dtype, torch.float32, torch.bfloat16) if self.urls else (self.dtype,)
        tried: list[Sums] = []
        for dtype in dict.fromkeys(formats):
            tried.append(await asyncio.to_thread(self._of_the_folder, dtype))
            if own.keys().isdisjoint(tried[0]):  # a stock server, whose tensors are its own
                self.tell("note: its tensors have names of their own; it is compared with itself")
                return
        self.same(
            "disk, as computed here", own, max(tried, key=lambda t: len(t.items() & own.items()))
        )

    def _of_the_folder(self, dtype: torch.dtype) -> Sums:
        config, family = self.renderer.config, self.renderer.family
        return Receiver(whole_model(config, family, self.path, dtype), family).checksums()

    def follows(self, own: Sums, other: Sums) -> None:
        """Turned weights change each tensor that is called as one of the checkpoint. What has
        another name may be joined of several, or be no weight at all."""
        floats = {n for n, t in stored(self.path) if t.is_floating_point()}
        still = sorted(name for name in own if own[name] == other.get(name))
        apart = [name for name in still if _called(_RANK.sub("", name), floats)]
        self._add(
            "disk, turned weights", apart, f"{len(own) - len(still)} checksums changed", "kept"
        )
        if rest := sorted(set(still) - set(apart)):
            self.tell(f"note: no weights reach {_some(rest)}")

    def _add(self, name: str, apart: list[str], fine: str, wrong: str) -> None:
        found = f"{len(apart)} {wrong}: {_some(apart)}" if apart else fine
        self.checks.append(Check(name, apart, found))
        self.tell(str(self.checks[-1]))


def stored(path: str) -> Pairs:
    """(checkpoint name, tensor) of a model folder, one at a time."""
    for file in weight_files(path):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 (it is no mapping)
                yield name, handle.get_tensor(name)


def turned(path: str) -> Pairs:
    """The same, every number twice as large with the other sign, or 1: none stays as it was, and
    none is rounded."""
    for name, tensor in stored(path):
        if tensor.is_floating_point():
            tensor = torch.where(tensor == 0, 1, -2 * tensor).to(tensor.dtype)
        yield name, tensor


def _called(name: str, names: set[str]) -> bool:
    """Whether it is one of `names`, but for what a model is wrapped in (`model.`)."""
    return any(name == one or name.endswith(f".{one}") or one.endswith(f".{name}") for one in names)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
