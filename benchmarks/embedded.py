"""The embedded engine beside `model.generate` of transformers, the same rows, in turns.

    python benchmarks/embedded.py [--rows 32] [--tokens 64] [--rounds 7] [--family qwen2_5_vl]
        [--size demo]

A tiny model with random weights; one 112x112 picture a row and texts of several lengths. Cases:

even    every response has `--tokens` tokens
uneven  that of row i of n has (i + 1) / n of twice as many: `generate` computes all rows to the
        last step, the engine lets those go that have ended

Each greedy and sampled at temperature 1. The engine's time is that of its callers, from requests to
answers with log-probabilities; `generate` begins at the examples, and returns ids alone. On a CPU
it is the processor time of this process, to which other work on the machine adds little.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image as Pil
from transformers import GenerationConfig

from vireo.data.conversation import Conversation, Image, ImageRef, Text, Turn
from vireo.data.ragged import TRAINER_KEYS, Batch
from vireo.data.render import Renderer
from vireo.families.tiny import build
from vireo.rollout.embedded import EmbeddedEngine
from vireo.rollout.sample import Request, Sampling


def rows(count: int) -> list[Conversation]:
    draw = np.random.default_rng(0)
    made = []
    for i in range(count):
        picture = Pil.fromarray(draw.integers(0, 256, (112, 112, 3), dtype=np.uint8))
        parts = (Image(0), Text("What is it? " * (1 + i % 4)))
        made.append(Conversation((Turn("user", parts),), (ImageRef(picture),)))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--family", default="qwen2_5_vl")
    parser.add_argument("--size", default="demo")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = str(build(args.family, Path(name) / "model", size=args.size))
        renderer = Renderer(folder)
        engine = EmbeddedEngine.of_folder(folder, renderer, max_rows=args.rows)
        prompts = [renderer.rollout(row) for row in rows(args.rows)]
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        threads = torch.get_num_threads()
        print(f"{args.family} ({args.size}), {engine.device}, {threads} threads, {versions}")
        print(f"{args.rows} rows, medians (and least) of {args.rounds} rounds in turns, seconds")
        for case in ("even", "uneven"):
            share = [2 * (i + 1) / args.rows if case == "uneven" else 1 for i in range(args.rows)]
            most = [max(1, round(args.tokens * part)) for part in share]
            for temperature in (0.0, 1.0):
                requests = [
                    Request(prompt, Sampling(n, temperature, seed=i), (), renderer.banned_ids)
                    for i, (prompt, n) in enumerate(zip(prompts, most))
                ]
                times = asyncio.run(measure(engine, renderer, requests, args.rounds))
                ours, theirs = (statistics.median(each) for each in times)
                kind = "greedy" if temperature == 0 else "sampled"
                print(
                    f"{case:<7} {kind:<8} engine {ours:.3f} ({min(times[0]):.3f})  generate "
                    f"{theirs:.3f} ({min(times[1]):.3f})  engine / generate {ours / theirs:.2f}"
                )


async def measure(
    engine: EmbeddedEngine, renderer: Renderer, requests: list[Request], rounds: int
) -> tuple[list[float], list[float]]:
    sampling = requests[0].sampling
    longest = max(request.sampling.max_new_tokens for request in requests)
    options = GenerationConfig(
        do_sample=sampling.temperature > 0,
        top_k=0,
        max_new_tokens=longest,
        min_new_tokens=longest,
        pad_token_id=renderer.pad_id,
        suppress_tokens=list(renderer.banned_ids),
    )

    def generate() -> int:
        batch = Batch.of([request.prompt.example for request in requests])
        inputs = batch.to(engine.device).pad(renderer.pad_id, left=True)
        inputs = {n: v for n, v in inputs.items() if n not in TRAINER_KEYS}
        ids = engine.policy.generate(**inputs, generation_config=options)
        return ids.shape[1] - inputs["input_ids"].shape[1]

    clock = time.process_time if engine.device.type == "cpu" else time.perf_counter
    ours, theirs = [], []
    async with engine:
        for round_ in range(rounds + 1):
            start = clock()
            got = await asyncio.gather(*(engine.generate(request) for request in requests))
            middle = clock()
            assert await asyncio.to_thread(generate) == longest
            end = clock()
            wanted = [request.sampling.max_new_tokens for request in requests]
            assert [len(one.ids) for one in got] == wanted
            if round_:  # the first one warms both up
                ours.append(middle - start)
                theirs.append(end - middle)
    return ours, theirs


if __name__ == "__main__":
    main()
