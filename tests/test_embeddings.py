"""Tied, untied and enlarged token embeddings: trained, saved, resumed and exported as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from tests.rows import losses
from vireo.families import FAMILIES
from vireo.families.tiny import build
from vireo.settings import load_settings
from vireo.trainers import registry
from vireo.training.checkpoint import checkpoints
from vireo.training.export import export

NEW = ["<point>", "</point>"]
MORE = 40  # rows beyond those of the tiny checkpoint


def enlarge(folder: Path, name: str) -> int:
    """Two words more in the tokenizer, and rows for them and some to spare; the new row count."""
    auto = getattr(transformers, FAMILIES[name].auto_class)
    model = auto.from_pretrained(folder)
    rows = model.get_input_embeddings().weight.shape[0] + MORE
    model.resize_token_embeddings(rows)
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.add_tokens(NEW) == 2
    tokenizer.save_pretrained(folder)
    return rows


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["qwen2_vl", "llama", "gemma3"])
def test_enlarged_embeddings_train_resume_and_export(name: str, tied: bool, tmp_path: Path) -> None:
    model = build(name, tmp_path / "model", size="test", tie_word_embeddings=tied)
    rows = enlarge(model, name)
    data = tmp_path / "rows.json"
    turns = [
        {"from": "human", "value": "Where?"},
        {"from": "gpt", "value": "At <point>3 4</point>."},
    ]
    data.write_text(json.dumps([{"id": i, "conversations": turns} for i in range(4)]))

    def train(steps: int, out: str, *more: str) -> Path:
        settings = load_settings(
            [
                f"--trainer={'fsdp_vlm' if FAMILIES[name].has_vision else 'fsdp'}",
                *(f"--vlm_model_name_or_path={model}", f"--train_file={data}"),
                *(f"--output_dir={tmp_path / out}", f"--max_steps={steps}", "--num_workers=0"),
                *("--per_device_train_batch_size=4", "--lr=1e-2", "--lr_scheduler=constant"),
                *("--report_to=none", *more),
            ]
        )
        assert registry.find(settings.trainer)(settings) == 0
        return tmp_path / out

    run = train(3, "whole")
    train(2, "parted")
    assert losses(train(3, "parted", "--resume=auto")) == pytest.approx(losses(run), abs=1e-6)
    out = export(checkpoints(run / "checkpoints")[-1], tmp_path / "export")
    auto = getattr(transformers, FAMILIES[name].auto_class)
    made, info = auto.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    embedding = made.get_input_embeddings().weight
    head = made.get_output_embeddings().weight
    assert embedding.shape[0] == head.shape[0] == rows
    assert (embedding.data_ptr() == head.data_ptr()) == tied
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    first, second = tokenizer.convert_tokens_to_ids(NEW)
    before = auto.from_pretrained(model).get_input_embeddings().weight
    assert not torch.equal(embedding[first], before[first])  # the new words have been trained
    assert not torch.equal(embedding[second], before[second])
    if not tied:
        assert torch.equal(embedding[-1], before[-1])  # nothing has looked at a row to spare
    assert losses(run)[-1] < losses(run)[0]
