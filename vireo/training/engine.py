"""The train engine: micro-batches in, one optimizer step or log-probabilities out.

Loss of a step = sum of weighted token losses / sum of token weights, over all ranks and all
micro-batches, so that the same rows give the same gradient however they are dealt.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from vireo.data.ragged import IGNORE, Batch
from vireo.errors import VireoError
from vireo.models.heads import Entropy, Softmax
from vireo.models.names import named_parameters, part_of
from vireo.models.policy import Policy
from vireo.parallel import Parallel, whole
from vireo.training.optimizer import set_rate


@dataclass
class StepResult:
    """Over all ranks: `loss` per unit of token weight; counts of the step's own rows."""

    loss: float
    grad_norm: float
    rows: int
    tokens: int
    supervised: int
    images: int


class Objective(Protocol):
    """What a step minimises: log-probabilities of `softmax` (None: the model's own) become a sum of
    weighted token losses."""

    softmax: Softmax | None
    entropy: Entropy  # whether `loss` gets entropies too: scores [2, N] in place of [N]

    def loss(self, batch: Batch, scores: Tensor, weights: Tensor) -> Tensor:
        """Scalar; `scores` and `weights` [N] are of the supervised tokens of `batch`, one of the
        step's micro-batches, in reading order."""
        ...


class Likelihood:
    """Supervised fine-tuning: minus the weighted log-probabilities."""

    softmax: Softmax | None = None
    entropy: Entropy = False

    def loss(self, batch: Batch, scores: Tensor, weights: Tensor) -> Tensor:
        return -(scores * weights).sum()


LIKELIHOOD = Likelihood()


class TrainEngine:
    """A sharded policy with its optimizer.

    `packing`: rows of a micro-batch end to end in one sequence, else padded to the longest.
    `empty`: a micro-batch run without loss by a rank that has nothing left while others have.
    `empty_images`: the same with an image, for families that cannot mix text and image rows.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        parallel: Parallel,
        *,
        empty: Batch,
        empty_images: Batch | None = None,
        packing: bool,
        pad_id: int,
        clip_grad_norm: float = 0.0,
        autocast: torch.dtype | None = None,
    ):
        self.policy, self.optimizer, self.parallel = policy, optimizer, parallel
        self.empty, self.empty_images = empty, empty_images
        self.packing, self.pad_id = packing, pad_id
        self.clip_grad_norm, self.autocast = clip_grad_norm, autocast
        if empty_images is not None:
            # FSDP makes a layer's parameters in its first forward, and the first backward without
            # reduction wants those of all layers: also of the tower, which text does not run.
            with torch.no_grad():
                self.forward(empty_images)
            self.reshard()

    def step(
        self,
        micro_batches: Sequence[Batch],
        rate: float,
        objective: Objective = LIKELIHOOD,
        total: float | None = None,
    ) -> StepResult:
        """Forward and backward of this rank's micro-batches, then one optimizer step.

        `rate` is the share (0 to 1) of the highest learning rates; `total` what the sum of losses
        over all ranks is divided by, if not the sum of token weights. Every rank calls it the same
        number of times; ranks with fewer micro-batches run empty ones. Raises VireoError on every
        rank if the loss or the gradient is not finite.
        """
        self.policy.train()
        weight, rows, tokens, supervised, images = self.parallel.sum(
            [
                sum(_weight(batch) for batch in micro_batches),
                sum(len(batch) for batch in micro_batches),
                sum(batch.tokens for batch in micro_batches),
                sum(_supervised(batch) for batch in micro_batches),
                sum(sum(batch.images) for batch in micro_batches),
            ]
        )
        weight = weight if total is None else total
        loss_sum = self.accumulate(micro_batches, weight, objective)
        if images == 0:
            self._forget_blank_pictures()
        norm = self.clip()
        loss = self.parallel.sum([loss_sum])[0] / max(weight, 1e-12)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.optimizer.zero_grad()
            raise VireoError(
                f"the loss is {loss} and the gradient norm {norm}: lower --lr, or look at the "
                f"rows of this step"
            )
        set_rate(self.optimizer, rate)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult(loss, norm, int(rows), int(tokens), int(supervised), int(images))

    def _forget_blank_pictures(self) -> None:
        """No gradient, rather than one of zeros, where a step had no picture on any rank: AdamW
        would go on moving the tower by its momentum, which the model alone does not."""
        for name, parameter in named_parameters(self.policy.hf):
            if part_of(name, self.policy.family) in ("vision", "projector"):
                parameter.grad = None

    def in_step(self, micro_batches: Sequence[Batch]) -> list[tuple[Batch, bool, bool]]:
        """(micro-batch, whether it counts, whether to reduce), in every rank's order; collective.

        Ranks with fewer run empty ones. Where a family cannot mix them, text rows go before image
        rows, and gradients are reduced after each kind: FSDP wants all parameters that it reduces
        at once to have had their gradients in the same micro-batches.
        """
        kinds = [(list(micro_batches), self.empty)]
        if self.empty_images is not None:
            text = [batch for batch in micro_batches if not any(batch.images)]
            images = [batch for batch in micro_batches if any(batch.images)]
            kinds = [(text, self.empty), (images, self.empty_images)]
        counts = self.parallel.max([len(mine) for mine, _ in kinds])
        order = []
        for (mine, empty), count in zip(kinds, counts):
            run = [(batch, True) for batch in mine] + [(empty, False)] * (int(count) - len(mine))
            order += [(batch, counts, i == len(run) - 1) for i, (batch, counts) in enumerate(run)]
        return order

    def accumulate(
        self, micro_batches: Sequence[Batch], weight: float, objective: Objective = LIKELIHOOD
    ) -> float:
        """Gradients of a step's micro-batches; the sum of this rank's token losses. Collective."""
        total = torch.zeros((), device=self.parallel.device)
        scale = 1.0 / max(weight, 1e-12)  # gradients are summed over ranks (see models.build)
        for batch, counts, reduce in self.in_step(micro_batches):
            if isinstance(self.policy, FSDPModule):
                self.policy.set_requires_gradient_sync(reduce)
                self.policy.set_is_last_backward(reduce)
            if counts:
                softmax, entropy = objective.softmax, objective.entropy
                scored = self.forward(batch, softmax=softmax, entropy=entropy)
                loss = objective.loss(batch, *scored)
            else:
                loss = self.forward(batch)[0].sum() * 0.0
            if loss.requires_grad:  # not where only what images reach trains, and text cannot mix
                (loss * scale).backward()
            else:
                self.reshard()
            total += loss.detach()
        return float(total)

    def forward(
        self,
        batch: Batch,
        packing: bool | None = None,
        softmax: Softmax | None = None,
        entropy: Entropy = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities (of `softmax`, if not the model's own distribution) and loss weights of
        the supervised tokens, float32 [N] each (the former [2, N] with `entropy`); the rows packed
        or padded as in training, unless `packing` says otherwise."""
        batch = batch.to(self.parallel.device)
        packed = self.packing if packing is None else packing
        inputs = batch.pack() if packed else batch.pad(self.pad_id)
        context: contextlib.AbstractContextManager = contextlib.nullcontext()
        if self.autocast is not None:
            context = torch.autocast(self.parallel.device.type, self.autocast)
        with context:
            logprobs = self.policy(inputs, softmax, entropy)
        return logprobs, inputs["loss_weight"][inputs["labels"] != IGNORE]

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Batch]) -> tuple[float, float]:
        """(sum of weighted token losses, sum of weights) over all ranks, without gradients."""
        self.policy.eval()
        total = weight = 0.0
        for batch, counts, _ in self.in_step(micro_batches):
            logprobs, weights = self.forward(batch)
            if counts:
                total -= float((logprobs * weights).sum())
                weight += float(weights.sum())
        self.reshard()
        sums = self.parallel.sum([total, weight])
        return sums[0], sums[1]

    def reshard(self) -> None:
        """Free gathered weights: a forward without a backward leaves those of the root."""
        if isinstance(self.policy, FSDPModule):
            self.policy.reshard()

    def clip(self) -> float:
        """The norm of all gradients over all ranks; scales them down to `clip_grad_norm`."""
        parameters = [p for p in self.policy.parameters() if p.grad is not None]
        limit = self.clip_grad_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        return float(whole(norm))

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) of every parameter, one at a time; collective on all ranks."""
        for name, parameter in named_parameters(self.policy.hf):
            yield name, whole(parameter)


def _weight(batch: Batch) -> float:
    rows = batch.columns["loss_weight"].rows
    return float(sum(row.double().sum() for row in rows if row is not None))


def _supervised(batch: Batch) -> int:
    return sum(
        int((row != IGNORE).sum()) for row in batch.columns["labels"].rows if row is not None
    )
