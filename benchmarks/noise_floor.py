"""How far a model is from itself: the same tokens in two shapes of micro-batch.

    python benchmarks/noise_floor.py [--model DIR] [--data FILE] [--dtype bf16] [--rows 8]
        [--tokens 64] [--size 448] [--out noise_floor.json]

Rows are `--rows` of the data file that have pictures (default: drawn ones of `--size` pixels), and
the same rows without their pictures; responses are sampled from the model. Without `--model`, a
Qwen2.5-VL-3B-shaped one with random weights is written (on a GPU).

log-probs     of the response tokens: mean and largest |difference|, mult = mean of exp|difference|
              packed/padded: rows together against each by itself; eager: attention by plain matrix
              products; fp32: in the other number format
embeddings    ||together - alone|| / ||alone|| of what the tower makes of each picture, largest
image by image  the same with every picture through the tower in a call of its own
seconds       of the tower over all pictures, median of `--repeats`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Pil

from vireo.data.conversation import Conversation, Image, ImageRef, Text, Turn, read_rows
from vireo.data.ragged import Batch
from vireo.data.render import Renderer
from vireo.models.build import whole_model
from vireo.models.policy import Policy
from vireo.models.tower import image_by_image
from vireo.rl.mismatch import Mismatch
from vireo.rl.score import Shape, score_examples
from vireo.rl.swaps import Pair, Trainer, attention, in_format
from vireo.rollout.bridge import VLMRolloutEngine
from vireo.rollout.embedded import EmbeddedEngine
from vireo.rollout.sample import Sampling

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ALONE = Shape(rows=1, packing=False)


def drawn(count: int, size: int) -> list[Conversation]:
    """Questions about pictures with shapes at every scale."""
    rows = []
    for i in range(count):
        draw = np.random.default_rng(i)
        coarse = Pil.fromarray(draw.integers(0, 256, (size // 28, size // 28, 3), dtype=np.uint8))
        turn = Turn("user", (Image(0), Text(f"Describe picture {i}.")))
        picture = coarse.resize((size, size), Pil.Resampling.BICUBIC)
        rows.append(Conversation((turn,), (ImageRef(picture),), where=f"drawn {i}"))
    return rows


def without_pictures(row: Conversation) -> Conversation:
    turns = tuple(
        replace(turn, parts=tuple(part for part in turn.parts if isinstance(part, Text)))
        for turn in row.turns
    )
    return replace(row, turns=turns, images=())


def sampled(policy: Policy, made: Renderer, rows: list[Conversation], tokens: int) -> list[Pair]:
    device = next(policy.parameters()).device

    async def run() -> list[Pair]:
        engine = EmbeddedEngine(policy, made, device)
        async with VLMRolloutEngine(engine, made) as rollouts:
            prompts = [made.rollout(row) for row in rows]
            sampling = Sampling(tokens, seed=0)
            groups = await asyncio.gather(
                *(rollouts.samples(p, sampling, group=str(i)) for i, p in enumerate(prompts))
            )
        return [(prompt, group[0]) for prompt, group in zip(prompts, groups)]

    return asyncio.run(run())


def noise(trainer: Trainer, pairs: list[Pair], by_image: bool) -> dict[str, dict[str, float]]:
    """What each way to score changes, beside each row by itself with the policy's own attention."""
    policy, pad = trainer.policy, trainer.renderer.pad_id
    rows = [trainer.row(pair) for pair in pairs]

    def score(shape: Shape) -> list[torch.Tensor]:
        with image_by_image(policy) if by_image else nullcontext():
            return score_examples(policy, rows, pad, shape)

    alone = score(ALONE)
    found = {"padded": score(Shape(len(rows), packing=False))}
    if policy.family.can_pack:
        found["packed"] = score(Shape(len(rows)))
    if not by_image:
        with attention(policy, "eager"):
            found["eager"] = score(ALONE)
        own = next(policy.parameters()).dtype
        with in_format(policy, torch.float32 if own == torch.bfloat16 else torch.bfloat16):
            found["other format"] = score(ALONE)
    out = {}
    for name, logprobs in found.items():
        gap = Mismatch.of([one.tolist() for one in logprobs], alone, [False] * len(rows)).figures()
        out[name] = {n: gap[n] for n in ("mean_abs", "max_abs", "token_mult_prob_error")}
    return out


@torch.no_grad()
def tower(policy: Policy, pairs: list[Pair], repeats: int) -> dict[str, float]:
    """Embeddings of each picture together and alone, and what each way costs."""
    family, device = policy.family, next(policy.parameters()).device
    batch = Batch.of([prompt.example for prompt, _ in pairs]).to(device).pack()
    names = [n for n, key in family.keys.items() if key.kind == "packed" and n in batch]
    given = {n: batch[n] for n in names}
    get = policy.hf.model.get_image_features
    together = [one.float() for one in get(**given).pooler_output]
    with image_by_image(policy):
        alone = [one.float() for one in policy.hf.model.get_image_features(**given).pooler_output]
    apart = max(float((a - b).norm() / b.norm()) for a, b in zip(together, alone))

    def seconds(call: Any) -> float:
        times = []
        for _ in range(repeats + 1):
            if device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])

    joined = seconds(lambda: get(**given))
    with image_by_image(policy):
        parted = seconds(lambda: policy.hf.model.get_image_features(**given))
    pictures, patches = len(alone), len(given["pixel_values"])
    return {
        "pictures": pictures,
        "patches": patches,
        "embeddings_apart": apart,
        "seconds_together": joined,
        "seconds_image_by_image": parted,
    }


def measure(given: argparse.Namespace, folder: str) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = Renderer(folder)
    hf = whole_model(made.config, made.family, folder, DTYPES[given.dtype]).to(device)
    dummy = made.dummy() if made.family.can_mix else None
    policy = Policy(hf, made.family, dummy).eval()
    seen = drawn(given.rows, given.size)
    if given.data:
        file = read_rows(given.data)
        seen = [row for row in map(file.__getitem__, range(len(file))) if row.images]
        seen = seen[: given.rows]
    kinds = {"text": [without_pictures(row) for row in seen], "image": seen}
    trainer = Trainer(policy, made)
    result: dict[str, Any] = {"model": folder, "dtype": given.dtype, "device": device}
    result |= {"torch": torch.__version__, "log-probs": {}}
    for kind, rows in kinds.items():
        pairs = sampled(policy, made, rows, given.tokens)
        result[f"{kind}_tokens"] = sum(len(s.response_ids) for _, s in pairs)
        result["log-probs"][kind] = noise(trainer, pairs, by_image=False)
    result["log-probs"]["image, image by image"] = noise(trainer, pairs, by_image=True)
    return result | {"tower": tower(policy, pairs, given.repeats)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--data")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--size", type=int, default=448)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", help="JSON file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = given.model or f"{name}/model"
        if given.model is None:
            from shapes import write_3b

            write_3b(Path(folder))
        result = measure(given, folder)
    for kind, ways in result["log-probs"].items():
        for way, figures in ways.items():
            mult = figures["token_mult_prob_error"] - 1
            print(
                f"{kind:<22} {way:<13} mean {figures['mean_abs']:.2e}  max {figures['max_abs']:.2e}"
                f"  mult - 1 {mult:.2e}"
            )
    print(json.dumps(result["tower"]))
    if given.out:
        Path(given.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
