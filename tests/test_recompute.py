"""Recomputed layers: which ones, the same gradients, and less kept for the backward pass."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ranks.cases import examples_of, gradients
from tests.rows import write_rows
from tests.tiny_models import renderer, tiny
from vireo import parallel as parallel_module
from vireo.data.ragged import Batch
from vireo.errors import InputError
from vireo.families.tiny import build
from vireo.models import recompute
from vireo.models.build import ModelSpec, build_policy
from vireo.models.recompute import Recomputed, by_memory, layers_needed
from vireo.settings import load_settings
from vireo.trainers.build import build_engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen2_vl", tmp_path_factory.mktemp("recompute"), size="test", num_hidden_layers=5)


def engine_with(model: Path, how: str, *flags: str) -> Any:
    settings = load_settings(
        [f"--vlm_model_name_or_path={model}", "--fsdp_enable=false", f"--grad_ckpt={how}", *flags]
    )
    made = renderer("qwen2_vl")
    changed = SimpleNamespace(
        **{n: getattr(made, n) for n in ("family", "pad_id", "dummy", "empty", "config")},
        model_path=str(model),
    )
    changed.config = made.config.__class__.from_pretrained(model)
    parallel = parallel_module.start(shard=False)
    return build_engine(settings, changed, parallel, packing=True, start_from=None)


def active(built: Any) -> list[bool]:
    layers = [m for m in built.engine.policy.modules() if isinstance(m, Recomputed)]
    return [layer.active for layer in layers]


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ("none", []),
        ("full", [True] * 5),
        ("every-2", [True, False, True, False, True]),
        ("every-4", [True, False, False, False, True]),
    ],
)
def test_which_layers_are_recomputed(model: Path, how: str, wanted: list[bool]) -> None:
    assert active(engine_with(model, how)) == wanted


def kept_bytes(built: Any, batch: Batch) -> int:
    """Storage that the graph of one forward holds, weights aside."""
    weights = {p.untyped_storage().data_ptr() for p in built.engine.policy.parameters()}
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = built.engine.forward(batch)
    del out
    return sum(held.values())


def test_gradients_stay_and_memory_falls_with_each_layer(model: Path, tmp_path: Path) -> None:
    rows = examples_of(renderer("qwen2_vl"), write_rows(tmp_path, [1, 0, 2]))
    batch = Batch.of(rows)
    found, kept = {}, {}
    for how in ("none", "every-2", "full"):
        built = engine_with(model, how)
        found[how] = gradients(built.engine, [batch])
        kept[how] = kept_bytes(built, batch)
    for name, grad in found["none"].items():
        assert torch.equal(grad, found["full"][name]), name
        assert torch.equal(grad, found["every-2"][name]), name
    assert kept["full"] < kept["every-2"] < kept["none"]


def test_how_many_layers_the_memory_asks_for() -> None:
    """Ten layers that keep 10 bytes each, or 1 when recomputed and 10 more while one is."""
    assert layers_needed(10, 10, 1, 100) == 0
    assert layers_needed(10, 10, 1, 99) == 2  # 8 x 10 + 2 x 1 + 10 = 92; with one it is 101
    assert layers_needed(10, 10, 1, 38) == 8
    assert layers_needed(10, 10, 1, 0) == 10


def test_auto_counts_what_a_layer_keeps(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted by layer is what the whole graph holds less."""
    seen: dict[str, float] = {}

    def spy(layers: int, kept: float, given: float, free: float) -> int:
        seen.update(kept=kept, given=given, free=free)
        return 3

    monkeypatch.setattr(recompute, "layers_needed", spy)
    built = engine_with(model, "auto", "--max_tokens_per_gpu=512", "--global_batch_size=4")
    assert active(built) == [False, True, False, True, True]
    assert "3 of 5 decoder layers are recomputed" in built.notices[-1]
    batch = Batch.of([renderer("qwen2_vl").empty(512)])
    three = kept_bytes(built, batch)
    for module in built.engine.policy.modules():
        if isinstance(module, Recomputed):
            module.active = False
    whole = kept_bytes(built, batch)
    assert whole - three == pytest.approx(3 * (seen["kept"] - seen["given"]), rel=0.1)


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_auto_foretells_what_a_layer_keeps_of_many_tokens(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a mask of all pairs of tokens (Gemma 3) and without one."""
    seen: dict[str, float] = {}
    monkeypatch.setattr(
        recompute, "layers_needed", lambda _layers, kept, *_: seen.update(kept=kept) or 0
    )
    made, spec = renderer(family), ModelSpec(tiny(family), shard=False, recompute="auto")
    policy, _ = build_policy(spec, made.config, made.family, parallel_module.start(shard=False))

    def run(size: int) -> torch.Tensor:
        return policy(Batch.of([made.empty(size)]).pack())

    by_memory(policy, 2048, run)
    layers = [m for m in policy.modules() if isinstance(m, Recomputed)]
    assert seen["kept"] == pytest.approx(recompute._kept_by_layer(layers, run, 2048)[0], rel=0.01)


def test_auto_recomputes_nothing_where_there_is_room(model: Path) -> None:
    built = engine_with(model, "auto", "--max_tokens_per_gpu=1000", "--global_batch_size=4")
    assert active(built) == [False] * 5


def test_auto_needs_a_budget(model: Path) -> None:
    with pytest.raises(InputError, match="--grad_ckpt auto needs --max_tokens_per_gpu"):
        engine_with(model, "auto")


def test_auto_leaves_the_weights_and_gradients_alone(model: Path) -> None:
    spec = ModelSpec(str(model), shard=False, recompute="auto")
    parallel = parallel_module.start(shard=False)
    config = renderer("qwen2_vl").config.__class__.from_pretrained(model)
    policy, _ = build_policy(spec, config, renderer("qwen2_vl").family, parallel)
    before = {n: p.clone() for n, p in policy.named_parameters()}
    made = renderer("qwen2_vl")
    by_memory(policy, 128, lambda size: policy(Batch.of([made.empty(size)]).pack()))
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in policy.named_parameters())
