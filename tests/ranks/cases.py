"""What several ranks must do as one rank does; each case returns plain numbers of rank 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vireo import parallel as parallel_module
from vireo.data.conversation import read_rows
from vireo.data.packing import by_rows, share
from vireo.data.ragged import Batch, Example
from vireo.data.render import Renderer
from vireo.models.build import ModelSpec, build_policy
from vireo.models.lora import Lora
from vireo.models.names import is_adapter, named_parameters
from vireo.training.engine import TrainEngine
from vireo.training.optimizer import adamw


@dataclass
class Case:
    run: Callable[[str, Path, Path], dict[str, Any]]
    worlds: tuple[int, ...] = ()


def engine_for(
    model: str,
    parallel: parallel_module.Parallel,
    *,
    packing: bool = True,
    frozen: frozenset[str] = frozenset(),
    recompute: bool = False,
    dtype: torch.dtype = torch.float32,
    lora: Lora | None = None,
) -> tuple[TrainEngine, Renderer]:
    """A train engine on the model, as a trainer builds it."""
    renderer = Renderer(model)
    spec = ModelSpec(
        model,
        frozen=frozen,
        shard=parallel.mesh is not None,
        recompute="full" if recompute else "none",
        dtype=dtype,
        lora=lora,
    )
    family = renderer.family
    dummy = renderer.dummy() if family.has_vision and family.can_mix else None
    policy, _ = build_policy(spec, renderer.config, renderer.family, parallel, dummy)
    engine = TrainEngine(
        policy,
        adamw(policy, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0),
        parallel,
        empty=Batch.of([renderer.empty()]),
        empty_images=None if family.can_mix else Batch.of([renderer.empty_with_image()]),
        packing=packing and family.can_pack,
        pad_id=renderer.pad_id,
        clip_grad_norm=1.0,
    )
    return engine, renderer


def gradients(engine: TrainEngine, micro_batches: list[Batch]) -> dict[str, torch.Tensor]:
    """Full gradients of one step's rows, without stepping."""
    parallel = engine.parallel
    weight = parallel.sum([sum(float(b.pack()["loss_weight"].sum()) for b in micro_batches)])[0]
    engine.optimizer.zero_grad()
    engine.accumulate(micro_batches, weight)
    out = {}
    for name, parameter in named_parameters(engine.policy.hf):
        if parameter.grad is not None:
            grad = parameter.grad
            out[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
    engine.optimizer.zero_grad()
    return out


def examples_of(renderer: Renderer, data: Path) -> list[Example]:
    rows = read_rows(data)
    return [renderer.example(rows[i]) for i in range(len(rows))]


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], floor: float = 1e-3) -> float:
    """Largest difference over all gradients, relative to each tensor's largest value or `floor`."""
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max() / b[n].abs().max().clamp(min=floor)) for n in a)


def gradients_over_ranks(model: str, data: Path, out: Path) -> dict[str, Any]:
    """This many ranks x their share, packed, padded and recomputed, against one rank's file."""
    parallel = parallel_module.start()
    reference = torch.load(out / "reference.pt")
    result = {}
    for packing, recompute in ((True, False), (False, False), (True, True)):
        engine, renderer = engine_for(model, parallel, packing=packing, recompute=recompute)
        mine = [
            example
            for i, example in enumerate(examples_of(renderer, data))
            if share(i, 1, parallel.world) == parallel.rank
        ]
        for rows in (1, 4):
            found = gradients(engine, by_rows(mine, rows))
            result[f"packing={packing} recompute={recompute} rows={rows}"] = furthest(
                found, reference
            )
    return result


# Pre-alignment trains the projector alone: nothing but images leads from the language model to it.
FROZEN = {
    "trained": frozenset[str](),
    "frozen": frozenset({"vision"}),
    "aligned": frozenset({"vision", "language", "embeddings", "head"}),
}


def text_beside_images(model: str, data: Path, out: Path) -> dict[str, Any]:
    """Rank 0 has only image rows, the others only text rows: the gradient of one rank."""
    parallel = parallel_module.start()
    result = {}
    for key, frozen in FROZEN.items():
        engine, renderer = engine_for(model, parallel, frozen=frozen)
        examples = examples_of(renderer, data)
        images = [e for e in examples if e.images]
        texts = [e for e in examples if not e.images]
        mine = images if parallel.rank == 0 else texts[parallel.rank - 1 :: parallel.world - 1]
        found = gradients(engine, by_rows(mine, 2))
        result[key] = furthest(found, torch.load(out / f"reference-{key}.pt"))
        step = engine.step(by_rows(mine, 2), 1.0)
        result[f"{key} loss"] = step.loss
    return result


def hybrid_is_full(model: str, data: Path, out: Path) -> dict[str, Any]:
    """Two groups of two ranks give the gradients of one rank."""
    parallel = parallel_module.start(sharding="hybrid", shard_size=2)
    engine, renderer = engine_for(model, parallel)
    mine = [
        e
        for i, e in enumerate(examples_of(renderer, data))
        if share(i, 1, parallel.world) == parallel.rank
    ]
    return {
        "difference": furthest(
            gradients(engine, by_rows(mine, 2)), torch.load(out / "reference.pt")
        )
    }


def load_memory(model: str, data: Path, out: Path) -> dict[str, Any]:
    """Every rank's parameters after loading equal the file's."""
    parallel = parallel_module.start()
    engine, _ = engine_for(model, parallel)
    full = {name: weight.clone() for name, weight in engine.named_weights()}
    reference = torch.load(out / "weights.pt")
    return {"difference": max(float((full[n] - reference[n]).detach().abs().max()) for n in full)}


ADAPTERS = Lora(4, 16, targets=("language", "mm_proj"))


def adapters_after(engine: TrainEngine, mine: list[Example], steps: int = 3) -> dict:
    """Adapters after a few steps (the first ones leave A alone, because B is zero)."""
    for _ in range(steps):
        engine.step(by_rows(mine, 2), 1.0)
    return {n: w.detach().clone() for n, w in engine.named_weights() if is_adapter(n)}


def adapters_over_ranks(model: str, data: Path, out: Path) -> dict[str, Any]:
    """Adapters on this many ranks become those of one rank."""
    parallel = parallel_module.start()
    engine, renderer = engine_for(model, parallel, lora=ADAPTERS)
    rows = examples_of(renderer, data)
    mine = [e for i, e in enumerate(rows) if share(i, 1, parallel.world) == parallel.rank]
    found, reference = adapters_after(engine, mine), torch.load(out / "reference-lora.pt")
    assert found.keys() == reference.keys()
    return {"difference": max(float((found[n] - reference[n]).abs().max()) for n in reference)}


CASES = {
    "gradients": Case(gradients_over_ranks, (2, 3)),
    "text_beside_images": Case(text_beside_images, (2, 3)),
    "hybrid": Case(hybrid_is_full, (4,)),
    "load": Case(load_memory, (2, 3)),
    "adapters": Case(adapters_over_ranks, (2, 3)),
}
