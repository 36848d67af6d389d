"""Parts of a model: what is frozen has no gradient, no state, no backward; rates are per part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks.cases import engine_for, examples_of, gradients
from tests.rows import write_rows
from vireo import parallel as parallel_module
from vireo.data.packing import by_rows
from vireo.data.render import Renderer
from vireo.errors import InputError
from vireo.families.tiny import build
from vireo.models.names import named_parameters, part_of
from vireo.settings import load_settings
from vireo.trainers.build import frozen_parts
from vireo.training.optimizer import adamw, schedule

PARTS = ("vision", "projector", "language", "embeddings", "head")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("parts")
    model = build("qwen2_5_vl", folder / "model", size="test", tie_word_embeddings=False)
    return str(model), write_rows(folder / "data", [1, 0, 2, 1])


def engine_of(base: tuple[str, Path], *frozen: str):
    parallel = parallel_module.start(shard=False)
    engine, renderer = engine_for(base[0], parallel, frozen=frozenset(frozen))
    return engine, by_rows(examples_of(renderer, base[1]), 2)


def frozen_by(*flags: str) -> set[str]:
    return set(frozen_parts(load_settings(["--vlm_model_name_or_path=m", *flags])))


@pytest.mark.parametrize("part", PARTS)
def test_a_frozen_part_has_no_gradient_and_no_optimizer_state(base, part: str) -> None:
    engine, batches = engine_of(base, part)
    before = {n: w.detach().clone() for n, w in named_parameters(engine.policy.hf)}
    moved = {part_of(name, engine.policy.family) for name in gradients(engine, batches)}
    assert moved == {*PARTS} - {part}
    engine.step(batches, 1.0)
    held = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
    for name, parameter in named_parameters(engine.policy.hf):
        mine = part_of(name, engine.policy.family) == part
        assert (id(parameter) in held) != mine, name
        assert torch.equal(parameter, before[name]) == mine, name


def test_a_frozen_tower_costs_no_backward(base) -> None:
    for frozen, wanted in (("vision", False), ("projector", True)):
        engine, batches = engine_of(base, frozen)
        seen = []
        visual = engine.policy.hf.model.visual
        visual.blocks[-1].register_forward_hook(lambda _m, _i, out, s=seen: s.append(out))
        engine.forward(batches[0])
        assert [out.requires_grad for out in seen] == [wanted]


def test_embeddings_freeze_with_the_language_model_unless_told_otherwise() -> None:
    assert frozen_by() == {"vision"}
    assert frozen_by("--freeze_vision=false") == set()
    assert frozen_by("--freeze_language") == {"vision", "language", "embeddings", "head"}
    assert frozen_by("--freeze_language", "--freeze_embeddings=false") == {"vision", "language"}
    assert frozen_by("--freeze_embeddings") == {"vision", "embeddings", "head"}


def test_each_part_has_its_own_rate(base) -> None:
    engine, batches = engine_of(base)
    rates = {"vision": 1e-4, "projector": 2e-3, "embeddings": 0.0, "head": 0.0}
    engine.optimizer = adamw(
        engine.policy, lr=1e-3, betas=(0.9, 0.99), eps=1e-12, weight_decay=0.0, part_lr=rates
    )
    before = {n: w.detach().clone() for n, w in named_parameters(engine.policy.hf)}
    engine.step(batches, 0.5)
    for name, weight in named_parameters(engine.policy.hf):
        moved = float((weight - before[name]).detach().abs().max())
        wanted = 0.5 * rates.get(part_of(name, engine.policy.family) or "", 1e-3)
        # Adam's first step is the rate itself wherever there is a gradient.
        assert moved == pytest.approx(wanted, rel=1e-2), name


def test_a_step_without_pictures_leaves_the_tower_alone(base, tmp_path: Path) -> None:
    engine, batches = engine_of(base)
    engine.step(batches, 1.0)  # from here on AdamW has a momentum
    before = {n: w.detach().clone() for n, w in named_parameters(engine.policy.hf)}
    renderer = Renderer(base[0])
    texts = by_rows(examples_of(renderer, write_rows(tmp_path / "data", [0, 0])), 2)
    engine.step(texts, 1.0)
    for name, weight in named_parameters(engine.policy.hf):
        still = part_of(name, engine.policy.family) in ("vision", "projector")
        assert torch.equal(weight, before[name]) == still, name


def test_with_every_part_frozen_there_is_nothing_to_train(base) -> None:
    with pytest.raises(InputError, match="every part of the model is frozen"):
        engine_of(base, *PARTS)


def test_the_schedule_is_a_share_of_the_rate() -> None:
    cosine = schedule("cosine", 10, 0.2)
    assert [cosine(0), cosine(1), cosine(2)] == [0.5, 1.0, 1.0]
    assert cosine(6) == pytest.approx(0.5)
    assert schedule("linear", 10, 0.0)(5) == pytest.approx(0.5)
    assert schedule("constant", 10, 0.5)(9) == 1.0
