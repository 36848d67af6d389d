"""Rows a second that one core makes ready for training, beside TRL's collator.

    python benchmarks/loader_rate.py [--rows 96] [--batch 8] [--rounds 5] [--size 448]
        [--profile FILE]

JPEG files of `--size` pixels, one a row, with texts of log-normal length (about 508 tokens a row in
all, 256 of them the picture's), a Qwen2.5-VL processor. Timed, in one process with one thread,
from paths and turns to tensors:

vireo   decode, orientation, processor, template, labels, positions, packing to 8,192 tokens
trl     decode by `datasets`, TRL's `DataCollatorForVisionLanguageModeling`, batches of `--batch`

Each runs in a process of its own; the median of its rounds is printed, and how many cores' worth of
`--tokens_per_s` (a trainer's appetite) a loader needs.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vireo.data.conversation import read_rows
from vireo.data.heap import keep_heap
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


def vireo_side(model: str, data: Path, batch: int) -> Callable[[], int]:
    keep_heap()  # as in a loader's processes
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


SIDES = {"vireo": vireo_side, "trl": trl_side}


def timed(given: argparse.Namespace, side: str, folder: Path) -> None:
    """In a process of its own: prints rows a second of processor time, and tokens a row."""
    torch.set_num_threads(1)
    run = SIDES[side](given.model or str(folder / "model"), folder / "rows.json", given.batch)
    tokens, seconds = run(), []
    for _ in range(given.rounds):
        started = time.process_time()
        run()
        seconds.append(time.process_time() - started)
    if given.profile and side == "vireo":
        with cProfile.Profile() as profile:
            run()
        profile.dump_stats(given.profile)
    print(json.dumps([given.rows / statistics.median(seconds), tokens / given.rows]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder with a processor (default: a tiny Qwen2.5-VL's)")
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=448)
    parser.add_argument("--tokens_per_s", type=float, default=14_000)
    parser.add_argument("--profile", help="write a profile of Vireo's side")
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        timed(given, given.side[0], Path(given.side[1]))
        return
    rates = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.model is None:
            from vireo.families.tiny import build

            build("qwen2_5_vl", folder / "model", size="demo")
        write_rows(folder, given.rows, given.size)
        for side in SIDES:
            command = [sys.executable, *sys.argv, "--side", side, name]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            rates[side], tokens = json.loads(out.splitlines()[-1])
            cores = given.tokens_per_s / (rates[side] * tokens)
            print(
                f"{side:<6} {rates[side]:7.1f} rows/s a core  {tokens:.0f} tokens a row  "
                f"{cores:.2f} cores for {given.tokens_per_s:,.0f} tokens/s"
            )
    print(f"vireo / trl: {rates['vireo'] / rates['trl']:.2f}")


if __name__ == "__main__":
    main()
