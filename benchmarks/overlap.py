"""Does generation overlap training where it may run ahead?

    python -m benchmarks.overlap [--delay 2.0] [--steps 8]

A tiny model, whose own work is short, and two planted delays of the same length: a reward that
takes it, so that generating a rollout does, and a trainer that takes it before its update. In step
(`--max_staleness 0`) a step takes both; one ahead it should take little more than the longer one.
The figure is the median of the seconds of steps (but the first two) one ahead, over the longer part
of a step in step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

DELAY = 2.0


async def slow(sample: Any) -> float:
    """A reward: the share of even tokens, after a while."""
    await asyncio.sleep(DELAY)
    return sum(token % 2 == 0 for token in sample.response_ids) / len(sample.response_ids)


def run(folder: Path, name: str, steps: int, *more: str) -> list[dict[str, float]]:
    from vireo.settings import load_settings
    from vireo.trainers import registry

    words = f"""--trainer grpo --model_name_or_path {folder / "model"} --output_dir {folder / name}
        --prompt_data {folder / "shapes" / "train.json"} --reward benchmarks.overlap:slow
        --rollout_batch_size 4 --n_samples_per_prompt 4 --rollout_max_response_len 4
        --num_rollout {steps} --per_device_train_batch_size 16 --freeze_vision false --check_steps 0
        --report_to none --fsdp_enable false""".split()
    settings = load_settings([*words, *more])
    assert registry.find("grpo")(settings) == 0
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][2:]


def main() -> None:
    global DELAY
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delay", type=float, default=DELAY)
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    import benchmarks.overlap as this  # the module that the reward is found in
    from vireo.data.synthetic import write_shapes
    from vireo.families.tiny import build
    from vireo.rl.learn import Learner

    torch.set_num_threads(1)
    this.DELAY = given.delay
    learn = Learner.learn

    def slowly(*args: Any, **options: Any) -> Any:
        time.sleep(given.delay)
        return learn(*args, **options)

    Learner.learn = slowly  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build("qwen2_5_vl", folder / "model", size="test")
        write_shapes(folder / "shapes", rows=200)
        together = run(folder, "step", given.steps)
        ahead = run(folder, "ahead", given.steps, "--max_staleness", "1")
    generate = statistics.median(record["seconds/generate"] for record in together)
    step = statistics.median(record["seconds"] for record in together)
    longer = max(generate, step - generate)
    one_ahead = statistics.median(record["seconds"] for record in ahead)
    print(f"in step   {step:.2f} s: generation {generate:.2f}, training {step - generate:.2f}")
    print(f"one ahead {one_ahead:.2f} s: {one_ahead / longer:.3f} x the longer one")


if __name__ == "__main__":
    main()
