"""From rewards to advantages: how much better a token did than was to be expected.

r is a sample's reward, G its group (samples of one prompt, by explicit id), R = r minus the sum of
its KL penalties over the tokens that count.

grpo, gspo                    (R - mean of G) / (deviation of G + 1e-6), the deviation with n - 1 as
                              in TRL, verl and slime (Shao et al. 2024, arXiv 2402.03300, section
                              4.1.2; Zheng et al. 2025, arXiv 2507.18071)
dr_grpo                       R - mean of G (Liu et al. 2025, arXiv 2503.20783, section 3.2)
rloo                          R - mean of the others in G (Ahmadian et al. 2024, arXiv 2402.14740)
reinforce_plus_plus           what is still to come at each token, r counted at the last one, then
                              normalised over all tokens (Hu et al. 2025, arXiv 2501.03262)
reinforce_plus_plus_baseline  R - mean of G, then normalised over all tokens (same paper)

Normalised: mean 0, and deviation 1 with n, as in OpenRLHF, the code of the paper's authors; a
deviation below 1e-4 counts as that, so that rounding is not blown up.

Where all R of a group are equal the advantage is zero exactly, not by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GROUPED = ("grpo", "gspo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
_EPS = 1e-6


def advantages(
    estimator: str,
    rewards: Sequence[float],
    groups: Sequence[str],
    masks: Sequence[Sequence[float]],
    *,
    penalties: Sequence[Tensor] | None = None,
    normalize: bool = False,
) -> list[Tensor]:
    """Of every response token, float32 [response], a tensor a sample; 0 where the mask is.

    `penalties` [response]: taken off the reward of a token. `normalize`: over all tokens that
    count, also for estimators that do not by themselves. ValueError: inputs that are not aligned, a
    reward or counted penalty that is no finite number, or a group of one where groups are compared.
    """
    counted = [torch.tensor(mask, dtype=torch.float64) for mask in masks]
    r = torch.tensor(rewards, dtype=torch.float64)
    if (
        not len(r)
        == len(groups)
        == len(counted)
        == len(counted if penalties is None else penalties)
    ):
        raise ValueError("rewards, groups, masks and penalties are not of the same samples")
    for i in (~r.isfinite()).nonzero().flatten().tolist():
        raise ValueError(f"the reward of sample {i} is {r[i]}: expected a finite number")
    taken = [torch.zeros_like(mask) for mask in counted]
    if penalties is not None:
        for i, (penalty, mask) in enumerate(zip(penalties, counted)):
            if penalty.shape != mask.shape:
                raise ValueError(f"sample {i} has {len(penalty)} penalties for {len(mask)} tokens")
            # Not times 0: a token that the policy did not write may have an infinite penalty.
            taken[i] = torch.where(mask > 0, penalty.double(), 0.0)
            if not taken[i].isfinite().all():
                raise ValueError(f"a penalty of sample {i} is no finite number")
    if estimator in GROUPED:
        total = r - torch.stack([penalty.sum() for penalty in taken])
        values = _compared(estimator, total, groups)
        found = [value * mask for value, mask in zip(values, counted)]
    elif estimator == "reinforce_plus_plus":
        found = [_to_come(*each) for each in zip(r, taken, counted)]
    else:
        raise ValueError(f"unknown estimator {estimator!r}")
    if normalize or estimator.startswith("reinforce_plus_plus"):
        found = _normalized(found, counted)
    return [value.float() for value in found]


def _compared(estimator: str, total: Tensor, groups: Sequence[str]) -> Tensor:
    """One value a sample, from those of its group."""
    members: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    values = torch.zeros_like(total)
    for group, places in members.items():
        if len(places) < 2:
            raise ValueError(
                f"{estimator} compares the samples of a group; group {group!r} has one: give it "
                "two or more, or use reinforce_plus_plus"
            )
        mine = total[places]
        if mine.min() == mine.max():
            continue
        above = mine - mine.mean()
        if estimator in ("grpo", "gspo"):
            above = above / (mine.std() + _EPS)
        elif estimator == "rloo":  # the others' mean is away by n / (n - 1) of it
            above = above * len(mine) / (len(mine) - 1)
        values[places] = above
    return values


def _to_come(reward: Tensor, penalty: Tensor, mask: Tensor) -> Tensor:
    """At each token the reward that follows, itself included, undiscounted."""
    if not mask.any():
        return torch.zeros_like(mask)
    each = -penalty
    each[int(mask.nonzero()[-1])] += reward
    return each.flip(0).cumsum(0).flip(0) * mask


def _normalized(values: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
    """Mean 0 and deviation 1 over all tokens that count."""
    flat = torch.cat([value[mask > 0] for value, mask in zip(values, masks)])
    if not len(flat) or flat.min() == flat.max():
        return [torch.zeros_like(value) for value in values]
    mean, deviation = flat.mean(), flat.std(correction=0).clamp(min=1e-4)
    return [(value - mean) / deviation * mask for value, mask in zip(values, masks)]
