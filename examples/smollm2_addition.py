"""A real pretrained language model learns to add by rewards alone.

    python examples/smollm2_addition.py [--out DIR] [--seed N] [--model DIR|NAME|FILE.gguf]
        [--FLAG VALUE of `vireo train` ...]

SmolLM2-135M-Instruct is asked for sums of two digits; the reward is 1 where the last integer of its
answer is right. No fine-tuning before. A third of the sums, 3 + 4 with 4 + 3, is held out: asked in
8 ways, 4 answers each at temperature 1, before, during and after. More flags go to `vireo train`:
with `--engine sglang` the run starts a stock SGLang server and rolls out with it, with `--engine
sglang --sglang_url URL` it takes one that is there.

On one H200 with a stock SGLang 0.5.17 server (seeds 0 and 1 side by side, beside three other runs):
held-out reward from 0.156 and 0.161 to 0.994 and 0.973, in 111 s each. docs/grpo.md has the curves.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

from smollm2 import model_folder

WORDS = (
    "What is {} + {}?",
    "{} + {} = ?",
    "Add {} and {}.",
    "What is the sum of {} and {}?",
    "Calculate {} plus {}.",
    "How much is {} + {}?",
    "I have {} apples and get {} more. How many do I have?",
    "There are {} cats and {} dogs. How many animals are there?",
)
RECIPE = {
    "num_rollout": 40,
    "rollout_batch_size": 32,
    "n_samples_per_prompt": 8,
    "rollout_max_response_len": 32,
    "max_tokens_per_gpu": 16384,
    "lr": 3e-5,
    "eval_interval": 10,
    "n_samples_per_eval_prompt": 4,
}


def write_sums(folder: Path, seed: int) -> None:
    """train.jsonl (the sums of 37 pairs of digits) and held.jsonl (of the other 18)."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(a, b) for a in range(10) for b in range(a, 10)]
    random.Random(seed).shuffle(pairs)
    for name, some in (("held", pairs[:18]), ("train", pairs[18:])):
        both = sorted({p for a, b in some for p in ((a, b), (b, a))})
        rows = [
            {"prompt": words.format(a, b), "label": str(a + b)} for a, b in both for words in WORDS
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2-addition"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model")
    given, more = parser.parse_known_args()
    started, out = time.perf_counter(), given.out
    write_sums(out / "data", given.seed)
    settings = RECIPE | {
        "model_name_or_path": model_folder(given.model, out / "model"),
        "prompt_data": out / "data" / "train.jsonl",
        "eval_prompt_data": out / "data" / "held.jsonl",
        "reward": "last_integer",
        "seed": given.seed,
        "output_dir": out / f"run-{given.seed}",
    }
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    subprocess.run(
        [sys.executable, "-m", "vireo", "train", "--trainer", "grpo", *flags, *more], check=True
    )
    lines = (out / f"run-{given.seed}" / "metrics.jsonl").read_text().splitlines()
    held = [record for record in map(json.loads, lines) if "eval_reward" in record]
    print(f"\nheld-out sums, reward of {held[0]['eval_samples']:.0f} answers at temperature 1:")
    for record in held:
        print(f"  after {record['step']:3} steps  {record['eval_reward']:.3f}")
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
