"""The work of a training step: floating-point operations of its matrix products, by part.

A product of [m, k] and [k, n] is 2 m n k. What the mathematics of the step needs is counted, not
what a run happens to compute: causal attention is half a square, recomputed layers count once, the
head sees supervised positions alone. The backward pass has the gradient of a weight where it
trains, and that of an input where something before it trains: a frozen part between a trained one
and the loss has the latter alone, a frozen part before all trained ones neither. (Kaplan et al.
2020, arXiv:2001.08361, and Chowdhery et al. 2022, arXiv:2204.02311, appendix B, count so.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vireo.models.lora import Lora
from vireo.plan.trace import Shape
from vireo.plan.watch import Load, Product

PARTS = ("vision", "vision attention", "projector", "language", "language attention", "head")


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of `PARTS`, forward and backward."""

    forward: dict[str, float]
    backward: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.forward.values()) + sum(self.backward.values())


def step_flops(
    config: Any, load: Load, *, frozen: frozenset[str] = frozenset(), lora: Lora | None = None
) -> Flops:
    """Forward and backward of all rows of `load`, over all ranks, by a transformers `config`.

    `frozen`: parts as in `models.build.ModelSpec` (vision, projector, language, embeddings, head);
    with `lora` the whole base is. InputError: a family that is not counted, by name, or images
    given in a form that is not the family's.
    """
    return of_products(Shape(config, frozen, lora).trace(load).products)


def of_products(products: list[Product]) -> Flops:
    """The sums by part."""
    flops = Flops(dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0))
    for product in products:
        part = f"{product.part} attention" if product.attention else product.part
        flops.forward[part] += product.flops
        flops.backward[part] += product.flops * product.gradients
    return flops
