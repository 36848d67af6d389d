"""The reference model: what the policy is kept near."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from peft.tuners.tuners_utils import BaseTunerLayer

from vireo.training.engine import TrainEngine


class Reference:
    """`with reference.ready() as engine`: an engine that scores with the reference's weights.

    `engine`: of a copy of the model, or the policy's own, under whose adapters the reference lies.
    `offload`: the copy stays in host memory between its uses.
    """

    def __init__(self, engine: TrainEngine, *, offload: bool = False):
        self.engine, self.offload = engine, offload
        self._adapters = [m for m in engine.policy.modules() if isinstance(m, BaseTunerLayer)]
        if offload:
            engine.policy.to("cpu")

    @contextlib.contextmanager
    def ready(self) -> Iterator[TrainEngine]:
        """Only for scoring, without gradients."""
        for layer in self._adapters:  # `enable_adapters` would switch their gradients as well
            layer._disable_adapters = True
        if self.offload:
            self.engine.policy.to(self.engine.parallel.device)
        try:
            yield self.engine
        finally:
            for layer in self._adapters:
                layer._disable_adapters = False
            if self.offload:
                self.engine.policy.to("cpu")
