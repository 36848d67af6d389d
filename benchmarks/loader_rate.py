"""Rows a second that one core makes ready for training, beside TRL's collator.

    python benchmarks/loader_rate.py [--rows 96] [--batch 8] [--rounds 5] [--size 448]
        [--profile FILE]

JPEG files of `--size` pixels, one a row, with texts of log-normal length (about 508 tokens a row in
all, 256 of them the picture's), a Qwen2.5-VL processor. Timed, in one process with one thread,
from paths and turns to tensors:

vireo   decode, orientation, processor, template, labels, positions, packing to 8,192 tokens
trl     decode by `datasets`, TRL's `DataCollatorForVisionLanguageModeling`, batches of `--batch`

Rounds take turns; the median of each is printed, and how many cores' worth of `--tokens_per_s` (a
trainer's appetite) a loader needs.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vireo.data.conversation import read_rows
from vireo.data.packing import micro_batches
from vireo.data.render import Renderer

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "looks"]
BUDGET = 8192


def write_rows(folder: Path, rows: int, size: int) -> Path:
    """JPEG pictures with some structure, so that files have the sizes of photographs."""
    draw, words = np.random.default_rng(0), random.Random(0)
    out = []
    for i in range(rows):
        small = Image.fromarray(draw.integers(0, 256, (size // 8, size // 8, 3), dtype=np.uint8))
        picture = small.resize((size, size), Image.Resampling.BICUBIC)
        picture.save(folder / f"{i}.jpg", quality=90)
        count = min(900, max(8, int(draw.lognormal(3.85, 0.6))))
        answer = " ".join(words.choices(WORDS, k=count))
        out.append(
            {
                "id": str(i),
                "image": f"{i}.jpg",
                "conversations": [
                    {"from": "human", "value": "<image>\nDescribe it."},
                    {"from": "gpt", "value": answer},
                ],
            }
        )
    path = folder / "rows.json"
    path.write_text(json.dumps(out))
    return path


def vireo_side(model: str, data: Path) -> Callable[[], int]:
    renderer = Renderer(model)
    rows = read_rows(str(data))

    def run() -> int:
        examples = [renderer.example(rows[i]) for i in range(len(rows))]
        batches = micro_batches(examples, rows=8, budget=BUDGET, can_mix=True, packing=True)
        return sum(int(batch.pack()["input_ids"].numel()) for batch in batches)

    return run


def trl_side(model: str, data: Path, batch: int) -> Callable[[], int]:
    from datasets import Dataset, List
    from datasets import Image as ImageFeature
    from transformers import AutoProcessor
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    rows = json.loads(data.read_text())
    made = [
        {
            "images": [str(data.parent / row["image"])],
            "prompt": [{"role": "user", "content": "Describe it."}],
            "completion": [{"role": "assistant", "content": row["conversations"][1]["value"]}],
        }
        for row in rows
    ]
    table = Dataset.from_list(made).cast_column("images", List(ImageFeature()))
    collate = DataCollatorForVisionLanguageModeling(
        AutoProcessor.from_pretrained(model), max_length=None, completion_only_loss=True
    )

    def run() -> int:
        tokens = 0
        for start in range(0, len(rows), batch):
            picked = [table[i] for i in range(start, min(start + batch, len(rows)))]
            tokens += int(collate(picked)["attention_mask"].sum())
        return tokens

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder with a processor (default: a tiny Qwen2.5-VL's)")
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=448)
    parser.add_argument("--tokens_per_s", type=float, default=14_000)
    parser.add_argument("--profile", help="write a profile of Vireo's side")
    given = parser.parse_args()
    torch.set_num_threads(1)
    from vireo.families.tiny import build

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = given.model or str(build("qwen2_5_vl", folder / "model", size="demo"))
        data = write_rows(folder, given.rows, given.size)
        sides = {"vireo": vireo_side(model, data), "trl": trl_side(model, data, given.batch)}
        tokens = {kind: run() for kind, run in sides.items()}  # warm
        seconds: dict[str, list[float]] = {kind: [] for kind in sides}
        for _ in range(given.rounds):
            for kind, run in sides.items():
                started = time.process_time()
                run()
                seconds[kind].append(time.process_time() - started)
        if given.profile:
            with cProfile.Profile() as profile:
                sides["vireo"]()
            profile.dump_stats(given.profile)
    rates = {kind: given.rows / statistics.median(some) for kind, some in seconds.items()}
    for kind, rate in rates.items():
        per_row = tokens[kind] / given.rows
        cores = given.tokens_per_s / (rate * per_row)
        print(
            f"{kind:<6} {rate:7.1f} rows/s a core  {per_row:.0f} tokens a row  "
            f"{cores:.1f} cores for {given.tokens_per_s:,.0f} tokens/s"
        )
    print(f"vireo / trl: {rates['vireo'] / rates['trl']:.2f}")


if __name__ == "__main__":
    main()
