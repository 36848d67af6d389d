"""The trainer's log-probabilities of responses: what an engine's are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vireo.data.packing import micro_batches
from vireo.data.prompt import Prompt
from vireo.data.ragged import Batch, Example
from vireo.data.render import Renderer
from vireo.data.response import with_response
from vireo.models.heads import Softmax
from vireo.models.policy import Policy
from vireo.rollout.sample import Sample
from vireo.training.engine import TrainEngine


@dataclass(frozen=True)
class Shape:
    """What shares a forward: as many rows as `budget` tokens hold, or `rows` rows if that is None;
    end to end where the family can (`packing`), else padded."""

    rows: int = 8
    budget: int | None = None
    packing: bool = True


def score(
    model: Policy | TrainEngine,
    renderer: Renderer,
    pairs: Sequence[tuple[Prompt, Sample]],
    shape: Shape = Shape(),
) -> list[Tensor]:
    """log p of every response token, float32 [response] on the CPU, a pair each, of the softmax
    that the response was sampled from (see `Sampling`).

    A TrainEngine scores as it trains (its own packing and number format); collective then.
    RowError: a row is longer than the budget.
    """
    rows = [
        (
            with_response(prompt.example, sample.response_ids, renderer.positions),
            Softmax(sample.sampling.softmax_temperature, renderer.banned_ids),
        )
        for prompt, sample in pairs
    ]
    return score_examples(model, rows, renderer.pad_id, shape)


@torch.no_grad()
def score_examples(
    model: Policy | TrainEngine,
    rows: Sequence[tuple[Example, Softmax]],
    pad_id: int,
    shape: Shape = Shape(),
) -> list[Tensor]:
    """log p of the supervised tokens of each row, as `score` returns them.

    ValueError: rows of a TrainEngine have several softmaxes, which ranks could run in other orders.
    """
    engine = model if isinstance(model, TrainEngine) else None
    policy: Policy = model.policy if isinstance(model, TrainEngine) else model
    family, device = policy.family, next(policy.parameters()).device
    packing = engine.packing if engine else shape.packing and family.can_pack
    kinds: dict[Softmax, list[Example]] = {}
    for example, softmax in rows:
        kinds.setdefault(softmax, []).append(example)
    if engine and len(kinds) > 1:
        raise ValueError("rows of one temperature at a time, on several ranks")
    if engine and not kinds:
        kinds[Softmax()] = []
    policy.eval()
    found: dict[int, Tensor] = {}  # by the identity of a row's ids, which batches keep
    for softmax, examples in kinds.items():
        batches = micro_batches(
            examples,
            rows=shape.rows,
            budget=shape.budget,
            can_mix=family.can_mix,
            packing=packing,
        )
        if engine:
            scores = batch_scores(engine, batches, softmax)
        else:
            placed = (batch.to(device) for batch in batches)
            scores = [policy(b.pack() if packing else b.pad(pad_id), softmax) for b in placed]
        for batch, values in zip(batches, scores):
            found |= _by_row(batch, values.float().cpu())
    return [found[id(example.fields["input_ids"])] for example, _ in rows]


@torch.no_grad()
def batch_scores(
    engine: TrainEngine, batches: Sequence[Batch], softmax: Softmax, entropy: bool = False
) -> list[Tensor]:
    """log p of the supervised tokens of each of this rank's micro-batches, [N]; with `entropy`
    [2, N], entropies behind it. As it trains, in every rank's order; collective."""
    engine.policy.eval()
    found: dict[int, Tensor] = {}
    for batch, counts, _ in engine.in_step(batches):
        if counts:
            found[id(batch)] = engine.forward(batch, softmax=softmax, entropy=entropy)[0]
        else:
            engine.forward(batch)
    engine.reshard()
    return [found[id(batch)] for batch in batches]


def _by_row(batch: Batch, values: Tensor) -> dict[int, Tensor]:
    pieces = values.split([example.supervised for example in batch.examples()])
    return {id(ids): piece for ids, piece in zip(batch.columns["input_ids"].rows, pieces)}
