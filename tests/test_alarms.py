"""Always-on alarms: quiet on a run that is right, loud where rows leak or pictures are not seen."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.launch import torchrun
from tests.ranks.cases import engine_for, examples_of
from tests.rows import write_rows
from tests.tiny_models import FAMILIES, assistant, noise, row, tiny, user
from vireo import parallel as parallel_module
from vireo.data.packing import micro_batches
from vireo.data.ragged import Batch
from vireo.errors import VireoError
from vireo.families.tiny import build
from vireo.models.attention import packed_rows
from vireo.models.policy import Policy
from vireo.settings import load_settings
from vireo.trainers import registry
from vireo.training.alarms import complaint, look

SIZES = ((56, 56), (84, 56))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("alarms")
    build("qwen2_vl", base / "model", size="test")
    write_rows(base / "data", [1, 0, 2, 1], SIZES)
    return base


def engine_and_rows(base: Path) -> tuple[Any, list]:
    engine, renderer = engine_for(str(base / "model"), parallel_module.start(shard=False))
    return engine, examples_of(renderer, base / "data" / "rows.json")


def test_a_right_model_is_quiet(base: Path) -> None:
    engine, rows = engine_and_rows(base)
    found = look(engine, [Batch.of(rows[:1]), Batch.of(rows)])
    assert found["check/packed_vs_alone"] < 1e-6
    assert found["check/blindness"] > 1e-3
    assert complaint(found, torch.float32) is None


def test_looking_leaves_no_trace(base: Path) -> None:
    engine, rows = engine_and_rows(base)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    look(engine, [Batch.of(rows)])
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in engine.policy.parameters())


def leak(_engine: Any, _rows: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds of rows get lost."""
    monkeypatch.setattr(
        "vireo.models.policy.packed_rows",
        lambda lengths, device: packed_rows(lengths and [sum(lengths)], device),
    )


def forget_pixels(engine: Any, _rows: list, _: pytest.MonkeyPatch) -> None:
    """The tower's output is lost on its way to the language model."""
    merger = engine.policy.hf.model.visual.merger
    merger.register_forward_hook(lambda _module, _inputs, out: out * 0)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (leak, "a row beside others has other log-probabilities than alone"),
        (forget_pixels, "the model does not see its pictures"),
    ],
)
def test_a_planted_fault_is_said(
    base: Path, fault: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, rows = engine_and_rows(base)
    fault(engine, rows, monkeypatch)
    text = complaint(look(engine, [Batch.of(rows)]), torch.float32)
    assert text is not None
    assert said in text


def test_attention_that_a_family_cannot_have_is_said(tmp_path: Path) -> None:
    """Gemma 3 sees images in both directions, which attention without masks cannot: a row by itself
    is as wrong as beside others."""
    wrong = replace(FAMILIES["gemma3"], varlen=("language",))
    folder = build("gemma3", tmp_path / "model", size="test")
    write_rows(tmp_path / "data", [1, 2], SIZES)
    engine, rows = engine_and_rows(tmp_path)
    assert complaint(look(engine, [Batch.of(rows)]), torch.float32) is None
    hf = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    engine.policy = Policy(hf, wrong, None)
    text = complaint(look(engine, [Batch.of(rows)]), torch.float32)
    assert text is not None
    assert "a row beside others has other log-probabilities than alone" in text


def test_values_that_are_no_numbers_are_said() -> None:
    nan = float("nan")
    assert complaint({"check/packed_vs_alone": nan}, torch.float32)
    assert complaint({"check/blindness": nan}, torch.float32)
    assert complaint({"check/packed_vs_alone": 0.05}, torch.bfloat16) is None
    assert complaint({"check/packed_vs_alone": 0.05}, torch.float32)


@pytest.mark.parametrize("family", ["qwen2_vl", "mllama"])
def test_a_row_that_ends_with_a_picture_is_seen(family: str) -> None:
    """No answer stands behind its picture; other pixels change what does."""
    engine, made = engine_for(tiny(family), parallel_module.start(shard=False))
    talk = row(user("Hi."), assistant("Yes?"), user(0, "See?"), images=[noise(60, 60)])
    found = look(engine, [Batch.of([made.example(talk)] * 2)])
    assert found["check/packed_vs_alone"] < 1e-5
    assert found["check/blindness"] > 1e-3


def test_no_number_on_any_rank_is_said(base: Path) -> None:
    """A maximum over ranks may lose what is no number; infinity stays."""
    engine, rows = engine_and_rows(base)
    with torch.no_grad():
        engine.policy.hf.lm_head.weight.fill_(float("nan"))
    found = look(engine, [Batch.of(rows)])
    assert found == {"check/packed_vs_alone": math.inf, "check/blindness": -math.inf}
    assert complaint(found, torch.float32)


def test_text_has_no_blindness_and_nothing_has_no_value(base: Path) -> None:
    engine, rows = engine_and_rows(base)
    assert set(look(engine, [Batch.of([rows[1]])])) == {"check/packed_vs_alone"}
    assert look(engine, []) == {}


def settings_for(base: Path, out: str, *more: str) -> Any:
    return load_settings(
        [
            *(f"--vlm_model_name_or_path={base / 'model'}", "--fsdp_enable=false"),
            *(f"--train_file={base / 'data' / 'rows.json'}", f"--output_dir={base / out}"),
            *("--global_batch_size=4", "--per_device_train_batch_size=4", "--num_workers=0"),
            *("--max_steps=5", "--report_to=none", "--logging_steps=5", *more),
        ]
    )


def records(base: Path, out: str) -> list[dict]:
    return [json.loads(line) for line in (base / out / "metrics.jsonl").open()]


def test_a_run_checks_every_so_many_steps(base: Path) -> None:
    settings = settings_for(base, "run", "--check_steps=2")
    registry.find(settings.trainer)(settings)
    checked = {r["step"]: r for r in records(base, "run") if "check/blindness" in r}
    assert list(checked) == [1, 3, 5]
    assert all(r["check/packed_vs_alone"] < 1e-5 < r["check/blindness"] for r in checked.values())
    quiet = settings_for(base, "quiet", "--check_steps=0")
    registry.find(quiet.trainer)(quiet)
    assert not any("check/blindness" in r for r in records(base, "quiet"))
    assert records(base, "quiet")[-1]["loss"] == records(base, "run")[-1]["loss"]


@pytest.mark.parametrize("action", ["warn", "stop"])
def test_a_failed_check_warns_or_stops(
    base: Path, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(base, action, f"--check_action={action}")
    monkeypatch.setattr("vireo.trainers.base.look", lambda *_: {"check/blindness": 0.0})
    if action == "stop":
        with pytest.raises(VireoError, match=r"step 1: .* does not see its pictures"):
            registry.find(settings.trainer)(settings)
    else:
        registry.find(settings.trainer)(settings)
        log = (base / action / "log.txt").read_text()
        assert "warning: other pixels change the log-probabilities" in log


def test_ranks_agree_where_one_has_no_row_or_no_picture(base: Path) -> None:
    """Every family on two ranks: pictures on one, text or nothing on the other."""
    names = ["qwen2_vl", "mllama", "minicpmv4_6"]
    for name in names[1:]:
        build(name, base / name / "model", size="test")
        write_rows(base / name / "data", [1, 0, 2, 1], SIZES)
    folders = [base, *(base / name for name in names[1:])]
    torchrun(2, "-m", "tests.ranks.alarms", *map(str, folders))
    for folder in folders:
        found = json.loads((folder / "alarms.json").read_text())
        for case, (first, second) in found.items():
            assert first == second, case
            assert ("check/blindness" in first) == (case != "text"), case
            assert complaint(first, torch.float32) is None, case


def test_the_same_run_twice_has_the_same_bits(base: Path) -> None:
    for out in ("first", "second"):
        settings = settings_for(base, out, "--deterministic", "--freeze_vision=false")
        try:
            registry.find(settings.trainer)(settings)
            assert torch.are_deterministic_algorithms_enabled()
        finally:
            torch.use_deterministic_algorithms(False)
    timed = ("seconds", "tokens_per_s", "images_per_s", "memory_gb")
    first, second = (
        [{n: v for n, v in r.items() if n not in timed} for r in records(base, out)]
        for out in ("first", "second")
    )
    assert first == second


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if f.has_vision])
def test_every_family_is_seen_to_see(name: str, tmp_path: Path) -> None:
    """Pixels permuted and inverted change the answer of each, and raise in none."""
    build(name, tmp_path / "model", size="test")
    write_rows(tmp_path / "data", [0, 2], SIZES)
    engine, rows = engine_and_rows(tmp_path)
    batches = micro_batches(rows, rows=2, can_mix=FAMILIES[name].can_mix)
    found = look(engine, batches)
    assert found["check/blindness"] > 1e-5
    assert complaint(found, torch.float32) is None
