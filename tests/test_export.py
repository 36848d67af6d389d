"""Exported folders: tied and untied heads, types, shards with an index, the Hub at a run's end."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.rows import write_rows
from vireo.errors import InputError, VireoError
from vireo.families.tiny import build
from vireo.settings import load_settings
from vireo.trainers import base as base_run
from vireo.trainers import registry
from vireo.training.checkpoint import checkpoints
from vireo.training.export import export


def train(base: Path, model: Path, output: str, *more: str) -> Path:
    settings = load_settings(
        [
            f"--vlm_model_name_or_path={model}",
            f"--train_file={write_rows(base / 'data', [1, 0, 2, 1])}",
            *("--max_steps=2", "--per_device_train_batch_size=4", "--num_workers=0", "--lr=1e-2"),
            *("--report_to=none", f"--output_dir={base / output}", *more),
        ]
    )
    assert registry.find(settings.trainer)(settings) == 0
    return checkpoints(base / output / "checkpoints")[-1]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def trained(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    base = tmp_path_factory.mktemp("export")
    tied = request.param
    model = build("qwen2_5_vl", base / "model", size="test", tie_word_embeddings=tied)
    return train(base, model, "run"), tied


def test_heads_are_written_once_where_tied_and_by_themselves_where_not(trained, tmp_path) -> None:
    checkpoint, tied = trained
    out = export(checkpoint, tmp_path / "out")
    weights = load_file(out / "model.safetensors")
    assert ("lm_head.weight" in weights) != tied
    model, info = transformers.AutoModelForImageTextToText.from_pretrained(
        out, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    head, embeddings = model.lm_head.weight, model.get_input_embeddings().weight
    assert (head.data_ptr() == embeddings.data_ptr()) == tied
    if not tied:
        assert not torch.equal(head, embeddings)


def test_shards_have_an_index_and_the_type_that_was_asked_for(trained, tmp_path) -> None:
    checkpoint, _ = trained
    whole = load_file(export(checkpoint, tmp_path / "whole") / "model.safetensors")
    out = export(checkpoint, tmp_path / "parts", "bf16", max_shard_size="100KB")
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == whole.keys()
    assert len(set(index.values())) > 3
    found = {n: v for file in set(index.values()) for n, v in load_file(out / file).items()}
    assert all(torch.equal(found[name], whole[name].bfloat16()) for name in whole)
    config = json.loads((out / "config.json").read_text())
    types = {config["dtype"], config["text_config"].get("dtype", "bfloat16")}
    assert types == {"bfloat16"}
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(out, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert "base_model" not in (out / "README.md").read_text().split("---")[1]


def test_an_export_that_cannot_be_written_leaves_nothing(trained, tmp_path) -> None:
    """The kernel refuses to let a file grow, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(VireoError, match="out cannot be written: "):
            export(trained[0], tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []


def test_options_of_adapters_are_refused_for_whole_weights(trained, tmp_path) -> None:
    with pytest.raises(InputError, match="has no adapters"):
        export(trained[0], tmp_path / "out", merge_lora=True)
    with pytest.raises(InputError, match="--base is for --merge_lora"):
        export(trained[0], tmp_path / "out", base="elsewhere")


@pytest.mark.parametrize("lora", [0, 4])
def test_a_run_ends_with_its_export_on_the_hub(tmp_path, monkeypatch, lora: int) -> None:
    asked, pushed = [], []
    monkeypatch.setattr(base_run, "check_push", asked.append)
    monkeypatch.setattr(base_run, "push", lambda *given: pushed.append(given) or "the hub")
    model = build("qwen2_5_vl", tmp_path / "model", size="test")
    train(
        tmp_path, model, "run", "--push_to_hub=me/mine", "--hub_private=false", f"--lora_r={lora}"
    )
    folder = tmp_path / "run" / "export-step-2"
    assert asked == ["me/mine"]
    assert pushed == [(folder, "me/mine", False)]
    name = "adapter_model.safetensors" if lora else "model.safetensors"
    assert (folder / name).exists()
    assert "me/mine" in (folder / "README.md").read_text()
    assert "pushed to the hub" in (tmp_path / "run" / "log.txt").read_text()


def test_a_resumed_run_pushes_its_own_weights(tmp_path, monkeypatch) -> None:
    pushed = []
    monkeypatch.setattr(base_run, "check_push", lambda *_: None)
    monkeypatch.setattr(base_run, "push", lambda folder, *_: pushed.append(load_all(folder)))
    model = build("qwen2_5_vl", tmp_path / "model", size="test")
    train(tmp_path, model, "run", "--push_to_hub=me/mine")
    more = ("--max_steps=3", "--resume=auto", "--lr_scheduler=constant")
    train(tmp_path, model, "run", "--push_to_hub=me/mine", *more)
    first, second = pushed
    assert any(not torch.equal(first[name], second[name]) for name in first)


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_shard_size": "banana"}, "--max_shard_size banana: expected a size such as 5GB"),
        ({"max_shard_size": "0"}, "--max_shard_size 0"),
    ],
)
def test_a_size_that_is_none_is_refused_before_anything_is_written(
    trained, tmp_path, more: dict, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        export(trained[0], tmp_path / "out", **more)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_exported_into_a_checkpoint(trained) -> None:
    with pytest.raises(InputError, match="is inside the checkpoint"):
        export(trained[0], trained[0] / "out")
