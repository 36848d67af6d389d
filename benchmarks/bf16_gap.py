"""Is the gap between engine and trainer larger for rows with pictures than for rows without?

    python benchmarks/bf16_gap.py --model DIR --sglang_url URL [--data FILE] [--rows 160]
        [--tokens 128] [--dtype bf16] [--out bf16_gap.json]

The engine answers `--rows` rows with a picture (drawn ones, or those of `--data`), the same rows
without it, and these with as many words more as make prompts as long as those with pictures. Of
the responses to a row as many tokens count as the shortest has, so lengths match. The trainer
scores the responses of each kind in several ways. gap = mean exp|g - p| - 1 over the tokens; the
ratios (gap with pictures) / (gap without) and / (gap of long text) have bootstrap intervals of
95 % over responses, 4,000 draws (tokens of one response are not independent, so responses are
drawn).

together        rows of a micro-batch packed (padded where the family cannot pack)
alone           each row by itself, as it is generated
image by image  packed, each picture through the tower in a call of its own
trainer itself  together against alone: no engine
other format    together against the same in float32 (or bfloat16): the trainer's noise floor
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from bisect import bisect_right
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from noise_floor import ALONE, DTYPES, drawn, without_pictures
from torch import Tensor

from vireo.data.conversation import Conversation, Text, read_rows
from vireo.data.render import Renderer
from vireo.models.build import whole_model
from vireo.models.policy import Policy
from vireo.models.tower import image_by_image
from vireo.rl.score import Shape, score
from vireo.rl.swaps import Pair, in_format
from vireo.rollout import VLMRolloutEngine
from vireo.rollout.open import open_engine
from vireo.rollout.sample import Sampling
from vireo.settings.rollout import EngineSettings

DRAWS = 4000
WORDS = (
    *("the", "a", "cat", "dog", "runs", "over", "red", "blue", "large"),
    *("small", "house", "tree", "and", "then", "it", "was", "near"),
)


async def answered(
    made: Renderer, settings: EngineSettings, folder: str, rows: list[Conversation], tokens: int
) -> list[Pair]:
    """A response to each row, all asked for at once."""
    sampling = Sampling(tokens, seed=0)
    async with VLMRolloutEngine(open_engine(settings, folder, made), made) as rollouts:
        prompts = [made.rollout(row) for row in rows]
        asked = (rollouts.samples(p, sampling, group=str(i)) for i, p in enumerate(prompts))
        return [(prompt, group[0]) for prompt, group in zip(prompts, await asyncio.gather(*asked))]


def sums(one: list[Tensor], other: list[Tensor], lengths: list[int]) -> Tensor:
    """Sum of exp|difference| - 1 over the first tokens of each response: float64 [responses]."""
    pairs = zip(one, other, lengths)
    return torch.stack([(a[:n].double() - b[:n].double()).abs().expm1().sum() for a, b, n in pairs])


def as_long(row: Conversation, made: Renderer, tokens: int) -> Conversation:
    """The text row with words before its question, for a prompt of about `tokens` tokens."""

    def longer(words: int) -> Conversation:
        draw = random.Random(row.where)
        text = "".join(f"{draw.choice(WORDS)} " for _ in range(words))
        first, *rest = row.turns
        return replace(row, turns=(replace(first, parts=(Text(text), *first.parts)), *rest))

    sizes = range(tokens + 1)  # a word is a token or more
    place = bisect_right(sizes, tokens, key=lambda n: len(made.rollout(longer(n)).example))
    return longer(max(0, place - 1))


def compared(sums: dict[str, Tensor], lengths: list[int]) -> dict[str, Any]:
    """Gaps of each kind and bootstraps of their ratios, from sums by response."""
    counts = torch.tensor(lengths, dtype=torch.float64)
    draws = torch.randint(len(counts), (DRAWS, len(counts)), generator=torch.manual_seed(0))
    found: dict[str, Any] = {k: float(one.sum() / counts.sum()) for k, one in sums.items()}
    for kind in ("text", "long text"):
        ratios = sums["picture"][draws].sum(1) / sums[kind][draws].sum(1)
        low, high = ratios.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        ratio = found["picture"] / found[kind] if found[kind] else float("nan")
        found[f"to {kind}"] = {"ratio": ratio, "low": low, "high": high}
    return found


def measure(given: argparse.Namespace) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = Renderer(given.model)
    seen = drawn(given.rows, given.size)
    if given.data:
        file = read_rows(given.data)
        seen = [row for row in map(file.__getitem__, range(len(file))) if row.images]
        seen = seen[: given.rows]
    text = [without_pictures(row) for row in seen]
    long = [as_long(short, made, len(made.rollout(row).example)) for row, short in zip(seen, text)]
    kinds = {"picture": seen, "text": text, "long text": long}
    settings = EngineSettings(
        engine="sglang", sglang_url=[given.sglang_url], engine_concurrency=1024
    )
    started = time.perf_counter()
    pairs = {
        kind: asyncio.run(answered(made, settings, given.model, rows, given.tokens))
        for kind, rows in kinds.items()
    }
    generated = time.perf_counter() - started
    lengths = [min(len(s.response_ids) for _, s in row) for row in zip(*pairs.values())]
    hf = whole_model(made.config, made.family, given.model, DTYPES[given.dtype]).to(device)
    policy = Policy(hf, made.family, made.dummy() if made.family.can_mix else None).eval()
    engine = {k: [torch.tensor(s.logprobs) for _, s in some] for k, some in pairs.items()}
    ways = {"together": (Shape(), nullcontext()), "alone": (ALONE, nullcontext())}
    if made.family.grid is not None:
        ways["image by image"] = (Shape(), image_by_image(policy))
    scores: dict[str, dict[str, list[Tensor]]] = {}
    for name, (shape, around) in ways.items():
        with around:
            scores[name] = {k: score(policy, made, some, shape) for k, some in pairs.items()}
    result: dict = {
        "model": given.model,
        "dtype": given.dtype,
        "torch": torch.__version__,
        "prompt_tokens": {
            kind: sum(len(prompt.example) for prompt, _ in some) / len(some)
            for kind, some in pairs.items()
        },
        "responses": len(lengths),
        "tokens_of_each_kind": sum(lengths),
        "generated_s": round(generated, 1),
        "ways": {},
    }
    for name, found in scores.items():
        parts = {kind: sums(engine[kind], found[kind], lengths) for kind in kinds}
        result["ways"][name] = compared(parts, lengths)
        result["ways"][name]["by_response"] = {k: one.tolist() for k, one in parts.items()}
    own = {k: sums(scores["together"][k], scores["alone"][k], lengths) for k in kinds}
    result["ways"]["trainer itself"] = compared(own, lengths)
    dtype = torch.float32 if given.dtype == "bf16" else torch.bfloat16
    with in_format(policy, dtype):
        other = {k: score(policy, made, some) for k, some in pairs.items()}
    floor = {k: sums(scores["together"][k], other[k], lengths) for k in kinds}
    result["ways"]["other format"] = compared(floor, lengths)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--sglang_url", required=True)
    parser.add_argument("--data")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--size", type=int, default=448)
    parser.add_argument("--out", default="bf16_gap.json")
    given = parser.parse_args()
    result = measure(given)
    print(f"{result['responses']} responses, {result['tokens_of_each_kind']} tokens of each kind")
    print("tokens of a prompt:", {k: round(n, 1) for k, n in result["prompt_tokens"].items()})
    for name, found in result["ways"].items():
        gaps = "  ".join(f"{kind} {found[kind]:.2e}" for kind in result["prompt_tokens"])
        ratios = "  ".join(
            f"{kind} {one['ratio']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"
            for kind, one in found.items()
            if kind.startswith("to ")
        )
        print(f"{name:<15} {gaps}  {ratios}")
    Path(given.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
