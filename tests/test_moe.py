"""Experts: stored as published, loaded and written without loss, routed by their own row alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.launch import ROOT, environment, torchrun
from tests.ranks.cases import engine_for, examples_of, gradients
from tests.rows import write_rows
from tests.tiny_models import renderer, tiny
from vireo import parallel as parallel_module
from vireo.data.packing import by_rows
from vireo.data.ragged import Batch
from vireo.errors import InputError
from vireo.families import family_of, get_family
from vireo.families.tiny import build
from vireo.models.build import empty_policy, whole_model
from vireo.models.lora import Lora, add_adapters, fill_adapters, matched_modules
from vireo.models.policy import Policy
from vireo.settings import load_settings
from vireo.trainers import registry
from vireo.training.checkpoint import checkpoints
from vireo.training.export import export

FAMILIES = ["qwen3_moe", "qwen3_vl_moe"]
LAYERS = {"qwen3_moe": "model.layers", "qwen3_vl_moe": "model.language_model.layers"}
ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
SIZES = ((56, 56), (84, 56), (56, 140))


def plain(folder: Path | str) -> Any:
    """The model of a folder, by transformers alone, which must use all that it finds there."""
    config = transformers.AutoConfig.from_pretrained(folder)
    auto = getattr(transformers, family_of(config).auto_class)
    model, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def filled(folder: Path | str) -> Any:
    """The same model, filled as a trainer fills it."""
    config = transformers.AutoConfig.from_pretrained(folder)
    return whole_model(config, family_of(config), str(folder))


def edited(folder: Path | str, out: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    """A copy of a folder whose tensors `edit` has changed in place."""
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    edit(tensors)
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def same(a: Any, b: Any) -> bool:
    one, two = ({**m.state_dict(), **dict(m.named_buffers())} for m in (a, b))
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# -- on disk -------------------------------------------------------------------------------------


def expert_tensors(family: str, folder: Path | str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what the router and the experts of the last layer are stored as."""
    prefix = f"{LAYERS[family]}.1.mlp."
    tensors = load_file(Path(folder) / "model.safetensors")
    return {n[len(prefix) :]: tuple(t.shape) for n, t in tensors.items() if n.startswith(prefix)}


PUBLISHED = {  # four experts of width 48, hidden size 64
    "qwen3_moe": {
        "gate.weight": (4, 64),
        **{
            f"experts.{i}.{name}_proj.weight": (48, 64) for i in range(4) for name in ("gate", "up")
        },
        **{f"experts.{i}.down_proj.weight": (64, 48) for i in range(4)},
    },
    "qwen3_vl_moe": {
        "gate.weight": (4, 64),
        "experts.gate_up_proj": (4, 64, 96),
        "experts.down_proj": (4, 48, 64),
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_stored_as_published(family: str) -> None:
    assert expert_tensors(family, tiny(family)) == PUBLISHED[family]


def in_parts(folder: Path, out: Path) -> Path:
    """The model in files of 30 KB, each with some experts of a layer."""
    plain(folder).save_pretrained(out, max_shard_size="30KB")
    assert len(list(out.glob("*.safetensors"))) > 3
    return out


def in_bfloat16(folder: Path, out: Path) -> Path:
    return edited(folder, out, lambda t: t.update({n: v.bfloat16() for n, v in t.items()}))


def as_in_memory(folder: Path, out: Path) -> Path:
    """Experts fused, and not transposed, as transformers writes them when told to."""
    plain(folder).save_pretrained(out, save_original_format=False)
    return out


@pytest.mark.parametrize("stored", [shutil.copytree, in_parts, in_bfloat16, as_in_memory])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_filled_model_is_that_of_transformers_bit_for_bit(
    family: str, stored: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    """Twelve experts, whose numbers do not sort as words; and a layer without any."""
    sizes: dict[str, Any] = {"num_experts": 12, "num_hidden_layers": 3, "mlp_only_layers": [1]}
    whole = build(family, tmp_path / "whole", size="test", **sizes)
    folder = stored(whole, tmp_path / "stored")
    assert same(filled(folder), plain(folder))
    if stored is not in_bfloat16:
        assert same(filled(folder), plain(whole))


def expert(layer: int, number: int, name: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{number}.{name}_proj.weight"


def lose(*names: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: [tensors.pop(name) for name in names]


def put(name: str, change: Callable[[Tensor], Tensor], at: str = "") -> Callable:
    return lambda tensors: tensors.update({at or name: change(tensors[name])})


def skip_a_number(tensors: dict[str, Tensor]) -> None:
    for name in ("gate", "up", "down"):
        tensors[expert(0, 4, name)] = tensors.pop(expert(0, 2, name))


FUSED = "model.layers.0.mlp.experts.down_proj"
VL = "model.language_model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("family", "edit", "words"),
    [
        (
            *("qwen3_moe", lose(expert(1, 2, "up"))),
            f"the checkpoint lacks tensors: {expert(1, 2, 'up')}$",
        ),
        (
            *("qwen3_moe", lose(*(expert(0, i, "down") for i in range(4)))),
            "the checkpoint lacks tensors: model.layers.0.mlp.experts.down_proj$",
        ),
        ("qwen3_moe", skip_a_number, rf"lacks tensors: {expert(0, 2, '(gate|down)')}"),
        (
            *("qwen3_moe", put(expert(0, 1, "up"), torch.clone, expert(0, 4, "up"))),
            f"the checkpoint has unknown tensors: {expert(0, 4, 'up')}$",
        ),
        (
            *("qwen3_moe", put(expert(0, 1, "up"), lambda t: torch.zeros(4, 64, 48), FUSED)),
            f"the checkpoint has unknown tensors: {FUSED}$",
        ),
        (
            *("qwen3_moe", put(expert(0, 1, "gate"), lambda t: t[:, 1:])),
            rf"{expert(0, 1, 'gate')} has shape \(48, 63\), the config wants \(48, 64\)",
        ),
        (
            *("qwen3_moe", put(expert(1, 3, "down"), lambda t: t.to(torch.float8_e4m3fn))),
            f"{expert(1, 3, 'down')} is of type F8_E4M3, which cannot be trained",
        ),
        ("qwen3_vl_moe", lose(VL), f"the checkpoint lacks tensors: {VL}$"),
        (
            *("qwen3_vl_moe", put(VL, lambda t: t[:, 1:])),
            rf"{VL} has shape \(4, 63, 96\), the config wants \(4, 96, 64\)",
        ),
    ],
)
def test_experts_that_are_not_the_configs_are_refused_by_name(
    family: str, edit: Callable, words: str, tmp_path: Path
) -> None:
    folder = edited(tiny(family), tmp_path / "edited", edit)
    with pytest.raises(InputError, match=words):
        filled(folder)


def test_square_experts_that_may_be_stored_either_way_are_refused(tmp_path: Path) -> None:
    folder = build("qwen3_vl_moe", tmp_path / "square", size="test", moe_intermediate_size=32)
    with pytest.raises(
        InputError, match=r"gate_up_proj has shape \(4, 64, 64\).*must not be square"
    ):
        filled(folder)
    filled(build("qwen3_moe", tmp_path / "apart", size="test", moe_intermediate_size=32))


# -- two ranks -----------------------------------------------------------------------------------


def on_each_rank(base: Path) -> None:
    """Every family's weights after loading, and how a folder without an expert is refused."""
    parallel = parallel_module.start()
    for family in FAMILIES:
        for name, more in (("whole", {"recompute": "full"}), ("adapted", {"lora": Lora(4, 16)})):
            engine, _ = engine_for(str(base / family), parallel, **more)
            weights = {n: w.clone() for n, w in engine.named_weights() if ".lora_" not in n}
            if parallel.rank == 0:
                torch.save(weights, base / f"{family}-{name}.pt")
    try:
        engine_for(str(base / "lacking"), parallel)
    except InputError as error:
        (base / f"refused-{parallel.rank}.txt").write_text(str(error))
    parallel.close()


def test_two_ranks_load_what_one_loads_and_refuse_together(tmp_path: Path) -> None:
    for family in FAMILIES:
        shutil.copytree(tiny(family), tmp_path / family)
    edited(tiny("qwen3_moe"), tmp_path / "lacking", lose(expert(0, 3, "gate")))
    torchrun(2, "-m", "tests.test_moe", str(tmp_path))
    for family in FAMILIES:
        wanted = dict(plain(tmp_path / family).named_parameters())
        for name in ("whole", "adapted"):
            found = torch.load(tmp_path / f"{family}-{name}.pt")
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[n], wanted[n]) for n in wanted), (family, name)
    for rank in (0, 1):
        assert expert(0, 3, "gate") in (tmp_path / f"refused-{rank}.txt").read_text()


# -- one row and its neighbours ------------------------------------------------------------------


def rows_for(family: str, folder: Path) -> Path:
    counts = [1, 0, 2, 1] if get_family(family).has_vision else [0, 0, 0, 0]
    return write_rows(folder, counts, SIZES)


def routed(hf: Any, run: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """What `run` returns, and the experts of each token, layer by layer."""
    chosen: list[Tensor] = []
    routers = [m for n, m in hf.named_modules() if n.endswith(".mlp.gate")]
    hooks = [r.register_forward_hook(lambda *seen: chosen.append(seen[2][2])) for r in routers]
    with torch.no_grad():
        out = run()
    for hook in hooks:
        hook.remove()
    return out, [indices.sort(-1).values for indices in chosen]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_rows_experts_and_log_probs_are_those_of_the_row_alone(
    family: str, tmp_path: Path
) -> None:
    made, hf = renderer(family), plain(tiny(family))
    policy = Policy(hf, made.family, made.dummy() if made.family.has_vision else None)
    examples = examples_of(made, rows_for(family, tmp_path))
    together, experts = routed(hf, partial(policy, Batch.of(examples).pack()))
    alone = [routed(hf, partial(policy, Batch.of([one]).pack())) for one in examples]
    assert (together - torch.cat([logprobs for logprobs, _ in alone])).abs().max() < 1e-5
    assert len(experts) == 2
    for layer, indices in enumerate(experts):
        assert torch.equal(indices, torch.cat([chosen[layer] for _, chosen in alone]))
        assert indices.unique().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_vl"])
def test_the_loss_of_a_row_is_the_models_own_without_a_balancing_loss(
    family: str, tmp_path: Path
) -> None:
    made, own = renderer(family), plain(tiny(family))
    engine, _ = engine_for(tiny(family), parallel_module.start(shard=False))
    for one in examples_of(made, rows_for(family, tmp_path)):
        inputs = Batch.of([one]).pad(made.pad_id)
        inputs = {n: v for n, v in inputs.items() if n not in ("loss_weight", "positions")}
        with torch.no_grad():
            wanted = own(**inputs)
            found = -engine.forward(Batch.of([one]))[0].mean()
        assert getattr(wanted, "aux_loss", None) is None
        assert float(found) == pytest.approx(float(wanted.loss), abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_router_and_experts_have_gradients(family: str, tmp_path: Path) -> None:
    engine, made = engine_for(tiny(family), parallel_module.start(shard=False))
    found = gradients(engine, by_rows(examples_of(made, rows_for(family, tmp_path)), 4))
    for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj"):
        for layer in (0, 1):
            grad = found[f"{LAYERS[family]}.{layer}.mlp.{name}"]
            assert bool((grad.flatten(1).abs().amax(1) > 0).all()), name  # of each expert


# -- adapters ------------------------------------------------------------------------------------


def empty(folder: Path | str) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    return empty_policy(config, family_of(config)).hf


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_go_on_attention_by_default(family: str) -> None:
    chosen = add_adapters(empty(tiny(family)), get_family(family), Lora(4, 8))
    assert chosen == [f"{LAYERS[family]}.{i}.{name}" for i in (0, 1) for name in ATTENTION]


@pytest.mark.parametrize(("family", "dense"), [("qwen3_moe", 0), ("qwen3_vl_moe", 3)])
def test_dense_layers_among_experts(family: str, dense: int, tmp_path: Path) -> None:
    """PEFT takes their names for those of experts in one family: there they get no adapter."""
    folder = build(family, tmp_path / "model", size="test", mlp_only_layers=[1])
    chosen = add_adapters(empty(folder), get_family(family), Lora(4, 8))
    assert len(chosen) == 2 * len(ATTENTION) + dense
    assert sum(f"{LAYERS[family]}.1.mlp." in name for name in chosen) == dense


@pytest.mark.parametrize(
    ("family", "target", "words"),
    [
        ("qwen3_moe", "gate", "gate is of type Qwen3MoeTopKRouter, and adapters go on linear"),
        ("qwen3_moe", "experts", "experts is of type Qwen3MoeExperts, and adapters go on linear"),
        ("qwen3_moe", "up_proj", "up_proj is in the tensor mlp.experts.gate_up_proj, and adapters"),
        ("qwen3_moe", "gate_up_proj", "gate_up_proj is in the tensor mlp.experts.gate_up_proj"),
        ("qwen3_moe", "down_proj", "down_proj is in the tensor mlp.experts.down_proj, and"),
        ("qwen3_vl_moe", "down_proj", "down_proj is in the tensor mlp.experts.down_proj, and"),
        ("qwen3_vl_moe", "gate", "gate is of type Qwen3VLMoeTextTopKRouter, and adapters go"),
    ],
)
def test_experts_and_router_take_no_adapter(family: str, target: str, words: str) -> None:
    lora = Lora(4, 8, targets=("q_proj", target))
    with pytest.raises(InputError, match=f"--lora_target_modules {words}.* modules: k_proj"):
        matched_modules(empty(tiny(family)), get_family(family), lora)


# -- exports -------------------------------------------------------------------------------------


def train(family: str, base: Path, out: str, *more: str) -> Path:
    """The last checkpoint of two steps."""
    settings = load_settings(
        [
            f"--trainer={'fsdp_vlm' if get_family(family).has_vision else 'fsdp'}",
            f"--vlm_model_name_or_path={tiny(family)}",
            f"--train_file={base / family / 'rows.json'}",
            *(f"--output_dir={base / family / out}", "--fsdp_enable=false", "--max_steps=2"),
            *("--per_device_train_batch_size=4", "--num_workers=0", "--lr=1e-2"),
            *("--report_to=none", *more),
        ]
    )
    assert registry.find(settings.trainer)(settings) == 0
    return checkpoints(base / family / out / "checkpoints")[-1]


def logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def plain_logits() -> None:
    """In a process of its own: the logits of each exported folder, by transformers alone."""
    base = Path(sys.argv[1])
    for family in FAMILIES:
        inputs = torch.load(base / family / "inputs.pt")
        for name in ("export", "merged"):
            torch.save(
                [logits(plain(base / family / name), one) for one in inputs],
                base / family / f"{name}.pt",
            )


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both families trained whole and with adapters, exported, and read in another process."""
    base = tmp_path_factory.mktemp("moe")
    for family in FAMILIES:
        made, rows = renderer(family), rows_for(family, base / family)
        batches = [Batch.of([one]).pad(made.pad_id) for one in examples_of(made, rows)]
        ours = ("labels", "loss_weight", "positions")
        inputs = [{n: v for n, v in one.items() if n not in ours} for one in batches]
        torch.save(inputs, base / family / "inputs.pt")
        export(train(family, base, "whole"), base / family / "export")
        adapted = train(family, base, "adapted", "--lora_r=4")
        export(adapted, base / family / "adapter")
        export(adapted, base / family / "merged", merge_lora=True)
    code = "from tests.test_moe import plain_logits; plain_logits()"
    command = [sys.executable, "-c", code, str(base)]
    subprocess.run(command, env=environment(), cwd=ROOT, check=True, timeout=240)
    return base


@pytest.mark.parametrize("name", ["export", "merged"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_has_the_published_layout(exported: Path, family: str, name: str) -> None:
    folder = exported / family / name
    assert expert_tensors(family, folder) == PUBLISHED[family]
    before, after = (load_file(Path(f) / "model.safetensors") for f in (tiny(family), folder))
    assert before.keys() == after.keys()
    moved = {n for n in before if not torch.equal(before[n], after[n])}
    experts = {n for n in before if ".experts." in n}
    assert moved & experts == (experts if name == "export" else set())


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_computes_the_same_in_another_process(exported: Path, family: str) -> None:
    folder = exported / family
    inputs = torch.load(folder / "inputs.pt")
    for one, wanted in zip(inputs, torch.load(folder / "export.pt"), strict=True):
        assert torch.equal(logits(filled(folder / "export").eval(), one), wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_adapters_and_adapters_alone_compute_the_same(exported: Path, family: str) -> None:
    import peft

    folder = exported / family
    engine, _ = engine_for(tiny(family), parallel_module.start(shard=False), lora=Lora(4, 16))
    fill_adapters(engine.policy.hf, folder / "adapter")
    trained = engine.policy.hf.eval()
    adapted = peft.PeftModel.from_pretrained(plain(tiny(family)), folder / "adapter").eval()
    inputs = torch.load(folder / "inputs.pt")
    for one, merged in zip(inputs, torch.load(folder / "merged.pt"), strict=True):
        wanted = logits(trained, one)
        assert (merged - wanted).abs().max() < 1e-4
        assert (logits(adapted, one) - wanted).abs().max() < 1e-4
        assert (logits(plain(tiny(family)), one) - wanted).abs().max() > 1e-2


def test_the_adapters_config_names_attention(exported: Path) -> None:
    config = json.loads((exported / "qwen3_moe" / "adapter" / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == ["k_proj", "o_proj", "q_proj", "v_proj"]


if __name__ == "__main__":
    on_each_rank(Path(sys.argv[1]))
