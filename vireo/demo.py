"""`vireo demo`: a small vision-language model learns to read handwritten digits in two minutes.

Everything a real run does, on the CPU and offline: build a model, write LLaVA rows with pictures,
evaluate, fine-tune, export, reload the export with plain transformers, evaluate again.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from vireo.errors import InputError

MARKER = "a demo's folder; the next demo run empties it\n"
# Found by trial on five seeds; benchmarks/RESULTS.md has the figures.
RECIPE = {
    "max_steps": 300,
    "per_device_train_batch_size": 32,
    "lr": 1.5e-3,
    "lr_scheduler": "linear",
    "warmup_ratio": 0.1,
    "adam_beta2": 0.98,
}


def run(
    output_dir: str = "runs/demo", seed: int = 0, max_steps: int | None = None
) -> dict[str, Any]:
    """Run the demo and return what it writes to `output_dir`/summary.json."""
    started = time.perf_counter()
    out = fresh_folder(Path(output_dir))
    import torch

    from vireo.data.synthetic import write_digits
    from vireo.evaluation import evaluate_files
    from vireo.families.tiny import build
    from vireo.settings.rollout import SamplingSettings
    from vireo.training.checkpoint import checkpoints
    from vireo.training.export import export

    # Two threads beside another busy core run many times slower than one; the loader has a core.
    torch.set_num_threads(1)
    data, model = out / "data", out / "model"
    write_digits(data)
    build("qwen2_5_vl", model, seed=seed)
    val = data / "val.json"
    short = SamplingSettings(max_new_tokens=4, temperature=0)
    before = evaluate_files(model=str(model), eval_file=str(val), sampling=short, batch_size=100)
    print(
        f"before training: {before['accuracy']:.1%} of {before['rows']} held-out digits", flush=True
    )

    recipe = RECIPE | ({"max_steps": max_steps} if max_steps else {})
    train(
        {
            "trainer": "fsdp_vlm",
            "vlm_model_name_or_path": model,
            "train_file": data / "train.json",
            "eval_file": val,
            "output_dir": out / "run",
            "freeze_vision": "false",
            "packing": "false",  # all rows have one length: packing would only cost attention
            "fsdp_enable": "false",
            "num_workers": 1,
            "logging_steps": 25,
            "max_new_tokens": 4,
            "seed": seed,
            **recipe,
        }
    )

    exported = export(checkpoints(out / "run" / "checkpoints")[-1], out / "export")
    after = evaluate_files(
        model=str(exported),
        eval_file=str(val),
        sampling=short,
        batch_size=100,
        output_dir=str(out / "answers"),
    )
    summary = {
        "accuracy_before": before["accuracy"],
        "accuracy_after": after["accuracy"],
        "train_rows": len(json.loads((data / "train.json").read_text())),
        "eval_rows": after["rows"],
        "seconds": round(time.perf_counter() - started, 1),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    _show(out, summary)
    return summary


def train(given: dict[str, Any]) -> None:
    """A run with settings by their flags' names."""
    from vireo.settings import load_settings
    from vireo.trainers import registry

    settings = load_settings([f"--{name}={value}" for name, value in given.items()])
    registry.find(settings.trainer)(settings)


def fresh_folder(out: Path) -> Path:
    """An empty folder: one that an earlier demo made is emptied, any other is left alone."""
    marker = out / ".vireo-demo"
    if out.exists() and any(out.iterdir()):
        if not marker.exists():
            raise InputError(f"{out} is not empty and no demo made it; choose another --output_dir")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    marker.write_text(MARKER)
    return out


def _show(out: Path, summary: dict[str, Any]) -> None:
    lines = (out / "answers" / "answers.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    wrong = [a for a in answers if not a["correct"]]
    shown = (answers[:4] + wrong[:2])[:6]
    print("\nSome held-out pictures, as the exported model answers them:\n")
    blocks = [_block(out / "answers" / a["images"][0]) for a in shown]
    for row in zip(*blocks):
        print("   ".join(row))
    labels = [f"{a['answer']} {'right' if a['correct'] else 'is ' + a['expected']}" for a in shown]
    print("   ".join(label.ljust(len(blocks[0][0])) for label in labels))
    print(f"\n{'':18}accuracy on {summary['eval_rows']} held-out digits")
    print(f"{'before training':18}{summary['accuracy_before']:8.1%}")
    print(f"{'after training':18}{summary['accuracy_after']:8.1%}")
    print(f"\n{summary['seconds']} s in all. Run folder: {out}")
    print(f"Exported model, loads with plain transformers: {out / 'export'}")


def _block(file: Path) -> list[str]:
    """A picture as 8 lines of 16 characters."""
    from PIL import Image

    small = Image.open(file).convert("L").resize((8, 8))
    shades = " .:*#"
    pixel = list(small.tobytes())
    return [
        "".join(2 * shades[pixel[8 * y + x] * len(shades) // 256] for x in range(8))
        for y in range(8)
    ]
