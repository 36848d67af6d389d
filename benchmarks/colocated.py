"""GRPO where trainer and a stock SGLang server take turns on one GPU: what a step's time goes to.

    python -m benchmarks.colocated [--steps 5] [--prompts 64] [--samples 8] [--response 512]
        [--model DIR] [--flags "--sglang-attention-backend=fa3 ..."] [--out colocated.json]

A Qwen2.5-VL-3B-shaped model with random weights (`--model` takes another) answers a question about
a 448x448 picture; the reward is the share of even tokens. Printed for each step: seconds of each
phase, memory in use on the GPU (by all processes) while generating, while both sleep and while
training, and the engine's log-probs against the trainer's. Needs a CUDA device and SGLang.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

PHASES = ("generate", "swap", "prepare", "logprobs", "update", "weights")
MEMORY = ("generate", "asleep", "engine_asleep", "train")


def even(sample: Any) -> float:
    """The reward: the share of even tokens."""
    return sum(token % 2 == 0 for token in sample.response_ids) / len(sample.response_ids)


def write_prompts(folder: Path, rows: int, size: int) -> Path:
    draw = np.random.default_rng(0)
    folder.mkdir(parents=True)
    lines = []
    for i in range(rows):
        pixels = draw.integers(0, 256, (size, size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        question = f"<image>\nWhat is in picture {i}?"
        lines.append(json.dumps({"prompt": question, "images": [f"{i}.png"], "label": "none"}))
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def table(records: list[dict[str, float]]) -> str:
    head = ["step", *PHASES, "other", "seconds", "both", *(f"{m} GB" for m in MEMORY), "mult - 1"]
    rows = [head]
    for record in records:
        spent = [record.get(f"seconds/{phase}", 0.0) for phase in PHASES]
        total = record["seconds"]
        both = total - spent[PHASES.index("swap")] - spent[PHASES.index("weights")]
        both -= max(0.0, total - sum(spent))
        rows.append(
            [
                f"{record['step']:.0f}",
                *(f"{value:.2f}" for value in [*spent, total - sum(spent), total]),
                f"{both / total:.1%}",
                *(f"{record.get(f'device_gb/{name}', 0.0):.1f}" for name in MEMORY),
                f"{record['mismatch/token_mult_prob_error'] - 1:.2e}",
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths)) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=64, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=8, help="responses to each")
    parser.add_argument("--response", type=int, default=512, help="tokens of a response")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a micro-batch")
    parser.add_argument("--size", type=int, default=448, help="of a picture's side")
    parser.add_argument("--engine", default="sglang")
    parser.add_argument("--model")
    parser.add_argument("--flags", default="", help="more flags for the trainer")
    parser.add_argument("--out", default="colocated.json")
    given = parser.parse_args()
    from benchmarks.shapes import write_3b
    from vireo.settings import load_settings
    from vireo.trainers import registry
    from vireo.training import checkpoint

    checkpoint.save = lambda folder, *_, **__: folder  # 45 GB that nobody would read
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.model is None:
            write_3b(folder / "model")
        prompts = write_prompts(folder / "prompts", given.prompts * 2, given.size)
        settings = load_settings(
            [
                "--trainer=grpo",
                "--colocate",
                f"--engine={given.engine}",
                f"--model_name_or_path={given.model or folder / 'model'}",
                f"--prompt_data={prompts}",
                f"--output_dir={folder / 'run'}",
                "--reward=benchmarks.colocated:even",
                f"--num_rollout={given.steps}",
                f"--rollout_batch_size={given.prompts}",
                f"--n_samples_per_prompt={given.samples}",
                f"--rollout_max_response_len={given.response}",
                f"--max_tokens_per_gpu={given.tokens}",
                "--check_steps=0",
                "--lr=1e-6",
                *given.flags.split(),
            ]
        )
        code = registry.find(settings.trainer)(settings)
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "reward" in record]
    print(table(records))
    Path(given.out).write_text(json.dumps(records, indent=1) + "\n")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
