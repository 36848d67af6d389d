"""Log-probabilities of chosen tokens, and entropies, from hidden states, without full logits.

Logits of a 150,000-word vocabulary for every position are the largest tensor of a training step.
Here only positions that carry loss reach the head, a chunk at a time, and each chunk's logits are
computed again in the backward pass instead of being kept.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Whether entropies are wanted beside log-probabilities: with a gradient, or detached from it.
Entropy = bool | Literal["detached"]

CHUNK = 2048  # positions; 2048 x 152,000 float32 logits are 1.2 GB


@dataclass(frozen=True)
class Softmax:
    """The distribution that an engine samples from, before it cuts off a tail (top-p, top-k).

    Logits are divided by `temperature`; tokens of `banned` (ids, any order) have no probability.
    """

    temperature: float = 1.0
    banned: tuple[int, ...] = ()


def token_logprobs(
    hidden_NH: Tensor,
    head: nn.Module,
    targets_N: Tensor,
    softcap: float | None = None,
    softmax: Softmax | None = None,
    entropy: Entropy = False,
) -> Tensor:
    """log p(target) in float32, shape [N], from hidden states [N, H]; with `entropy` [2, N], the
    second row being the entropy (in nats) of the distribution that the target is of.

    `head` maps [n, H] to logits [n, V] in its own precision; the softmax is in float32. `softcap`
    (`final_logit_softcapping` of a config) bends logits into -softcap .. softcap before it, as
    softcap * tanh(logits / softcap). `softmax`: another distribution than the model's own.
    """
    softmax = softmax or Softmax()
    banned = torch.tensor(softmax.banned, device=hidden_NH.device) if softmax.banned else None
    rest = (softcap, softmax.temperature, banned, entropy)
    pieces = [
        checkpoint(_chunk, head, hidden, targets, *rest, use_reentrant=False)
        if torch.is_grad_enabled()
        else _chunk(head, hidden, targets, *rest)
        for hidden, targets in zip(hidden_NH.split(CHUNK), targets_N.split(CHUNK))
    ]
    return torch.cat(pieces, dim=-1) if len(pieces) != 1 else pieces[0]


def _chunk(
    head: nn.Module,
    hidden_nH: Tensor,
    targets_n: Tensor,
    softcap: float | None,
    temperature: float,
    banned: Tensor | None,
    entropy: Entropy,
) -> Tensor:
    logits = head(hidden_nH).float()
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    if banned is not None:
        logits = logits.index_fill(-1, banned, -torch.inf)
    if temperature != 1.0:
        logits = logits / temperature
    total_n = logits.logsumexp(-1)
    logprobs_n = logits.gather(-1, targets_n[:, None]).squeeze(-1) - total_n
    if not entropy:
        return logprobs_n
    with torch.no_grad() if entropy == "detached" else contextlib.nullcontext():
        p = (logits - total_n[:, None]).exp()
        if banned is not None:  # 0 times minus infinity
            logits = logits.index_fill(-1, banned, 0.0)
        entropy_n = total_n - (p * logits).sum(-1)
    return torch.stack([logprobs_n, entropy_n])
