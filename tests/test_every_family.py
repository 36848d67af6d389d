"""What the foundation promises holds for every family: gradients, ranks, resume, export."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.launch import ROOT, environment, torchrun
from tests.ranks.cases import engine_for, examples_of, furthest, gradients
from tests.ranks.families import micro_batches
from tests.rows import losses, write_rows
from tests.tiny_models import FAMILIES
from vireo import parallel as parallel_module
from vireo.data.ragged import Batch
from vireo.families.tiny import build
from vireo.settings import load_settings
from vireo.trainers import registry
from vireo.training.checkpoint import checkpoints
from vireo.training.export import export

COUNTS = [1, 0, 2, 0, 1]  # images of each row
SIZES = ((56, 56), (84, 56), (56, 140))


@pytest.fixture(scope="module")
def names(request: pytest.FixtureRequest) -> list[str]:
    """The families that this session's tests ask for."""
    mine = [item for item in request.session.items if item.path == request.path]
    found = {item.callspec.params.get("name") for item in mine if hasattr(item, "callspec")}
    return [name for name in FAMILIES if name in found | {"mllama"}]


@pytest.fixture(scope="module")
def base(names: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder a family: tiny model, rows, and the gradients of all rows each by itself."""
    base = tmp_path_factory.mktemp("every-family")
    parallel = parallel_module.start(shard=False)
    for name in names:
        family = FAMILIES[name]
        folder = base / name
        build(name, folder / "model", size="test")
        counts = COUNTS if family.has_vision else [0] * len(COUNTS)
        write_rows(folder / "data", counts, SIZES)
        engine, renderer = engine_for(str(folder / "model"), parallel)
        rows = examples_of(renderer, folder / "data" / "rows.json")
        torch.save(gradients(engine, [Batch.of([row]) for row in rows]), folder / "reference.pt")
    return base


@pytest.fixture(scope="module")
def on_two_ranks(base: Path) -> Path:
    torchrun(2, "-m", "tests.ranks.families", str(base))
    return base


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_do_not_depend_on_micro_batches(base: Path, name: str) -> None:
    folder = base / name
    engine, renderer = engine_for(str(folder / "model"), parallel_module.start(shard=False))
    rows = examples_of(renderer, folder / "data" / "rows.json")
    reference = torch.load(folder / "reference.pt")
    assert all(float(grad.abs().max()) > 0 for grad in reference.values())
    for size in (2, 5):
        batches = micro_batches(rows, renderer.family.can_mix, size)
        assert furthest(gradients(engine, batches), reference) < 1e-5, size


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_have_the_gradients_of_one(on_two_ranks: Path, name: str) -> None:
    found = json.loads((on_two_ranks / name / "found.json").read_text())
    assert "error" not in found, found["error"]
    assert {case: value for case, value in found.items() if value >= 1e-5} == {}
    assert len(found) == 4


def train(base: Path, name: str, out: str, *more: str) -> Path:
    folder = base / name
    rows = folder / "data" / "rows.json"
    settings = load_settings(
        [
            f"--trainer={'fsdp_vlm' if FAMILIES[name].has_vision else 'fsdp'}",
            f"--vlm_model_name_or_path={folder / 'model'}",
            *(f"--train_file={rows}", f"--eval_file={rows}", f"--output_dir={folder / out}"),
            *("--freeze_vision=false", "--lr=1e-3", "--lr_scheduler=constant", "--num_workers=0"),
            *("--global_batch_size=3", "--per_device_train_batch_size=3", "--eval_samples=3"),
            *("--max_new_tokens=2", "--report_to=none", "--fsdp_mp_dtype=fp32", *more),
        ]
    )
    assert registry.find(settings.trainer)(settings) == 0
    return folder / out


@pytest.fixture(scope="module")
def exported(base: Path, names: list[str]) -> Path:
    """Three steps of every family, then the loss of its export by plain transformers."""
    for name in names:
        run = train(base, name, "whole", "--max_steps=3")
        export(checkpoints(run / "checkpoints")[-1], base / name / "export")
        renderer = engine_for(str(base / name / "model"), parallel_module.start(shard=False))[1]
        rows = examples_of(renderer, base / name / "data" / "rows.json")
        inputs = [Batch.of([row]).pad(renderer.pad_id) for row in rows]
        torch.save(
            [{n: v for n, v in one.items() if n not in ("positions",)} for one in inputs],
            base / name / "inputs.pt",
        )
    code = "from tests.test_every_family import plain_losses; plain_losses()"
    subprocess.run(
        [sys.executable, "-c", code, str(base)],
        env=environment(),
        cwd=ROOT,
        check=True,
        timeout=240,
    )
    return base


def plain_losses() -> None:
    """In a process of its own: the mean loss of each export, by transformers alone."""
    import transformers

    base = Path(sys.argv[1])
    for name in sorted(folder.name for folder in base.iterdir()):
        auto = getattr(transformers, FAMILIES[name].auto_class)
        model, info = auto.from_pretrained(base / name / "export", output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        total = count = 0.0
        for inputs in torch.load(base / name / "inputs.pt"):
            labels = inputs.pop("labels")[:, 1:]
            inputs.pop("loss_weight")
            with torch.no_grad():
                logits = model.eval()(**inputs).logits[:, :-1].float()
            kept = labels != -100
            total += float(
                torch.nn.functional.cross_entropy(logits[kept], labels[kept]) * kept.sum()
            )
            count += float(kept.sum())
        (base / name / "plain.json").write_text(json.dumps(total / count))


@pytest.mark.parametrize("name", FAMILIES)
def test_an_export_computes_in_plain_transformers_what_training_computed(
    exported: Path, name: str
) -> None:
    folder = exported / name
    records = [json.loads(line) for line in (folder / "whole" / "metrics.jsonl").open()]
    trained = next(record["eval_loss"] for record in records if "eval_loss" in record)
    assert json.loads((folder / "plain.json").read_text()) == pytest.approx(trained, abs=1e-5)
    assert trained < next(record["loss"] for record in records)
    assert (folder / "export" / "chat_template.jinja").exists()
    own = json.loads((folder / "model" / "config.json").read_text())
    assert json.loads((folder / "export" / "config.json").read_text())["dtype"] == own["dtype"]


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_follows_float32(exported: Path, name: str) -> None:
    more = ("--max_steps=3", "--fsdp_mp_dtype=bf16", "--per_device_train_batch_size=1")
    run = train(exported, name, "bf16", *more)
    assert losses(run) == pytest.approx(losses(exported / name / "whole"), abs=0.1)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_resumed_run_is_the_unbroken_one(exported: Path, name: str) -> None:
    train(exported, name, "parted", "--max_steps=1")
    parted = train(exported, name, "parted", "--max_steps=3", "--resume=auto")
    assert losses(parted) == pytest.approx(losses(exported / name / "whole"), abs=1e-6)


@pytest.mark.parametrize("more", [[], ["--lora_r=4"]])
def test_a_run_that_saw_text_alone_resumes(exported: Path, more: list[str]) -> None:
    """Layers that only images reach have had no gradient when it is saved."""
    texts = write_rows(exported / "mllama" / "texts", [0, 0, 0])
    out = f"texts-{len(more)}"
    flags = (f"--train_file={texts}", *more)
    train(exported, "mllama", out, "--max_steps=1", *flags)
    run = train(exported, "mllama", out, "--max_steps=2", "--resume=auto", *flags)
    assert len(losses(run)) == 2


def test_text_leaves_a_model_of_which_only_images_reach_the_trained_part(exported: Path) -> None:
    texts = write_rows(exported / "mllama" / "texts", [0, 0, 0])
    flags = (f"--train_file={texts}", "--max_steps=2", "--freeze_language", "--freeze_vision=true")
    run = train(exported, "mllama", "projector", *flags)
    first, second = losses(run)
    assert first == pytest.approx(second, abs=1e-5)
