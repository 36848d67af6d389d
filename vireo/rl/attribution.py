"""Which difference between engine and trainer explains the gap between their log-probabilities.

One factor at a time is swapped in the trainer's scoring. The one whose swap brings the gap down to
the trainer's own noise floor is what the engine does differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from torch import Tensor

from vireo.rl.mismatch import Mismatch
from vireo.rl.score import Shape, score_examples
from vireo.rl.swaps import SWAPS, Pair, Row, Trainer, attention, without

MAX_ABS, MULT = 1e-4, 2e-5  # what the same tokens may differ by in float32
NOISE = 3.0  # times the noise floor that a gap may be and still be noise
MOST = 10.0  # a swap that brings a gap down by this explains most of it
ALONE = Shape(rows=1, packing=False)

Figures = dict[str, float]


@dataclass
class Tried:
    """A way to score and what came of it: figures of `Mismatch` to the engine, and of the noise
    floor. `rows`: how many it changed."""

    name: str
    meaning: str
    gap: Figures
    floor: Figures
    rows: int

    @property
    def mult(self) -> float:
        return self.gap["token_mult_prob_error"] - 1

    @property
    def is_noise(self) -> bool:
        """Whether the gap is no more than noise, by mean and by largest value."""
        mult = max(MULT, NOISE * (self.floor["token_mult_prob_error"] - 1))
        largest = max(MAX_ABS, NOISE * self.floor["max_abs"])
        return self.mult <= mult and self.gap["max_abs"] <= largest


def scored(trainer: Trainer, rows: Sequence[Row], packing: bool = True) -> list[Tensor]:
    """Log-probs of the rows as the trainer scores them, or with its rows padded."""
    shape = trainer.shape if packing else replace(trainer.shape, packing=False)
    return score_examples(trainer.policy, rows, trainer.renderer.pad_id, shape)


def gap(pairs: Sequence[Pair], logprobs: Sequence[Tensor]) -> Figures:
    """How far log-probs of the trainer are from the engine's."""
    return _figures(pairs, [sample.logprobs for _, sample in pairs], logprobs)


def noise_floor(
    trainer: Trainer, pairs: Sequence[Pair], rows: Sequence[Row], logprobs: Sequence[Tensor]
) -> Figures:
    """How far the trainer's log-probs are from its own of the same tokens, where each row is scored
    by itself, or with attention by plain matrix products: the larger of the two."""
    alone = score_examples(trainer.policy, rows, trainer.renderer.pad_id, ALONE)
    with attention(trainer.policy, "eager"):
        plain = scored(trainer, rows, packing=False)
    again = [[one.tolist() for one in other] for other in (alone, plain)]
    found = [_figures(pairs, one, logprobs) for one in again]
    return max(found, key=lambda figures: figures["token_mult_prob_error"])


def _figures(
    pairs: Sequence[Pair], one: Sequence[Sequence[float]], other: Sequence[Tensor]
) -> Figures:
    images, masks = [bool(p.pictures) for p, _ in pairs], [s.mask for _, s in pairs]
    return Mismatch.of(one, other, images, masks).figures()


def attribute(trainer: Trainer, pairs: Sequence[Pair], floor: Figures) -> list[Tried]:
    """Every swap that applies to the family and to one of the rows at least; `floor` is that of the
    model as it is.

    What the model cannot run without is never left out: the engine's model could not either.
    """
    rows = [trainer.row(pair) for pair in pairs]
    found = []
    for swap in (*SWAPS, *map(without, trainer.renderer.family.keys)):
        change = swap.row
        others = [change(trainer, p, r) if change else None for p, r in zip(pairs, rows)]
        changed = sum(other is not None for other in others)
        context = swap.around(trainer, pairs) if swap.around else nullcontext()
        if context is None or (change and not changed):
            continue
        given = [other or row for other, row in zip(others, rows)]
        try:
            with context:
                logprobs = scored(trainer, given, swap.packing)
                own = noise_floor(trainer, pairs, given, logprobs) if swap.noisy else floor
        except Exception:  # whatever a model's code does without what it needs
            if swap.needed:
                continue
            raise
        figures = gap(pairs, logprobs)
        found.append(Tried(swap.name, swap.meaning, figures, own, changed or len(rows)))
    return found


def explain(base: Tried, tried: Sequence[Tried]) -> tuple[str, list[str]]:
    """A sentence, and the names of the swaps that explain the gap: `noise floor` where there is no
    gap beyond noise; none where no swap does; several where these rows cannot tell them apart."""
    if base.is_noise:
        own = base.floor["token_mult_prob_error"] - 1
        says = f"explained by the noise floor: mult error - 1 is {base.mult:.2e}, the trainer's own"
        return f"{says} {own:.2e}", ["noise floor"]
    # In another number format the gap need not fall: two runs in bf16 are as far apart.
    full = [t for t in tried if t.is_noise and t.mult <= 2 * base.mult]
    least = min((t.mult for t in full), default=0.0)
    best = [t for t in full if t.mult <= max(MULT, NOISE * least)]
    if len(best) > 1:
        how = ", ".join(f"{t.name} (to {t.mult:.2e})" for t in best)
        says = f"several swaps explain it, from {base.mult:.2e}, and these rows cannot tell them"
        return f"{says} apart: {how}", [t.name for t in best]
    nearest = min(best or tried, key=lambda t: t.mult, default=base)
    change = f"mult error - 1 from {base.mult:.2e} to {nearest.mult:.2e}"
    if best:
        return f"explained by {nearest.name}: {nearest.meaning} ({change})", [nearest.name]
    if nearest.mult <= base.mult / MOST:
        how = f"{nearest.name}: {nearest.meaning} ({change}, which is not the floor)"
        return f"explained for the most part by {how}", [nearest.name]
    return f"no single swap explains it; the nearest is {nearest.name} ({change})", []
