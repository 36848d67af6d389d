"""The most memory that a training step takes on one GPU, from a trace of its micro-batch.

Three moments can be the fullest: when the head's gradients are computed and all activations are
there; when those of the language model have become gradients and those of the tower are still
there; and the end of the backward pass, when all gradients are there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from vireo.models.heads import CHUNK
from vireo.models.recompute import RESERVE, layers_needed
from vireo.plan.watch import Layer, Trace

# A logit of the head's chunk in its backward pass: itself, and the four steps of the gradient of
# its softmax and of the chosen one that are alive together, all in float32.
LOGIT = 20


@dataclass(frozen=True)
class States:
    """What a GPU holds between two steps, and the gradients of a step, in bytes."""

    weights: float
    moments: float
    gradients: float  # shared out over GPUs
    summed: float  # whole, while micro-batches add up


@dataclass(frozen=True)
class Memory:
    """Bytes at the fullest moment. `gathered`: whole weights in bfloat16; `working`: logits of the
    head's chunk, or what one layer needs while its gradients are computed."""

    weights: float
    moments: float
    gradients: float
    gathered: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def states(trace: Trace, shards: int, lora: bool) -> States:
    """Float32 masters (bfloat16 of a base under adapters), AdamW's two moments, gradients: 16
    bytes of a trained weight, over `shards` GPUs."""
    trained, frozen = trace.trained, trace.weights - trace.trained
    return States(
        weights=(4 * trained + (2 if lora else 4) * frozen) / shards,
        moments=8 * trained / shards,
        gradients=4 * trained / shards,
        summed=4 * trained,
    )


def recomputed(trace: Trace, how: str, times: float, memory: float, held: States) -> int:
    """How many decoder layers --grad_ckpt `how` recomputes; `auto` has a micro-batch `times` as
    long as the trace's in mind, and `memory` bytes (see models.recompute, which counts alike)."""
    layers = [layer for layer in trace.layers if not layer.vision]
    if how == "auto":
        kept = times * max(layer.kept for layer in layers)
        given = times * max(layer.given for layer in layers)
        left = memory * (1 - RESERVE) - held.weights - held.moments - held.summed
        return layers_needed(len(layers), kept, given, left)
    if how.startswith("every-"):
        return -(-len(layers) // int(how.removeprefix("every-")))
    return len(layers) if how == "full" else 0


def fullest(trace: Trace, supervised: int, held: States, again: int, micro_batches: int) -> Memory:
    """The fullest moment of a step whose largest micro-batch is `trace`'s, with `supervised`
    positions, when `again` decoder layers are recomputed."""
    decoder = [layer for layer in trace.layers if not layer.vision]
    tower = [layer for layer in trace.layers if layer.vision]
    before = sum(layer.kept for layer in tower)
    before += sum(kept for part, kept in trace.kept.items() if part in ("vision", "projector"))
    share = again / len(decoder)
    behind = sum((1 - share) * layer.kept + share * layer.given for layer in decoder)
    behind += sum(kept for part, kept in trace.kept.items() if part not in ("vision", "projector"))

    # The root's own weights stay whole; of layers there are the one that runs and the next.
    layers = sum(layer.weights for layer in trace.layers)
    gathered = 2 * (trace.weights - layers) + 2 * 2 * max(layer.weights for layer in trace.layers)
    head = LOGIT * min(CHUNK, supervised) * trace.words
    more = micro_batches > 1
    summed = held.summed if more else 0.0
    of_tower = sum(layer.trained for layer in tower) / max(1, trace.trained)
    reduced = (1 - of_tower) * (held.summed if more else held.gradients)
    moments = [
        (summed, before + behind, max(head, _working(decoder, again > 0))),
        (max(summed, reduced), before, _working(tower, False)),
        (held.summed if more else held.gradients, 0.0, _working(decoder, again > 0)),
    ]
    return max(
        (
            Memory(held.weights, held.moments, gradients, gathered, activations, working)
            for gradients, activations, working in moments
        ),
        key=lambda memory: memory.total,
    )


def _working(layers: list[Layer], again: bool) -> float:
    """While a layer's gradients are computed: those of its weights, in bfloat16 and in float32 for
    the sum over GPUs, and what it keeps, made again."""
    return max((6 * layer.trained + (layer.kept if again else 0) for layer in layers), default=0.0)
