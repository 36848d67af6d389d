"""Is the gap between engine and trainer larger for rows with pictures than for rows without?

    python benchmarks/bf16_gap.py --model DIR --sglang_url URL [--data FILE] [--rows 160]
        [--tokens 128] [--dtype bf16] [--out bf16_gap.json]

The engine answers `--rows` rows with a picture (drawn ones, or those of `--data`) and the same rows
without it; of each pair as many tokens count as the shorter response has, so lengths match. The
trainer scores the responses of each kind in several ways. gap = mean exp|g - p| - 1 over the
tokens; the ratio (gap with pictures) / (gap without) has a bootstrap interval of 95 % over pairs of
responses, 4,000 draws (tokens of one response are not independent, so responses are drawn).

together        rows of a micro-batch packed (padded where the family cannot pack)
alone           each row by itself, as it is generated
image by image  packed, each picture through the tower in a call of its own
trainer itself  together against alone: no engine
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from noise_floor import ALONE, DTYPES, drawn, without_pictures
from torch import Tensor

from vireo.data.conversation import Conversation, read_rows
from vireo.data.render import Renderer
from vireo.models.build import whole_model
from vireo.models.policy import Policy
from vireo.models.tower import image_by_image
from vireo.rl.score import Shape, score
from vireo.rl.swaps import Pair
from vireo.rollout import VLMRolloutEngine
from vireo.rollout.open import open_engine
from vireo.rollout.sample import Sampling
from vireo.settings.rollout import EngineSettings

DRAWS = 4000


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


def compared(picture: Tensor, text: Tensor, lengths: list[int]) -> dict[str, float]:
    """Both gaps and the bootstrap of their ratio, from sums by response."""
    counts = torch.tensor(lengths, dtype=torch.float64)
    draws = torch.randint(len(counts), (DRAWS, len(counts)), generator=torch.manual_seed(0))
    ratios = picture[draws].sum(1) / text[draws].sum(1)
    low, high = ratios.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    found = {
        "picture": float(picture.sum() / counts.sum()),
        "text": float(text.sum() / counts.sum()),
    }
    ratio = found["picture"] / found["text"] if found["text"] else float("nan")
    return found | {"ratio": ratio, "low": low, "high": high}


def measure(given: argparse.Namespace) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = Renderer(given.model)
    seen = drawn(given.rows, given.size)
    if given.data:
        file = read_rows(given.data)
        seen = [row for row in map(file.__getitem__, range(len(file))) if row.images]
        seen = seen[: given.rows]
    kinds = {"picture": seen, "text": [without_pictures(row) for row in seen]}
    settings = EngineSettings(
        engine="sglang", sglang_url=[given.sglang_url], engine_concurrency=1024
    )
    started = time.perf_counter()
    pairs = {
        kind: asyncio.run(answered(made, settings, given.model, rows, given.tokens))
        for kind, rows in kinds.items()
    }
    generated = time.perf_counter() - started
    both = zip(pairs["picture"], pairs["text"])
    lengths = [min(len(a.response_ids), len(b.response_ids)) for (_, a), (_, b) in both]
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
        "responses": len(lengths),
        "tokens_of_each_kind": sum(lengths),
        "generated_s": round(generated, 1),
        "ways": {},
    }
    for name, found in scores.items():
        parts = (sums(engine[kind], found[kind], lengths) for kind in kinds)
        picture, text = parts
        result["ways"][name] = compared(picture, text, lengths)
        result["ways"][name]["by_response"] = {"picture": picture.tolist(), "text": text.tolist()}
    own = (sums(scores["together"][k], scores["alone"][k], lengths) for k in kinds)
    result["ways"]["trainer itself"] = compared(*own, lengths)
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
    for name, found in result["ways"].items():
        print(
            f"{name:<15} picture {found['picture']:.2e}  text {found['text']:.2e}  "
            f"ratio {found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
        )
    Path(given.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
