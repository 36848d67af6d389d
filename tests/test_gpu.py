"""The same trainer on a CUDA device: NCCL, bfloat16, and checkpoints that cross to a CPU and back.

Run by `make test-gpu`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.launch import ROOT, environment, torchrun
from tests.rows import losses, write_rows
from vireo.families import FAMILIES
from vireo.families.tiny import build
from vireo.settings import load_settings
from vireo.trainers import registry
from vireo.training.checkpoint import checkpoints
from vireo.training.export import export

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 6


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    build("qwen2_5_vl", folder / "model", size="test")
    write_rows(folder / "data", [1, 0, 2, 1, 0, 0, 1, 3], ((56, 56), (84, 56)))
    return folder


def flags(base: Path, output: str, *more: str) -> list[str]:
    return [
        "--trainer=fsdp_vlm",
        f"--vlm_model_name_or_path={base / 'model'}",
        f"--train_file={base / 'data' / 'rows.json'}",
        f"--eval_file={base / 'data' / 'rows.json'}",
        f"--output_dir={base / output}",
        "--freeze_vision=false",
        "--lr=1e-3",
        f"--max_steps={STEPS}",
        "--per_device_train_batch_size=4",
        "--save_steps=3",
        "--max_new_tokens=4",
        *more,
    ]


def run_on_cpu(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vireo.train", *arguments],
        env=environment(CUDA_VISIBLE_DEVICES=""),
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def on_cpu(base: Path) -> Path:
    run_on_cpu(*flags(base, "cpu"))
    return base / "cpu"


def test_float32_losses_equal_those_of_a_cpu(base: Path, on_cpu: Path) -> None:
    world = torch.cuda.device_count()
    more = ["--global_batch_size=4", f"--per_device_train_batch_size={max(1, 4 // world)}"]
    arguments = [f for f in flags(base, "gpu") if "per_device" not in f]
    torchrun(world, "-m", "vireo.train", *arguments, "--fsdp_mp_dtype=fp32", *more)
    assert losses(base / "gpu") == pytest.approx(losses(on_cpu), abs=2e-4)


def test_a_gpu_checkpoint_goes_on_on_a_cpu_and_back(base: Path, on_cpu: Path) -> None:
    torchrun(1, "-m", "vireo.train", *flags(base, "mixed", "--fsdp_mp_dtype=fp32"))
    later = base / "mixed" / "checkpoints" / f"step-{STEPS}"
    later.rename(base / "gpu-made")
    run_on_cpu(*flags(base, "mixed", "--resume=auto"))
    assert losses(base / "mixed") == pytest.approx(losses(on_cpu), abs=2e-4)
    later.rename(base / "cpu-made")
    torchrun(1, "-m", "vireo.train", *flags(base, "mixed", "--fsdp_mp_dtype=fp32", "--resume=auto"))
    assert losses(base / "mixed") == pytest.approx(losses(on_cpu), abs=2e-4)


def test_bfloat16_follows_float32(base: Path, on_cpu: Path) -> None:
    for name, more in {
        "packed": [],
        "padded": ["--packing=false"],
        "recomputed": ["--grad_ckpt"],
        "unsharded": ["--fsdp_enable=false"],
    }.items():
        torchrun(1, "-m", "vireo.train", *flags(base, f"bf16-{name}", *more))
        assert losses(base / f"bf16-{name}") == pytest.approx(losses(on_cpu), abs=0.08), name
        record = json.loads((base / f"bf16-{name}" / "metrics.jsonl").read_text().splitlines()[0])
        assert record["memory_gb"] < 2  # the allocator's peak, not the process's


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_and_its_adapters_follow_float32(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    build(name, tmp_path / "model", size="test")
    write_rows(tmp_path / "data", [1, 0, 2, 1] if family.has_vision else [0] * 4)
    found = {}
    for precision in ("fp32", "bf16"):
        for adapters in (0, 4):
            out = tmp_path / f"{precision}-{adapters}"
            settings = load_settings(
                [
                    f"--trainer={'fsdp_vlm' if family.has_vision else 'fsdp'}",
                    f"--vlm_model_name_or_path={tmp_path / 'model'}",
                    f"--train_file={tmp_path / 'data' / 'rows.json'}",
                    *("--per_device_train_batch_size=4", "--max_steps=4", "--num_workers=0"),
                    *("--lr=3e-3", f"--output_dir={out}", f"--fsdp_mp_dtype={precision}"),
                    *("--report_to=none", f"--lora_r={adapters}", "--freeze_vision=false"),
                ]
            )
            assert registry.find(settings.trainer)(settings) == 0
            found[precision, adapters] = losses(out)
            last = checkpoints(out / "checkpoints")[-1]
            export(last, out / "export", merge_lora=adapters > 0)
    for adapters in (0, 4):
        exact = found["fp32", adapters]
        assert exact[-1] < exact[0]
        assert found["bf16", adapters] == pytest.approx(exact, abs=0.1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("adapters", [0, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_two_gpus_have_the_losses_of_one(name: str, adapters: int, tmp_path: Path) -> None:
    """Rows are dealt in turn: one rank has a picture in each step, the other has text alone."""
    family = FAMILIES[name]
    build(name, tmp_path / "model", size="test")
    write_rows(tmp_path / "data", [1, 0, 2, 0, 1, 0, 1, 0] if family.has_vision else [0] * 8)

    def arguments(output: str) -> list[str]:
        return [
            f"--trainer={'fsdp_vlm' if family.has_vision else 'fsdp'}",
            f"--vlm_model_name_or_path={tmp_path / 'model'}",
            f"--train_file={tmp_path / 'data' / 'rows.json'}",
            *("--per_device_train_batch_size=1", "--global_batch_size=4", "--max_steps=4"),
            *("--num_workers=0", "--lr=3e-3", f"--output_dir={tmp_path / output}"),
            *("--fsdp_mp_dtype=fp32", "--report_to=none", f"--lora_r={adapters}"),
            *("--freeze_vision=false", "--shuffle=false"),
        ]

    torchrun(1, "-m", "vireo.train", *arguments("one"))
    torchrun(2, "-m", "vireo.train", *arguments("two"))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=2e-4)
