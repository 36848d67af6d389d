"""The same trainer on a CUDA device: NCCL, bfloat16, and checkpoints that cross to a CPU and back.

Run by `make test-gpu`.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.launch import ROOT, environment, torchrun
from tests.rows import losses, write_rows
from tests.tiny_models import FAMILIES
from vireo.data.ragged import Batch
from vireo.data.render import Renderer
from vireo.families.tiny import build
from vireo.models.attention import Bounds, attend
from vireo.models.build import ModelSpec, build_policy, whole_model
from vireo.models.load import targets_of
from vireo.models.recompute import Recomputed, by_memory
from vireo.parallel import Parallel
from vireo.rollout.open import open_engine
from vireo.settings import load_settings
from vireo.settings.rollout import EngineSettings
from vireo.trainers import registry
from vireo.training.alarms import complaint
from vireo.training.checkpoint import checkpoints
from vireo.training.export import export
from vireo.weights.named import published
from vireo.weights.source import Folder, Tensors

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


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("causal", [True, False])
def test_the_kernel_computes_what_masks_compute(causal: bool, window: int | None) -> None:
    """Outputs and gradients in bfloat16 against the masked form in float32; 8 queries on 2 keys."""
    if window and not causal:
        pytest.skip("only causal layers slide")
    lengths = [700, 1, 33, 290]
    torch.manual_seed(0)
    exact = [torch.randn(1, heads, sum(lengths), 128, device="cuda") for heads in (8, 2, 2)]
    bounds = Bounds(lengths, torch.device("cuda"))
    module = SimpleNamespace(is_causal=causal)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        given = [x.detach().to(dtype, copy=True).requires_grad_() for x in exact]
        out, _ = attend(module, *given, bounds, 128**-0.5, sliding_window=window)
        out.float().square().sum().backward()
        found.append([out.detach(), *(x.grad for x in given)])
    for wanted, got in zip(*found):
        assert got.shape == wanted.shape
        assert (got.float() - wanted).norm() < 1e-2 * wanted.norm()


def test_the_same_run_twice_has_the_same_bits(base: Path) -> None:
    for out in ("once", "again"):
        torchrun(1, "-m", "vireo.train", *flags(base, out, "--deterministic"))
    assert losses(base / "once") == losses(base / "again")


def test_alarms_are_quiet_in_bfloat16(base: Path) -> None:
    torchrun(1, "-m", "vireo.train", *flags(base, "alarms", "--check_steps=2"))
    lines = (base / "alarms" / "metrics.jsonl").read_text().splitlines()
    checked = [r for r in map(json.loads, lines) if "check/blindness" in r]
    assert len(checked) == STEPS // 2
    for record in checked:
        assert complaint(record, torch.bfloat16) is None
        print({name: value for name, value in record.items() if name.startswith("check/")})


def test_memory_foretells_how_many_layers_to_recompute(tmp_path: Path) -> None:
    """What `auto` counts at 256 and 512 tokens foretells what layers keep at 8,192."""
    build("qwen2_5_vl", tmp_path / "model", size="test", num_hidden_layers=6, hidden_size=512)
    made = Renderer(str(tmp_path / "model"))
    parallel = Parallel(0, 1, torch.device("cuda"), None)
    spec = ModelSpec(str(tmp_path / "model"), shard=False, recompute="auto")
    policy, _ = build_policy(spec, made.config, made.family, parallel)

    def run(tokens: int) -> torch.Tensor:
        inputs = Batch.of([made.empty(256)] * (tokens // 256)).to("cuda").pack()
        with torch.autocast("cuda", torch.bfloat16):
            return policy(inputs)

    def kept_with(count: int) -> int:
        layers = [m for m in policy.modules() if isinstance(m, Recomputed)]
        for i, layer in enumerate(layers):
            layer.active = i < count
        before = torch.cuda.memory_allocated()
        out = run(8192)
        kept = torch.cuda.memory_allocated() - before
        del out
        return kept

    run(8192)
    said = re.search(r"one keeps ([0-9.e-]+) GiB", by_memory(policy, 8192, run))
    assert said
    kept = (kept_with(0) - kept_with(6)) / 6 + 8192 * 512 * 4  # a recomputed one keeps its input
    assert float(said[1]) == pytest.approx(kept / (1 << 30), rel=0.2)


def test_an_engine_reads_weights_from_the_trainers_gpu(base: Path) -> None:
    folder = str(base / "model")
    made = Renderer(folder)
    hf = whole_model(made.config, made.family, folder, torch.bfloat16).to("cuda")
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter += 0.1 * torch.randn_like(parameter)

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        return published(hf, made.family, targets_of(hf)[0].items())

    async def run() -> list[dict[str, str]]:
        engine = open_engine(EngineSettings(engine="serve"), folder, made)
        await engine.start()
        try:
            found = [await engine.checksums()]
            for i, weights in enumerate((Tensors(named), Tensors(named, on_gpu=True))):
                await engine.update_weights(Folder(folder), f"home {i}")
                await engine.update_weights(weights, f"there {i}")
                found.append(await engine.checksums())
            return found
        finally:
            await engine.close()

    home, by_memory, by_gpu = asyncio.run(run())
    assert by_memory == by_gpu
    assert all(home[name] != by_gpu[name] for name in home)
