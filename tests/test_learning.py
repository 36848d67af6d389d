"""A model in training must see: it learns what only pictures tell; pixels move its output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.ranks.cases import engine_for
from tests.rows import picture
from tests.tiny_models import FAMILIES
from vireo import parallel as parallel_module
from vireo.data.conversation import read_rows
from vireo.data.ragged import Batch
from vireo.evaluation import accuracy, evaluate_files
from vireo.families.tiny import build
from vireo.settings import load_settings
from vireo.trainers import registry
from vireo.training.checkpoint import checkpoints
from vireo.training.export import export

VISION = [name for name, family in FAMILIES.items() if family.has_vision]
WORDS = ["red", "two", "cat", "sun", "box", "map", "ink", "oak"]


def write_pictures(folder: Path, order: list[int]) -> Path:
    """Eight rows of one prompt and one size; row i shows picture order[i], answer WORDS[i]."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for i, k in enumerate(order):
        picture(100 + k).save(folder / f"{k}.png")
        turns = [
            {"from": "human", "value": "<image>\nName it."},
            {"from": "gpt", "value": WORDS[i]},
        ]
        rows.append({"id": i, "image": f"{k}.png", "conversations": turns})
    path = folder / "rows.json"
    path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize("family", VISION)
def test_rows_that_differ_only_in_the_picture_are_memorised(family: str, tmp_path: Path) -> None:
    model = build(family, tmp_path / "model", size="test")
    rows = write_pictures(tmp_path / "data", list(range(8)))
    settings = load_settings(
        [
            f"--vlm_model_name_or_path={model}",
            f"--train_file={rows}",
            f"--output_dir={tmp_path / 'run'}",
            "--freeze_vision=false",
            "--fsdp_enable=false",
            "--per_device_train_batch_size=8",
            "--max_steps=120",
            "--lr=3e-3",
            "--warmup_ratio=0.1",
            "--logging_steps=40",
            "--num_workers=0",
        ]
    )
    registry.find(settings.trainer)(settings)
    exported = export(checkpoints(tmp_path / "run" / "checkpoints")[-1], tmp_path / "export")
    assert evaluate_files(model=str(exported), eval_file=str(rows))["accuracy"] == 1.0
    shuffled = write_pictures(tmp_path / "shuffled", [3, 4, 5, 6, 7, 0, 1, 2])
    assert evaluate_files(model=str(exported), eval_file=str(shuffled))["accuracy"] <= 0.25


def two_pictures(folder: Path) -> tuple[Path, Path]:
    """One row with two same-size pictures, and the same row with them swapped."""
    out = []
    for name, order in (("a", [0, 1]), ("b", [1, 0])):
        (folder / name).mkdir()
        for k in order:
            picture(k).save(folder / name / f"{k}.png")
        turns = [
            {"from": "human", "value": "<image> and <image>: which is first?"},
            {"from": "gpt", "value": "the left one"},
        ]
        row = {"image": [f"{k}.png" for k in order], "conversations": turns}
        (folder / name / "rows.json").write_text(json.dumps([row]))
        out.append(folder / name / "rows.json")
    return out[0], out[1]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_pixels_reach_the_log_probs_and_the_gradients(family: str, tmp_path: Path) -> None:
    model = build(family, tmp_path / "model", size="test")
    engine, renderer = engine_for(str(model), parallel_module.start(shard=False))
    plain, swapped = two_pictures(tmp_path)
    examples = [renderer.example(read_rows(path)[0]) for path in (plain, swapped)]
    zeroed = renderer.example(read_rows(plain)[0])
    zeroed.fields["pixel_values"] = torch.zeros_like(zeroed.fields["pixel_values"])
    found = [observe(engine, example) for example in (*examples, zeroed)]
    same = observe(engine, examples[0])
    for logprobs, image_gradient in found[1:]:
        assert (logprobs - found[0][0]).abs().max() > 1e-5
        assert (image_gradient - found[0][1]).abs().max() > 1e-7
    assert torch.equal(same[0], found[0][0])  # the difference is not noise
    assert torch.equal(same[1], found[0][1])


@pytest.mark.parametrize("family", VISION)
def test_every_picture_of_a_row_is_seen(family: str, tmp_path: Path) -> None:
    """Two same-size pictures swapped change the answer; the pixels of both have a gradient."""
    model = build(family, tmp_path / "model", size="test")
    engine, renderer = engine_for(str(model), parallel_module.start(shard=False))
    found = []
    for path in two_pictures(tmp_path):
        example = renderer.example(read_rows(path)[0])
        pixels = example.fields["pixel_values"].requires_grad_()
        logprobs, _ = engine.forward(Batch.of([example]))
        logprobs.sum().backward()
        assert pixels.grad is not None
        halves = pixels.grad.chunk(2, dim=renderer.keys["pixel_values"].axis)
        assert all(half.abs().max() > 1e-7 for half in halves)
        found.append(logprobs.detach())
    assert (found[0] - found[1]).abs().max() > 1e-5


def observe(engine, example) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the answer, and the gradient at the first image's tokens."""
    kept = {}
    model = engine.policy.hf.model

    def keep(_module, arguments, options) -> None:
        kept["embeddings"] = options["inputs_embeds"]
        kept["embeddings"].retain_grad()

    hook = model.language_model.register_forward_pre_hook(keep, with_kwargs=True)
    logprobs, _ = engine.forward(Batch.of([example]))
    hook.remove()
    logprobs.sum().backward()
    first = example.fields["mm_token_type_ids"].nonzero()[:, 0][:4]
    return logprobs.detach(), kept["embeddings"].grad[0, first].clone()


def test_accuracy_counts_equal_answers() -> None:
    assert accuracy([{"correct": True}] * 3 + [{"correct": False}]) == 0.75
