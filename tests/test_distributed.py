"""Several ranks against one: gradients, text-only ranks, loading. One torchrun per world size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.launch import torchrun
from tests.ranks.cases import (
    ADAPTERS,
    FROZEN,
    adapters_after,
    engine_for,
    examples_of,
    furthest,
    gradients,
)
from tests.rows import write_rows
from vireo import parallel as parallel_module
from vireo.data.packing import by_rows
from vireo.families.tiny import build

SIZES = ((56, 56), (84, 56), (56, 140))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A tiny model, eight rows with 0 to 2 images, and one rank's own gradients to compare with."""
    base = tmp_path_factory.mktemp("ranks")
    model = build("qwen2_5_vl", base / "model", size="test")
    data = write_rows(base / "data", [1, 0, 2, 0, 1, 0, 0, 1], SIZES)
    parallel = parallel_module.start(shard=False)
    engine, renderer = engine_for(str(model), parallel)
    examples = examples_of(renderer, data)
    torch.save(gradients(engine, by_rows(examples, 8)), base / "reference.pt")
    torch.save({n: w.clone() for n, w in engine.named_weights()}, base / "weights.pt")
    for key, frozen in FROZEN.items():
        engine, _ = engine_for(str(model), parallel, frozen=frozen)
        torch.save(gradients(engine, by_rows(examples, 1)), base / f"reference-{key}.pt")
    engine, _ = engine_for(str(model), parallel, lora=ADAPTERS)
    torch.save(adapters_after(engine, examples), base / "reference-lora.pt")
    return base, model, data


def results(prepared: tuple[Path, Path, Path], world: int, names: list[str]) -> dict[str, dict]:
    base, model, data = prepared
    out = base / f"world-{world}"
    if not out.exists():
        out.mkdir()
        for file in base.glob("*.pt"):
            (out / file.name).symlink_to(file)
        torchrun(world, "-m", "tests.ranks.worker", str(out), str(model), str(data))
    found = {name: json.loads((out / f"{name}.json").read_text()) for name in names}
    for result in found.values():
        assert "error" not in result, result["error"]
    return found


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("packing", [True, False])
def test_gradient_does_not_depend_on_micro_batches(prepared, rows: int, packing: bool) -> None:
    base, model, data = prepared
    engine, renderer = engine_for(str(model), parallel_module.start(shard=False), packing=packing)
    found = gradients(engine, by_rows(examples_of(renderer, data), rows))
    assert furthest(found, torch.load(base / "reference.pt")) < 1e-5


def test_frozen_parts_have_no_gradient_and_no_optimizer_state(prepared) -> None:
    base = prepared[0]
    found = torch.load(base / "reference-frozen.pt")
    assert found
    towers = [name for name in found if "visual" in name and "merger" not in name]
    assert not towers
    assert any("merger" in name for name in found)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_give_the_gradient_of_one_rank(prepared, world: int) -> None:
    found = results(prepared, world, ["gradients", "load", "adapters"])
    assert found["adapters"]["difference"] < 1e-5
    assert found["load"]["difference"] == 0
    assert len(found["gradients"]) == 6
    assert max(found["gradients"].values()) < 1e-5, found["gradients"]


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_without_images_neither_hangs_nor_changes_the_result(prepared, world: int) -> None:
    found = results(prepared, world, ["text_beside_images"])["text_beside_images"]
    assert {key: found[key] for key in FROZEN if found[key] >= 1e-5} == {}
    assert found["trained loss"] == pytest.approx(found["frozen loss"], rel=1e-6)


@pytest.mark.slow
def test_hybrid_sharding_gives_the_gradient_of_one_rank(prepared) -> None:
    assert results(prepared, 4, ["hybrid"])["hybrid"]["difference"] < 1e-5


def test_bfloat16_computes_in_bfloat16_but_rotary_angles_stay_float32(prepared) -> None:
    _, model, data = prepared
    parallel = parallel_module.start()
    try:
        engine, renderer = engine_for(str(model), parallel, dtype=torch.bfloat16)
        seen = {}

        def look(name: str):
            def hook(_module, arguments, options) -> None:
                cos, _ = options["position_embeddings"]
                seen[name] = (arguments[0].dtype, cos.dtype)

            return hook

        visual, language = engine.policy.hf.model.visual, engine.policy.hf.model.language_model
        visual.blocks[0].register_forward_pre_hook(look("vision"), with_kwargs=True)
        language.layers[0].register_forward_pre_hook(look("language"), with_kwargs=True)
        batch = by_rows(examples_of(renderer, data)[:1], 1)[0]
        logprobs, _ = engine.forward(batch)
        logprobs.sum().backward()
        assert seen["vision"] == (torch.bfloat16, torch.float32)
        assert seen["language"][0] == torch.bfloat16
        assert logprobs.dtype == torch.float32
        assert all(p.dtype == torch.float32 for p in engine.policy.parameters())
        engine.evaluate([batch])
        weights = dict(engine.named_weights())  # after a forward alone: still the masters
        assert all(weight.dtype == torch.float32 for weight in weights.values())
    finally:
        parallel.close()
