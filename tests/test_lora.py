"""Adapters: only what was asked trains, exports compute what training computed, resume is exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.ranks.cases import engine_for, examples_of
from tests.rows import write_rows
from vireo import parallel as parallel_module
from vireo.data.packing import by_rows
from vireo.data.ragged import Batch
from vireo.errors import InputError
from vireo.evaluation import evaluate_files
from vireo.families import get_family
from vireo.families.tiny import build
from vireo.models.build import empty_policy
from vireo.models.lora import Lora, add_adapters, matched_modules, summary
from vireo.models.names import is_adapter
from vireo.settings import load_settings
from vireo.trainers import registry
from vireo.training.checkpoint import checkpoints, model_tensors
from vireo.training.export import export

SIZES = ((56, 56), (84, 56), (56, 140))
LORA = Lora(4, 16)  # as the settings of `train` make it


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen2_5_vl", tmp_path_factory.mktemp("lora") / "model", size="test")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("lora-rows"), [1, 0, 2, 0, 1, 0, 0, 1], SIZES)


@pytest.fixture(scope="module")
def plain(base: Path):
    config = transformers.AutoConfig.from_pretrained(base)
    return lambda: empty_policy(config, get_family("qwen2_5_vl")).hf


def match(plain, *targets: str, **more) -> list[str]:
    lora = Lora(4, 8, targets=targets, **more) if targets else Lora(4, 8, **more)
    return matched_modules(plain(), get_family("qwen2_5_vl"), lora)


def train(base: Path, rows: Path, out: Path, *more: str) -> Path:
    """The last checkpoint of a short run with adapters."""
    settings = load_settings(
        [
            f"--vlm_model_name_or_path={base}",
            f"--train_file={rows}",
            f"--output_dir={out}",
            "--per_device_train_batch_size=4",
            "--lr=1e-2",
            "--num_workers=0",
            *([] if any("--lora_adapter" in flag for flag in more) else ["--lora_r=4"]),
            "--report_to=none",
            *more,
        ]
    )
    assert registry.find(settings.trainer)(settings) == 0
    return checkpoints(out / "checkpoints")[-1]


def logprobs(hf: torch.nn.Module, example) -> torch.Tensor:
    """log p of every next token of one row, by a plain transformers model."""
    inputs = Batch.of([example]).pad(0)
    kept = {n: v for n, v in inputs.items() if n not in ("labels", "loss_weight", "positions")}
    with torch.no_grad():
        return torch.log_softmax(hf(**kept).logits.float(), -1)


# -- which modules -------------------------------------------------------------------------------


def test_the_default_is_the_language_models_linear_layers(plain) -> None:
    found = match(plain)
    assert {name.split(".")[-1] for name in found} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    assert all(name.startswith("model.language_model.layers.") for name in found)
    assert len(found) == 7 * 2


def test_words_for_parts_and_names_of_modules(plain) -> None:
    tower, projector = match(plain, "vision_tower"), match(plain, "mm_proj")
    assert tower
    assert all("visual.blocks" in name for name in tower)
    assert all("visual.merger" in name for name in projector)
    assert match(plain, "q_proj", "mm_proj") == [
        *projector,
        *(f"model.language_model.layers.{i}.self_attn.q_proj" for i in range(2)),
    ]
    assert match(plain, "model.language_model.layers.1.mlp") == [
        f"model.language_model.layers.1.mlp.{n}_proj" for n in ("gate", "up", "down")
    ]
    without = match(plain, "language", ignores=("down_proj",))
    assert len(without) == 6 * 2
    assert not any("down_proj" in name for name in without)


def test_a_bare_name_leaves_frozen_parts_alone(plain) -> None:
    everywhere = match(plain, "gate_proj")
    assert any("visual" in name for name in everywhere)
    closed = match(plain, "gate_proj", closed=frozenset({"vision"}))
    assert closed
    assert not any("visual" in name for name in closed)


@pytest.mark.parametrize(
    ("targets", "ignores", "words"),
    [
        (("q_prj",), (), "--lora_target_modules q_prj: no such linear module.*did you mean q_proj"),
        (("qkv",), (), "--lora_target_modules qkv: only vision_tower has it, which is frozen"),
        (("proj2", "q_proj"), (), "proj2: no such linear module"),
        (("embed_tokens",), (), "embed_tokens is of type Embedding, and adapters go on linear"),
        (("language",), ("nothing",), "--lora_ignore_modules nothing"),
        (("q_proj",), ("language",), "leaves no module"),
    ],
)
def test_a_name_without_a_match_is_an_error(plain, targets, ignores, words) -> None:
    closed = frozenset({"vision"})
    with pytest.raises(InputError, match=words):
        match(plain, *targets, ignores=ignores, closed=closed)


def test_the_summary_counts_layers_together() -> None:
    names = [f"a.layers.{i}.q" for i in (0, 1, 2, 5)] + ["b.proj", "b.layers.3.x"]
    assert summary(names) == "a.layers.[0-2,5].q, b.proj, b.layers.3.x"


# -- training ------------------------------------------------------------------------------------


def test_only_adapters_train_and_the_base_is_kept_in_the_compute_type(base, rows) -> None:
    parallel = parallel_module.start()
    try:
        engine, renderer = engine_for(str(base), parallel, lora=LORA, dtype=torch.bfloat16)
        before = {n: w.clone() for n, w in engine.named_weights()}
        for name, parameter in engine.policy.hf.named_parameters():
            assert parameter.requires_grad == is_adapter(name), name
            wanted = torch.float32 if is_adapter(name) else torch.bfloat16
            assert parameter.dtype == wanted, name
        for _ in range(2):  # B is zero at first, so A moves from the second step on
            engine.step(by_rows(examples_of(renderer, rows), 4), 1.0)
        for name, weight in engine.named_weights():
            assert torch.equal(weight, before[name]) != is_adapter(name), name
        state = engine.optimizer.state_dict()["state"]
        assert len(state) == sum(is_adapter(name) for name in before)
    finally:
        parallel.close()


def test_adapter_and_merged_exports_compute_what_training_computed(base, rows, tmp_path) -> None:
    import peft

    last = train(base, rows, tmp_path / "run", "--max_steps=3")
    engine, renderer = engine_for(str(base), parallel_module.start(shard=False), lora=LORA)
    engine.policy.hf.eval()
    adapter = export(last, tmp_path / "adapter")
    assert not (adapter / "model.safetensors").exists()
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == sorted(
        f"model.language_model.layers.{i}.{name}"
        for i in range(2)
        for name in (
            *(f"self_attn.{n}_proj" for n in "qkvo"),
            *(f"mlp.{n}_proj" for n in ("gate", "up", "down")),
        )
    )
    auto = transformers.AutoModelForImageTextToText
    from vireo.models.lora import fill_adapters

    fill_adapters(engine.policy.hf, adapter)
    merged = auto.from_pretrained(export(last, tmp_path / "merged", merge_lora=True)).eval()
    adapted = peft.PeftModel.from_pretrained(auto.from_pretrained(base), adapter).eval()
    plain = auto.from_pretrained(base).eval()
    for example in examples_of(renderer, rows)[:4]:
        wanted = logprobs(engine.policy.hf, example)
        assert (logprobs(merged, example) - wanted).abs().max() < 1e-5
        assert (logprobs(adapted, example) - wanted).abs().max() < 1e-5
        assert (logprobs(plain, example) - wanted).abs().max() > 1e-2  # and it did learn
    for folder in (adapter, tmp_path / "merged"):
        assert (folder / "chat_template.jinja").exists()
        assert (folder / "README.md").exists()


def test_resume_is_exact_and_checkpoints_hold_adapters_alone(base, rows, tmp_path) -> None:
    whole = train(base, rows, tmp_path / "whole", "--max_steps=4", "--lr_scheduler=constant")
    train(base, rows, tmp_path / "parted", "--max_steps=2", "--lr_scheduler=constant")
    again = train(
        *(base, rows, tmp_path / "parted", "--max_steps=4", "--lr_scheduler=constant"),
        "--resume=auto",
    )
    one, two = (
        load_file(export(p, tmp_path / f"out-{i}") / "adapter_model.safetensors")
        for i, p in enumerate((whole, again))
    )
    assert one.keys() == two.keys()
    assert max((one[n] - two[n]).abs().max() for n in one) < 1e-6
    assert len(model_tensors(whole)) == len(one)
    assert all(is_adapter(name) for name in model_tensors(whole))


def test_resume_with_other_adapters_or_another_base_is_refused(base, rows, tmp_path) -> None:
    train(base, rows, tmp_path / "run", "--max_steps=1")
    go_on = (tmp_path / "run", "--max_steps=2", "--resume=auto")
    with pytest.raises(InputError, match="has adapters on 14 modules, not on these 2"):
        train(base, rows, *go_on, "--lora_target_modules=q_proj")
    with pytest.raises(InputError, match="--lora_r 4, found 8"):
        train(base, rows, *go_on, "--lora_r=8")
    with pytest.raises(InputError, match="holds adapters: resume with the same --lora_r"):
        train(base, rows, *go_on, "--lora_r=0")
    other = build("qwen2_5_vl", tmp_path / "other", size="test", seed=1)
    with pytest.raises(InputError, match="is not the model that"):
        train(other, rows, *go_on)
    last = checkpoints(tmp_path / "run" / "checkpoints")[-1]
    with pytest.raises(InputError, match="is not the model that"):
        export(last, tmp_path / "merged", merge_lora=True, base=str(other))


def test_training_goes_on_from_an_exported_adapter(base, rows, tmp_path) -> None:
    last = train(base, rows, tmp_path / "first", "--max_steps=2")
    adapter = export(last, tmp_path / "adapter")
    settings = (f"--lora_adapter={adapter}", "--lr=0", "--max_steps=1")
    other = export(train(base, rows, tmp_path / "second", *settings), tmp_path / "again")
    one, two = (load_file(p / "adapter_model.safetensors") for p in (adapter, other))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[n], two[n]) for n in one)

    resolved = ["--config", str(tmp_path / "second" / "settings.yaml")]
    again = load_settings([*resolved, f"--output_dir={tmp_path / 'again-run'}"])
    assert registry.find(again.trainer)(again) == 0

    strange = {n.replace("base_model.model.", "base_model."): v for n, v in one.items()}
    save_file(strange, adapter / "adapter_model.safetensors")
    with pytest.raises(InputError, match=r"no such linear module|has no place for"):
        train(base, rows, tmp_path / "third", *settings)
    with pytest.raises(InputError, match="leave --lora_alpha out"):
        train(base, rows, tmp_path / "fourth", *settings, "--lora_alpha=8")


def test_an_adapter_folder_can_be_evaluated(base, rows, tmp_path) -> None:
    adapter = export(train(base, rows, tmp_path / "run", "--max_steps=1"), tmp_path / "adapter")
    assert evaluate_files(model=str(adapter), eval_file=str(rows), limit=2)["rows"] == 2


def test_adapters_start_as_the_base(base, rows) -> None:
    parallel = parallel_module.start(shard=False)
    adapted, renderer = engine_for(str(base), parallel, lora=LORA)
    plain, _ = engine_for(str(base), parallel)
    batch = by_rows(examples_of(renderer, rows), 8)[0]
    assert torch.equal(adapted.forward(batch)[0], plain.forward(batch)[0])
    assert len(add_adapters(plain.policy.hf, plain.policy.family, LORA)) == 14
