"""Optimizer steps of a Qwen2.5-VL-3B-shaped model with random weights, through the real trainer.

    python benchmarks/sft_step.py [--steps 8] [--rows 16] [--tokens 8192] [--layers 36]

Writes rows with one 448x448 picture each, trains with packing at a token budget, and prints the
median step: seconds, tokens/s, peak memory. Needs a CUDA device and 30 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from shapes import write_3b

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "looks"]


def write_rows(folder: Path, rows: int) -> Path:
    """Rows of about 512 tokens: 256 image tokens and as many of text."""
    draw = np.random.default_rng(0)
    out = []
    for i in range(rows):
        pixels = draw.integers(0, 256, (448, 448, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        text = " ".join(draw.choice(WORDS, 40))
        turns = [
            {"from": "human", "value": "<image>\nDescribe it."},
            {"from": "gpt", "value": text},
        ]
        out.append({"id": i, "image": f"{i}.png", "conversations": turns})
    path = folder / "rows.json"
    path.write_text(json.dumps(out))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16, help="rows of an optimizer step")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a micro-batch")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--model", help="folder of such a model, if it is written already")
    parser.add_argument("--flags", default="", help="more flags for the trainer")
    given = parser.parse_args()
    from vireo.settings import load_settings
    from vireo.trainers import registry
    from vireo.training import checkpoint

    checkpoint.save = lambda folder, *_, **__: folder  # 45 GB that nobody would read
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = time.perf_counter()
        if given.model is None:
            write_3b(folder / "model", given.layers)
            print(f"model written in {time.perf_counter() - started:.0f} s", flush=True)
        rows = write_rows(folder, given.rows * 2)
        settings = load_settings(
            [
                f"--vlm_model_name_or_path={given.model or folder / 'model'}",
                f"--train_file={rows}",
                f"--output_dir={folder / 'run'}",
                f"--max_steps={given.steps}",
                f"--global_batch_size={given.rows}",
                f"--max_tokens_per_gpu={given.tokens}",
                "--freeze_vision=false",
                "--num_workers=8",
                "--lr=1e-5",
                *given.flags.split(),
            ]
        )
        started = time.perf_counter()
        registry.find(settings.trainer)(settings)
        print(f"run of {time.perf_counter() - started:.0f} s")
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        records = [r for r in map(json.loads, lines) if "loss" in r][2:]
        seconds = statistics.median(r["seconds"] for r in records)
        tokens, peak = records[-1]["tokens"], records[-1]["memory_gb"]
        rate = tokens / seconds
        print(f"{tokens} tokens a step: {seconds:.3f} s, {rate:,.0f} tokens/s, {peak:.1f} GB")


if __name__ == "__main__":
    main()
