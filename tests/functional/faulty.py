"""The `vireo` command with a fault planted in it: `python faulty.py FAULT train ...`.

Each fault is one that a person could write and no run would stop for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor


def advantage_sign() -> None:
    """The policy goes away from what was rewarded."""
    from vireo.rl import losses

    whole = losses._clipped
    losses._clipped = lambda spec, ratio, a: whole(spec, ratio, -a)


def loss_scale() -> None:
    """Twice the loss of each token. AdamW hides it: rewards rise all the same."""
    from vireo.rl import losses

    whole = losses._clipped

    def clipped(spec: losses.LossSpec, ratio: Tensor, a: Tensor) -> tuple[Tensor, dict]:
        loss, clips = whole(spec, ratio, a)
        return 2 * loss, clips

    losses._clipped = clipped


def engine_logprobs() -> None:
    """The engine says 0.1 less than what it sampled by."""
    from vireo.rollout import embedded

    whole = embedded._Row.take

    def take(self: Any, token: int, logprob: float, version: str) -> None:
        whole(self, token, logprob - 0.1, version)

    embedded._Row.take = take  # type: ignore[method-assign]


def old_logprobs() -> None:
    """The log-probs before the first update are not of the weights before it."""
    from vireo.rl import learn

    whole = learn._columns

    def columns(samples: Any, made: Any, old: Tensor, reference: Any) -> dict[str, Tensor]:
        return whole(samples, made, old + 0.001, reference)

    learn._columns = columns


def label_shift() -> None:
    """Each token is taught one place too early: shifted by the rows, and by the loss again."""
    from vireo.data.ragged import Example
    from vireo.data.render import Renderer

    whole = Renderer.example

    def example(self: Renderer, *args: Any, **options: Any) -> Example:
        made = whole(self, *args, **options)
        for name in ("labels", "loss_weight"):
            made.fields[name] = made.fields[name].roll(-1)
        return made

    Renderer.example = example  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (advantage_sign, loss_scale, engine_logprobs, old_logprobs, label_shift)
}

if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    from vireo.cli import main

    sys.exit(main(sys.argv[2:]))
