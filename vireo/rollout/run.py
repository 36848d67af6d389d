"""Every prompt of a file once, by any engine: `vireo rollout`, and what `vireo eval` shares."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from tqdm import tqdm

from vireo import __version__
from vireo.data.conversation import read_rows
from vireo.data.render import Renderer
from vireo.data.rows import Allowed
from vireo.errors import InputError
from vireo.hub import local_folder
from vireo.models.load import fingerprint
from vireo.models.lora import ADAPTER_CONFIG, base_of, other_base
from vireo.rewards import Rewards
from vireo.rollout import dump
from vireo.rollout.bridge import VLMRolloutEngine
from vireo.rollout.buffer import DataBuffer
from vireo.rollout.engine import Health
from vireo.rollout.manager import Prompts, RolloutManager
from vireo.rollout.open import open_engine
from vireo.rollout.sample import Sampling
from vireo.settings.rollout import EngineSettings, SamplingSettings


def open_model(
    model: str, processor: str | None, engine: EngineSettings, **options: Any
) -> tuple[str, Renderer]:
    """The model's folder, for an engine, and its renderer with these `options`. An adapter folder
    brings its base. InputError: no such model, or one that the engine cannot have."""
    folder = base = local_folder(model)
    own = local_folder(processor) if processor else None
    if (Path(folder) / ADAPTER_CONFIG).exists():
        if engine.engine != "embedded":
            raise InputError(
                f"{model} holds adapters alone, which {engine.engine} is not given: use --engine "
                "embedded, or export it with --merge_lora"
            )
        base = base_of(folder)
        if own is None and list(Path(folder).glob("tokenizer*")):
            own = folder
        if notice := other_base(folder, fingerprint(base)):
            print(f"note: {notice}", file=sys.stderr)
    return folder, Renderer(base, own, **options)


def allowed(engine: EngineSettings, *, prompts: bool) -> Allowed:
    """What rows may do, by the settings; `prompts`: have no answer."""
    return Allowed(prompts, engine.allow_image_urls, engine.allow_image_paths)


def generate(
    model: tuple[str, Renderer],
    prompts: Prompts,
    buffer: DataBuffer,
    engine: EngineSettings,
    sampling: SamplingSettings,
    server_args: Mapping[str, str] | None,
    told: Callable[[], None] | None = None,
    *,
    rewards: Rewards | None = None,
    at_once: int | None = None,
) -> tuple[Health, float]:
    """All groups that `buffer` still wants, with an engine opened for them. Returns its health at
    the end, and the seconds without start and end. `told` and `at_once`: see RolloutManager."""
    folder, renderer = model
    names = set(Sampling.__dataclass_fields__)
    each = Sampling(**sampling.model_dump(include=names))

    async def run() -> tuple[Health, float]:
        opened = open_engine(engine, folder, renderer, server_args=server_args or {})
        async with VLMRolloutEngine(opened, renderer) as rollouts:
            started = time.perf_counter()
            await RolloutManager(
                rollouts,
                buffer,
                prompts,
                each,
                sampling.n,
                at_once=at_once or -(-engine.engine_concurrency // sampling.n),
                rewards=rewards,
                fetch=engine.allow_image_urls,
                told=told,
            ).fill()
            return await opened.health(), time.perf_counter() - started

    return asyncio.run(run())


def rollout(
    *,
    model: str,
    prompts: str,
    out: str,
    engine: EngineSettings,
    sampling: SamplingSettings,
    server_args: Mapping[str, str] | None = None,
    processor: str | None = None,
    image_root: str | None = None,
    limit: int | None = None,
    reward: Sequence[str] = (),
    **options: Any,
) -> dict[str, Any]:
    """Samples of the prompts in `out`/samples.jsonl, and the summary that `out`/summary.json gets.

    The same call goes on where one was killed. `options`: the renderer's. InputError: `out` holds
    something else.
    """
    rows = read_rows(prompts, image_root=image_root, allowed=allowed(engine, prompts=True))
    rewards = Rewards(reward) if reward else None
    folder, file = Path(out), Path(out) / "samples.jsonl"
    same = {"model": model, "prompts": prompts, "rows": rows.digest, "reward": list(reward)}
    same |= {"engine": engine.engine, "processor": processor, **options, **sampling.model_dump()}
    _claim(folder, same)
    tally, count = _Tally(), min(len(rows), limit or len(rows))
    buffer = DataBuffer(prompts=count)
    buffer.skip(_whole_groups(file, sampling.n, tally))
    left = count - tally.groups
    if left <= 0 and (folder / "summary.json").exists():
        return json.loads((folder / "summary.json").read_text())
    before = tally.tokens
    with tqdm(total=count, initial=tally.groups, unit="prompt", disable=None) as bar:

        def told() -> None:
            for group in buffer.get(buffer.waiting):
                dump.append(file, group)
                tally.add([vars(sample) for sample in group])
                bar.update()

        opened = open_model(model, processor, engine, **options)
        health, seconds = generate(
            opened, rows, buffer, engine, sampling, server_args, told, rewards=rewards
        )
    summary = tally.summary() | {
        "seconds": round(seconds, 2),  # of this call alone, as the rate is
        "tokens_per_second": round((tally.tokens - before) / max(seconds, 1e-9), 1),
        "engine": engine.engine,
        "server": health.server,
        "weights": health.weights,
        "vireo": __version__,
    }
    _write(folder / "summary.json", summary)
    return summary


@dataclass
class _Tally:
    """What a summary counts, of samples as dicts."""

    groups: int = 0
    lengths: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    finishes: Counter[str] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def add(self, group: list[dict[str, Any]]) -> None:
        self.groups += 1
        for record in group:
            self.lengths.append(len(record["response_ids"]))
            self.prompt_tokens += len(record["prompt_ids"])
            self.finishes[record["finish"]] += 1
            if record["reward"] is not None:
                self.rewards.append(record["reward"])

    def summary(self) -> dict[str, Any]:
        lengths = self.lengths or [0]
        return {
            "prompts": self.groups,
            "samples": len(self.lengths),
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "finish": dict(self.finishes),
            "length": {
                "min": min(lengths),
                "mean": round(mean(lengths), 2),
                "median": median(lengths),
                "max": max(lengths),
            },
            "reward": mean(self.rewards) if self.rewards else None,
        }


def _claim(folder: Path, same: dict[str, Any]) -> None:
    """InputError: the folder holds rollouts with other settings, or something else."""
    file = folder / "settings.json"
    if file.exists():
        found = json.loads(file.read_text())
        for name, value in json.loads(json.dumps(same)).items():
            if found.get(name) != value:
                raise InputError(
                    f"{folder} holds rollouts with {name} {found.get(name)!r}, not {value!r}: "
                    "choose another --out, or the same settings to go on"
                )
    elif folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty and holds no rollouts; choose another --out")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        _write(file, same)


def _whole_groups(file: Path, n: int, tally: _Tally) -> set[int]:
    """The prompt numbers that are done; what a kill left of another group is cut off the file."""
    done: set[int] = set()
    if not file.exists():
        return done
    whole, lines = 0, list[bytes]()
    with file.open("rb+") as all_lines:
        for line in all_lines:
            lines.append(line)
            if len(lines) < n or not line.endswith(b"\n"):
                continue
            try:
                records = [json.loads(line) for line in lines]
                (number,) = {int(record["group"]) for record in records}
            except (ValueError, KeyError, TypeError) as error:
                text = f"{file}: line {len(done) * n + 1} begins no group of {n} samples"
                raise InputError(text) from error
            done.add(number)
            tally.add(records)
            whole, lines = whole + sum(map(len, lines)), []
        all_lines.truncate(whole)
    return done


def _write(file: Path, content: dict[str, Any]) -> None:
    aside = file.with_name(f".writing-{file.name}")
    aside.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(aside, file)
