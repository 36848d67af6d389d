"""How far an engine's log-probabilities are from the trainer's, over the tokens of responses.

g is what the engine said of a token, p what the trainer computes of it, m 1 where the token counts,
N the sum of m, d = p - g. Over tokens:

token_mult_prob_error        sum m exp|d| / N: 1 where both agree; 1.03 is bfloat16's own noise
gen_kl_error                 mean of exp(d) - d - 1, an estimate of KL(engine || trainer)
js_divergence_error          mean of (k(p - M) + k(g - M)) / 2, with k(x) = exp(x) - x - 1 and
                             M = log((exp p + exp g) / 2)
sampling_importance_ratio    mean of exp(d): 1 in expectation where the engine samples from what it
                             says it samples from
mean_abs, max_abs            mean and largest |d|

and over sequences, for what adds up or hides in the mean over tokens:

seq_mult_prob_error          mean over responses of each one's own mean of exp|d|: a short response
                             counts as much as a long one
seq_ratio_error              mean over responses of exp|sum d|: by what factor the probability of
                             a whole response differs

The first four and `seq_mult_prob_error` are the metrics of those names of NVIDIA NeMo-RL
(nemo_rl/algorithms/loss_functions.py and docs/guides/grpo.md), so that runs can be compared. In
its `js_divergence_error`, which this follows, each KL is the estimate k on the sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vireo.parallel import Parallel

# The first tokens of a response are what an image decides most. docs/mismatch.md says how 8 was
# found.
NEAR = 8
KINDS = ("all", "text", "image_first", "image_later")
TOKEN_SUMS = (
    "token_mult_prob_error",
    "gen_kl_error",
    "js_divergence_error",
    "sampling_importance_ratio",
    "mean_abs",
)
SEQUENCE_SUMS = ("seq_mult_prob_error", "seq_ratio_error")
NAMES = (*TOKEN_SUMS, "max_abs", *SEQUENCE_SUMS)


@dataclass(frozen=True)
class Mismatch:
    """Sums that may be added over micro-batches and ranks, a row a kind of `KINDS`.

    `text`: responses to prompts without images. `image_first`: the first NEAR tokens of responses
    to prompts with images; `image_later`: the rest of these.

    tokens [kinds, 1 + TOKEN_SUMS], sequences [kinds, 1 + SEQUENCE_SUMS] (the count stands first)
    and largest [kinds], all float64 on the CPU.
    """

    tokens: Tensor
    sequences: Tensor
    largest: Tensor

    @classmethod
    def of(
        cls,
        engine: Sequence[Sequence[float]],
        trainer: Sequence[Tensor],
        images: Sequence[bool],
        masks: Sequence[Sequence[float]] | None = None,
    ) -> Mismatch:
        """Of whole responses: log-probs of the engine and the trainer, whether the prompt has
        images, and masks of 0 and 1 (default: every token counts), one each a response.

        ValueError: they are not aligned.
        """
        lengths = list(map(len, engine))
        same = list(map(len, trainer)) == lengths == list(map(len, masks or engine))
        if not same or len(images) != len(engine):
            raise ValueError("log-probs, masks and images of a response are not aligned")
        g = torch.tensor([value for one in engine for value in one], dtype=torch.float64)
        p = torch.cat([g.new_zeros(0), *(one.detach().cpu().double() for one in trainer)])
        counted = torch.ones_like(g, dtype=torch.bool)
        if masks is not None:
            counted = torch.tensor([value > 0 for one in masks for value in one], dtype=torch.bool)
        sizes = torch.tensor(lengths, dtype=torch.int64)
        response = torch.arange(len(sizes)).repeat_interleave(sizes)
        place = torch.arange(len(g)) - (sizes.cumsum(0) - sizes)[response]
        image = torch.tensor(images, dtype=torch.bool)[response]
        first = place < NEAR
        chosen = (counted, counted & ~image, counted & image & first, counted & image & ~first)
        made = [_sums(g[some], p[some], response[some], len(sizes)) for some in chosen]
        return cls(*(torch.stack(part) for part in zip(*made)))

    def __add__(self, other: Mismatch) -> Mismatch:
        return Mismatch(
            self.tokens + other.tokens,
            self.sequences + other.sequences,
            torch.maximum(self.largest, other.largest),
        )

    def over_ranks(self, parallel: Parallel) -> Mismatch:
        """The sum over all ranks, on every rank; collective."""
        parts = self.tokens.flatten(), self.sequences.flatten()
        sums = torch.tensor(parallel.sum(torch.cat(parts).tolist()), dtype=torch.float64)
        tokens, sequences = sums.split([len(part) for part in parts])
        largest = torch.tensor(parallel.max(self.largest.tolist()), dtype=torch.float64)
        return Mismatch(tokens.view_as(self.tokens), sequences.view_as(self.sequences), largest)

    def figures(self) -> dict[str, float]:
        """The metrics by name, those of a kind under its name (`text/gen_kl_error`). Kinds without
        a token are left out."""
        found: dict[str, float] = {}
        for kind, tokens, sequences, largest in zip(
            KINDS, self.tokens, self.sequences, self.largest.tolist()
        ):
            if not tokens[0]:
                continue
            prefix = "" if kind == "all" else f"{kind}/"
            found |= {prefix + n: float(v / tokens[0]) for n, v in zip(TOKEN_SUMS, tokens[1:])}
            found[prefix + "max_abs"] = largest
            found |= {
                prefix + n: float(v / sequences[0]) for n, v in zip(SEQUENCE_SUMS, sequences[1:])
            }
        return found


def _sums(g: Tensor, p: Tensor, response: Tensor, responses: int) -> tuple[Tensor, Tensor, Tensor]:
    d = p - g
    factor, ratio = d.abs().exp(), d.exp()
    mixture = torch.logaddexp(p, g) - torch.tensor(2.0).double().log()
    js = (_k(p - mixture) + _k(g - mixture)) / 2
    columns = (torch.ones_like(d), factor, _k(d), js, ratio, d.abs())
    tokens = torch.stack([column.sum() for column in columns])

    def per_response(values: Tensor) -> Tensor:
        return torch.bincount(response, values, minlength=responses)

    count = per_response(torch.ones_like(d))
    there = count > 0
    means = (per_response(factor)[there] / count[there]).sum()
    ratios = per_response(d)[there].abs().exp().sum()
    sequences = torch.stack([there.double().sum(), means, ratios])
    return tokens, sequences, d.abs().max() if len(d) else d.new_zeros(())


def _k(x: Tensor) -> Tensor:
    """exp(x) - x - 1, exact near 0 too (J. Schulman, "Approximating KL divergence", k3)."""
    return x.expm1() - x
