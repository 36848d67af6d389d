"""Every prompt of a file once, by any engine: `vireo rollout`, and what `vireo eval` shares."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
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
    told: Callable[[], None] | None = None,
    *,
    rewards: Rewards | None = None,
    at_once: int | None = None,
) -> tuple[Health, float]:
    """All groups that `buffer` still wants, with an engine opened for them. Returns its health at
    the end, and the seconds without start and end. `told` and `at_once`: see RolloutManager."""
    folder, renderer = model
    each = Sampling(**sampling.model_dump(exclude={"n"}))
    servers = len(engine.sglang_url or engine.vllm_url or [""])

    async def run() -> tuple[Health, float]:
        opened = open_engine(engine, folder, renderer)
        async with VLMRolloutEngine(opened, renderer) as rollouts:
            started = time.perf_counter()
            await RolloutManager(
                rollouts,
                buffer,
                prompts,
                each,
                sampling.n,
                at_once=at_once or -(-engine.engine_concurrency * servers // sampling.n),
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
    done, count = _whole_groups(file, sampling.n), min(len(rows), limit or len(rows))
    if len(done) >= count and (folder / "summary.json").exists():
        return json.loads((folder / "summary.json").read_text())
    buffer, tokens = DataBuffer(prompts=count), 0
    buffer.skip(done)
    with tqdm(total=count, initial=len(done), unit="prompt", disable=None) as bar:

        def told() -> None:
            nonlocal tokens
            for group in buffer.get(buffer.waiting):
                dump.append(file, group)
                tokens += sum(len(sample.response_ids) for sample in group)
                bar.update()

        opened = open_model(model, processor, engine, **options)
        health, seconds = generate(opened, rows, buffer, engine, sampling, told, rewards=rewards)
    summary = _summary(file, sampling.n) | {
        "seconds": round(seconds, 2),  # of this call alone, as the rate is
        "tokens_per_second": round(tokens / max(seconds, 1e-9), 1),
        "engine": engine.engine,
        "server": health.server,
        "weights": health.weights,
        "vireo": __version__,
    }
    _write(folder / "summary.json", summary)
    return summary


def _summary(file: Path, n: int) -> dict[str, Any]:
    prompt_tokens, lengths, rewards = 0, list[int](), list[float]()
    finishes: Counter[str] = Counter()
    with file.open(encoding="utf-8") as lines:
        for sample in map(json.loads, lines):
            prompt_tokens += len(sample["prompt_ids"])
            lengths.append(len(sample["response_ids"]))
            finishes[sample["finish"]] += 1
            rewards += [] if sample["reward"] is None else [sample["reward"]]
    spread = {"min": min(lengths), "mean": mean(lengths), "median": median(lengths)}
    return {
        "prompts": len(lengths) // n,
        "samples": len(lengths),
        "prompt_tokens": prompt_tokens,
        "tokens": sum(lengths),
        "finish": dict(finishes),
        "length": spread | {"max": max(lengths)},
        "reward": mean(rewards) if rewards else None,
    }


def _claim(folder: Path, same: dict[str, Any]) -> None:
    """InputError: the folder holds rollouts with other settings, or something else."""
    file = folder / "settings.json"
    there = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if there <= {file.name}:  # nothing was generated yet
        folder.mkdir(parents=True, exist_ok=True)
        _write(file, same)
    elif file.name not in there:
        raise InputError(f"{folder} is not empty and holds no rollouts; choose another --out")
    else:
        found = json.loads(file.read_text())
        for name, value in json.loads(json.dumps(same)).items():
            if found.get(name) != value:
                raise InputError(
                    f"{folder} holds rollouts with {name} {found.get(name)!r}, not {value!r}: "
                    "choose another --out, or the same settings to go on"
                )


def _whole_groups(file: Path, n: int) -> set[int]:
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
                (number,) = {int(json.loads(line)["group"]) for line in lines}
            except (ValueError, KeyError, TypeError) as error:
                text = f"{file}: line {len(done) * n + 1} begins no group of {n} samples"
                raise InputError(text) from error
            done.add(number)
            whole, lines = whole + sum(map(len, lines)), []
        all_lines.truncate(whole)
    return done


def _write(file: Path, content: dict[str, Any]) -> None:
    aside = file.with_name(f".writing-{file.name}")
    aside.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(aside, file)
