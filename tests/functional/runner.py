"""Train as a person would, by the `vireo` command, and read what the runs say of themselves."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.functional.bounds import Finding, check
from tests.launch import ROOT, environment

CASES = Path(__file__).parent
VIREO = (sys.executable, "-m", "vireo")
PHASES = ("sft", "grpo")
LETTERS = "bdfhkmqz"


def names() -> list[str]:
    return sorted(path.stem for path in CASES.glob("*.json"))


def load(name: str) -> dict[str, Any]:
    """A case: `family`, `rows` (text or image), `seed`, and of each phase `args` and `bounds`."""
    return json.loads((CASES / f"{name}.json").read_text())


def run(
    case: dict[str, Any],
    out: Path,
    seed: int | None = None,
    command: Sequence[str] = VIREO,
) -> dict[str, list[dict]]:
    """Fine-tune a tiny model in `out`, go on by rewards, and return each phase's records.

    `command`: what stands in for `vireo`. RuntimeError: it failed; its output is in the message.
    """
    from vireo.families.tiny import build
    from vireo.training.checkpoint import checkpoints
    from vireo.training.export import export

    seed = case["seed"] if seed is None else seed
    build(case["family"], out / "start", size="test", seed=seed)
    data = write_rows(case["rows"], out / "data", seed)
    common = {"seed": seed, "freeze_vision": "false", "fsdp_enable": "false", "num_workers": 0}
    # In a checked step the log-probs before the update are computed apart: ratios are measured.
    common |= {"check_steps": 1, "logging_steps": 1, "report_to": "none"}
    sft = {"trainer": "fsdp_vlm", "model_name_or_path": out / "start", "train_file": data}
    train(command, sft | common | case["sft"]["args"], out / "sft")
    half = export(checkpoints(out / "sft" / "checkpoints")[-1], out / "half")
    grpo = {"trainer": "grpo", "model_name_or_path": half, "prompt_data": data}
    train(command, grpo | common | case["grpo"]["args"], out / "grpo")
    return {phase: records(out / phase) for phase in PHASES}


def train(command: Sequence[str], given: dict[str, Any], out: Path) -> None:
    words = [f"--{name}={value}" for name, value in (given | {"output_dir": out}).items()]
    done = subprocess.run(
        [*command, "train", *words],
        env=environment(CUDA_VISIBLE_DEVICES=""),
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError(f"{os.path.basename(out)} failed:\n{done.stdout[-6000:]}")


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def findings(case: dict[str, Any], made: dict[str, list[dict]]) -> list[Finding]:
    return [f for phase in PHASES for f in check(phase, case[phase]["bounds"], made[phase])]


def write_rows(kind: str, out: Path, seed: int) -> Path:
    """64 rows: questions about drawn shapes, or letters by chance, each with its number behind it.

    What follows a letter is certain and what follows a number is not, so that labels that are one
    place off leave another loss.
    """
    if kind == "image":
        from vireo.data.synthetic import write_shapes

        return write_shapes(out, rows=72, seed=seed) / "train.json"
    chance, rows = random.Random(seed), []
    for i in range(64):
        said = "".join(
            f"{letter}{LETTERS.index(letter)}" for letter in chance.choices(LETTERS, k=8)
        )
        turns = [_turn("human", f"What comes from {said[0]}?"), _turn("gpt", said)]
        rows.append({"id": f"letters-{i}", "conversations": turns})
    out.mkdir(parents=True)
    path = out / "train.json"
    path.write_text(json.dumps(rows))
    return path


def _turn(who: str, text: str) -> dict[str, str]:
    return {"from": who, "value": text}
