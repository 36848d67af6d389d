"""`vireo demo --rl`: a small vision-language model learns from rewards, in minutes on a CPU.

A model from scratch is fine-tuned on questions about drawn shapes until it is right now and then,
and goes on by GRPO with nothing but a reward for right answers.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from vireo.demo import fresh_folder, train

# Found by trial on three seeds; benchmarks/RESULTS.md has the figures.
WARM_UP = {
    "max_steps": 30,
    "per_device_train_batch_size": 32,
    "lr": 2e-3,
    "lr_scheduler": "constant",
    "warmup_ratio": 0.3,
    "adam_beta2": 0.98,
    "eval_samples": 0,
}
RECIPE = {
    "num_rollout": 160,
    "rollout_batch_size": 8,
    "n_samples_per_prompt": 8,
    "rollout_max_response_len": 5,
    "per_device_train_batch_size": 64,
    "lr": 2e-4,
    "reward": "exact_match",
    "eval_interval": 40,
}


def run(
    output_dir: str = "runs/demo-rl", seed: int = 0, num_rollout: int | None = None
) -> dict[str, Any]:
    """Run the demo and return what it writes to `output_dir`/summary.json: the mean reward of
    responses sampled at temperature 1 to held-out prompts, before and after."""
    started = time.perf_counter()
    out = fresh_folder(Path(output_dir))
    import torch

    from vireo.data.synthetic import write_shapes
    from vireo.families.tiny import build
    from vireo.training.checkpoint import checkpoints
    from vireo.training.export import export

    torch.set_num_threads(1)  # two beside another busy core run many times slower than one
    data = out / "data"
    write_shapes(data, rows=3000, seed=seed)
    build("qwen2_5_vl", out / "model", seed=seed)
    common = {
        "freeze_vision": "false",
        "packing": "false",  # rows are nearly of one length
        "fsdp_enable": "false",
        "check_steps": 0,
        "logging_steps": 10,
        "num_workers": 1,
        "seed": seed,
    }
    rows = {"trainer": "fsdp_vlm", "model_name_or_path": out / "model"}
    train(
        rows | {"train_file": data / "train.json", "output_dir": out / "warm-up"} | WARM_UP | common
    )
    half = export(checkpoints(out / "warm-up" / "checkpoints")[-1], out / "warmed-up")
    prompts = {
        "trainer": "grpo",
        "model_name_or_path": half,
        "prompt_data": data / "train.json",
        "eval_prompt_data": data / "val.json",
        "output_dir": out / "run",
    }
    recipe = RECIPE | ({"num_rollout": num_rollout} if num_rollout else {})
    train(prompts | recipe | common)
    export(checkpoints(out / "run" / "checkpoints")[-1], out / "export")
    records = map(json.loads, (out / "run" / "metrics.jsonl").read_text().splitlines())
    evaluated = [record for record in records if "eval_reward" in record]
    summary = {
        "reward_before": evaluated[0]["eval_reward"],
        "reward_after": evaluated[-1]["eval_reward"],
        "eval_samples": evaluated[-1]["eval_samples"],
        "seconds": round(time.perf_counter() - started, 1),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"\n{'':22}mean reward of {summary['eval_samples']} sampled answers, held-out prompts")
    print(f"{'after fine-tuning':22}{summary['reward_before']:8.3f}")
    print(f"{'after GRPO':22}{summary['reward_after']:8.3f}")
    print(f"\n{summary['seconds']} s in all. Run folder: {out}")
    return summary
