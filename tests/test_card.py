"""The model card of an export: only what the checkpoint knows, and loading code that runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from vireo.families import FAMILIES
from vireo.settings import load_settings
from vireo.training.card import model_card, results_at

ADAPTERS = {"r": 8, "alpha": 16, "dropout": 0.05, "modules": ["a.0.q_proj", "a.1.q_proj", "a.0.o"]}


def progress(*flags: str, **more: Any) -> dict[str, Any]:
    """What a checkpoint's progress.json holds after a run with these flags."""
    settings = load_settings(
        [
            "--model_name_or_path=/home/me/models/base-7b",
            "--train_file=/secret/a.json,b.json",
            *flags,
        ]
    )
    return {
        "step": 1200,
        "position": 76800,
        "rows": 40000,
        "global_batch": 64,
        "skipped": [],
        "settings": settings.model_dump(mode="json", by_alias=True),
    } | more


def card(*flags: str, family: str = "qwen2_5_vl", **more: Any) -> str:
    return model_card(progress(*flags, **more), FAMILIES[family])


def front(text: str) -> dict[str, Any]:
    _, head, _ = text.split("---\n", 2)
    return yaml.safe_load(head)


def code(text: str) -> str:
    return text.partition("```python\n")[2].partition("```")[0]


def test_front_matter_of_each_kind():
    assert front(card(base_model="org/base-7b")) == {
        "base_model": "org/base-7b",
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text",
        "tags": ["vireo", "sft", "qwen2_5_vl"],
    }
    text = front(card("--trainer=fsdp", family="qwen3"))
    assert text["pipeline_tag"] == "text-generation"
    assert "base_model" not in text  # a folder on somebody's disk
    assert front(card(adapters=ADAPTERS))["library_name"] == "peft"
    merged = front(model_card(progress(adapters=ADAPTERS), FAMILIES["qwen2_5_vl"], merged=True))
    assert merged["library_name"] == "transformers"
    assert "lora" in merged["tags"]


def test_what_was_trained():
    text = card("--lr=2e-5", "--vision_lr=2e-6", "--freeze_vision=false", "--freeze_mm_proj")
    for line in (
        "- data: `a.json`, `b.json`, 40,000 rows an epoch",
        "- steps: 1,200, which saw 76,800 rows",
        "- rows a step: 64",
        "- highest learning rate: 2e-05, 2e-06 (vision tower)",
        "- schedule: cosine, warm-up 0.03 of all steps",
        "- frozen: projector",
    ):
        assert line + "\n" in text
    assert "/secret" not in text
    assert "/home/me" not in text
    assert "refused" not in text
    assert "## Results" not in text
    assert "Images:" not in text


def test_the_rate_of_a_frozen_part_is_not_named_and_a_text_model_has_no_vision_tower():
    assert "(vision tower)" not in card("--vision_lr=1e-6")
    assert "- frozen: vision tower\n" in card()
    assert "frozen" not in card("--trainer=fsdp", family="qwen3")
    frozen = card("--freeze_language")
    assert "- frozen: vision tower, language model, token embeddings and output head\n" in frozen


def test_adapters_refused_rows_and_image_size_are_said():
    text = card("--image_size=448", "--image_strategy=pad_square", adapters=ADAPTERS, skipped=["x"])
    shape = "- adapters: LoRA, rank 8, alpha 16, dropout 0.05, on 3 linear modules (o, q_proj)"
    assert f"{shape}; the base was frozen\n" in text
    assert "- refused rows: 1, left out\n" in text
    assert "Images: trained with `--image_size 448 --image_strategy pad_square`." in text


def test_results_come_from_the_run_folder_as_of_the_step(tmp_path):
    records = [
        {"step": 10, "loss": 2.0},
        {"step": 10, "eval_loss": 3.0, "eval_exact_match": 0.5},
        {"step": 20, "loss": 1.5},
        {"step": 20, "eval_loss": 1.25},
        {"step": 25, "loss": None},
        {"step": 30, "loss": 1.0},
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("\n".join(map(json.dumps, records)) + '\n{"step": 3')
    assert results_at(file, 10) == {"loss": 2.0, "eval_loss": 3.0, "eval_exact_match": 0.5}
    assert results_at(file, 25) == {"loss": 1.5}  # no evaluation at that step
    assert results_at(tmp_path / "none.jsonl", 10) == {}
    text = model_card(
        progress("--eval_file=/secret/val.json"),
        FAMILIES["qwen2_5_vl"],
        results=results_at(file, 20),
    )
    assert "- training loss of the last logged step: 1.5\n- loss on held-out rows: 1.25\n" in text
    assert "- held-out rows: `val.json`\n" in text


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3"])
def test_the_loading_code_runs_as_it_is(family, tmp_path, monkeypatch):
    from vireo.families.tiny import build

    build(family, tmp_path, size="test")
    monkeypatch.chdir(tmp_path)
    text = code(card(family=family))
    assert len([line for line in text.splitlines() if line]) <= 6
    names: dict[str, Any] = {}
    exec(text, names)
    assert names["model"].config.model_type == family
    reader = names["processor" if FAMILIES[family].has_vision else "tokenizer"]
    assert reader.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)


def test_the_loading_code_of_adapters_runs_as_it_is(tmp_path, monkeypatch):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from vireo.families.tiny import build

    base, folder = tmp_path / "base", tmp_path / "adapters"
    build("qwen3", base, size="test")
    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    monkeypatch.chdir(folder)
    text = code(card(family="qwen3", base_model=str(base), adapters=ADAPTERS))
    assert len([line for line in text.splitlines() if line]) <= 6
    names: dict[str, Any] = {}
    exec(text, names)
    assert names["model"].peft_config["default"].target_modules == {"q_proj"}


def test_the_loading_code_names_the_repository():
    text = model_card(progress(), FAMILIES["qwen2_5_vl"], repo="my-team/my-model")
    assert 'AutoProcessor.from_pretrained("my-team/my-model")' in text
