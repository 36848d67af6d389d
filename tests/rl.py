"""Small runs of the trainer `grpo`: prompts, a reward that random weights can earn, and flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pil

from vireo.rollout.dump import read
from vireo.rollout.sample import Sample
from vireo.settings import load_settings
from vireo.trainers import registry


def even(sample: Sample) -> float:
    """The share of response tokens with an even id, weighed by place so that few are alike."""
    ids = sample.response_ids
    return sum((t % 2 == 0) * (1 + k / 7) for k, t in enumerate(ids)) / len(ids)


def none(sample: Sample) -> float:
    return 0.0


def write_prompts(folder: Path, images: list[int], same_text: bool = False) -> Path:
    """A row for each number, with as many pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for i, count in enumerate(images):
        names = [f"{i}-{k}.png" for k in range(count)]
        for k, name in enumerate(names):
            pixels = np.random.default_rng(100 * i + k).integers(0, 256, (56, 56, 3), np.uint8)
            Pil.fromarray(pixels).save(folder / name)
        text = "<image>" * count + ("What is it?" if same_text else f"Question {i}?")
        row: dict[str, Any] = {"id": f"p{i}", "messages": [{"role": "user", "content": text}]}
        rows.append(row | ({"images": names} if names else {}))
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def flags(model: str | Path, prompts: Path, output: Path, *more: str) -> list[str]:
    given = {
        "trainer": "grpo",
        "model_name_or_path": model,
        "prompt_data": prompts,
        "output_dir": output,
        "reward": "tests.rl:even",
        "rollout_batch_size": 3,
        "n_samples_per_prompt": 4,
        "rollout_max_response_len": 6,
        "num_rollout": 3,
        "freeze_vision": "false",
        "lr": 3e-3,
        "per_device_train_batch_size": 4,
        "report_to": "none",
        "check_steps": 0,
    }
    names = {word.partition("=")[0] for word in more}
    return [f"--{n}={v}" for n, v in given.items() if f"--{n}" not in names] + list(more)


def train(model: str | Path, prompts: Path, output: Path, *more: str) -> Path:
    settings = load_settings(flags(model, prompts, output, *more))
    assert registry.find(settings.trainer)(settings) == 0
    return output


def records(run: Path) -> list[dict[str, Any]]:
    """The records of training steps."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "reward" in record]


def evaluations(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "eval_reward" in record]


def rollouts(run: Path, step: int) -> list[Sample]:
    return read(run / "rollouts" / f"step-{step}.jsonl")


LEARNED = ("reward", "loss", "grad_norm", "response_length/mean", "mismatch/mean_abs")


def curve(run: Path, *names: str) -> list[list[float]]:
    """Of each step, the numbers that say whether two runs learned the same."""
    return [[record[name] for name in names or LEARNED[:4]] for record in records(run)]
