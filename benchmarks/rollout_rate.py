"""Rollouts through Vireo beside a bare HTTP client that sends the same requests.

    python benchmarks/rollout_rate.py [--prompts 128] [--tokens 256] [--rounds 3] [--model DIR]
        [--sglang_url URL] [--sglang-NAME VALUE ...]

One 448x448 picture a prompt, on a Qwen2.5-VL-3B-shaped model with random weights (or `--model`).
Bare client and Vireo take turns; both send every request at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pil
from shapes import write_3b


def rows(count: int, size: int) -> list[Any]:
    from vireo.data.conversation import Conversation, Image, ImageRef, Text, Turn

    draw = np.random.default_rng(0)
    made = []
    for i in range(count):
        picture = Pil.fromarray(draw.integers(0, 256, (size, size, 3), dtype=np.uint8))
        turn = Turn("user", (Image(0), Text("Describe it.")))
        made.append(Conversation((turn,), (ImageRef(picture),), id=str(i), where=f"row {i}"))
    return made


async def bare(url: str, key: str | None, bodies: list[dict]) -> tuple[float, int]:
    """Seconds and tokens of a client that only posts and reads."""
    import aiohttp

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(600)
    async with aiohttp.ClientSession(connector=connector, timeout=limit, headers=headers) as http:

        async def post(body: dict) -> int:
            async with http.post(f"{url}/generate", json=body) as answer:
                return (await answer.json())["meta_info"]["completion_tokens"]

        started = time.perf_counter()
        tokens = sum(await asyncio.gather(*map(post, bodies)))
        return time.perf_counter() - started, tokens


async def measure(given: argparse.Namespace, server_args: dict[str, str], folder: str) -> dict:
    from vireo.data.render import Renderer
    from vireo.rollout import VLMRolloutEngine
    from vireo.rollout.open import open_engine
    from vireo.rollout.protocol import generate_body
    from vireo.rollout.sample import Request, Sampling
    from vireo.settings.rollout import EngineSettings

    renderer = Renderer(folder)
    started = time.perf_counter()
    prompts = [renderer.rollout(row) for row in rows(given.prompts, given.size)]
    for prompt in prompts:
        assert prompt.pngs
    rendering = time.perf_counter() - started
    urls = [given.sglang_url] if given.sglang_url else None
    settings = EngineSettings(
        engine="sglang", sglang_url=urls, engine_concurrency=1024, server_args=server_args
    )
    if urls:
        await answering(urls[0])
    engine = open_engine(settings, folder, renderer)
    sampling = Sampling(max_new_tokens=given.tokens, seed=0)
    started = time.perf_counter()
    async with VLMRolloutEngine(engine, renderer) as rollouts:
        starting = time.perf_counter() - started
        http = engine.http
        stops = () if given.ignore_eos else renderer.stop_ids

        def bodies() -> list[dict]:
            made = [Request(p, sampling, stops, renderer.banned_ids) for p in prompts]
            bodies = [generate_body(r, "ids") for r in made]
            return [b | {"image_data": json.loads(b["image_data"])} for b in bodies]

        async def vireo(round_: int) -> tuple[float, int, list]:
            started = time.perf_counter()
            groups = await asyncio.gather(
                *(
                    rollouts.samples(p, sampling, group=f"{round_}-{i}")
                    for i, p in enumerate(prompts)
                )
            )
            seconds = time.perf_counter() - started
            samples = [sample for group in groups for sample in group]
            return seconds, sum(len(s.response_ids) for s in samples), samples

        await bare(http.url, http._api_key, bodies()[:8])  # kernels and graphs are made
        rates: dict[str, list[float]] = {"bare": [], "vireo": []}
        for round_ in range(given.rounds):
            await flush(rollouts)
            seconds, tokens = await bare(http.url, http._api_key, bodies())
            rates["bare"].append(tokens / seconds)
            await flush(rollouts)
            seconds, tokens, samples = await vireo(round_)
            rates["vireo"].append(tokens / seconds)
            print(f"round {round_}: bare {rates['bare'][-1]:,.0f} tokens/s, Vireo ", end="")
            print(f"{rates['vireo'][-1]:,.0f} ({tokens} tokens)", flush=True)
        result = {
            "server": (await engine.health()).server,
            "start_s": round(starting, 1),
            "render_s_per_prompt": round(rendering / len(prompts), 4),
            "bare_tokens_s": round(statistics.median(rates["bare"])),
            "vireo_tokens_s": round(statistics.median(rates["vireo"])),
        }
        result["share"] = round(result["vireo_tokens_s"] / result["bare_tokens_s"], 4)
        result["prompt_tokens"] = len(prompts[0].expanded)
        print(json.dumps(result, indent=1), flush=True)
    Path(given.out).write_text(json.dumps(result, indent=1))
    return {"samples": samples, "prompts": prompts, "renderer": renderer}


async def answering(url: str) -> None:
    """Until a server that is being started answers."""
    import aiohttp

    async with aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.get(f"{url}/model_info"):
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.5)


async def flush(rollouts: Any) -> None:
    """No prefix that an earlier round left behind."""
    from vireo.rollout.protocol import FLUSH

    await rollouts.engine.http.post(f"{FLUSH}?timeout=5", {}, control=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=int, default=448)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--model", help="default: one is written")
    parser.add_argument("--sglang_url")
    parser.add_argument("--ignore_eos", action="store_true")
    parser.add_argument("--out", default="rollout_rate.json")
    given, rest = parser.parse_known_args()
    server_args = dict(zip((word[2:].replace("_", "-") for word in rest[::2]), rest[1::2]))
    with tempfile.TemporaryDirectory() as name:
        folder = given.model or f"{name}/model"
        if given.model is None:
            started = time.perf_counter()
            write_3b(Path(folder), given.layers)
            print(f"model written in {time.perf_counter() - started:.0f} s", flush=True)
        asyncio.run(measure(given, server_args, folder))


if __name__ == "__main__":
    sys.exit(main())
