"""The loss of a policy, of the tokens of a micro-batch.

lp is the policy's log-probability of a token, old the same before the first update on its rollout,
A the advantage, ratio = exp(lp - old), sg(x) a constant of x's value.

clip   max(-A ratio, -A clip(ratio, 1 - low, 1 + high)) (Schulman et al. 2017, arXiv 1707.06347,
       equation 7; two bounds: Yu et al. 2025, DAPO, arXiv 2503.14476, section 3.1); with dual clip,
       a negative A counts at most -A dual (Ye et al. 2019, arXiv 1912.09729)
gspo   clip with one ratio a response, s = exp(mean of lp - old over its tokens), of which a token
       has the share sg(s) exp(lp - sg(lp)) (Zheng et al. 2025, arXiv 2507.18071, section 4.3)
cispo  -sg(clip(ratio, 1 - low, 1 + high)) A lp: clipped tokens still have a gradient
       (MiniMax 2025, arXiv 2506.13585, section 3.1)

The distance from a reference, KL(policy || reference), with d = reference - lp (Schulman 2020,
"Approximating KL divergence"; gradients: Liu et al. 2025, arXiv 2510.01555). Of tokens that the
policy sampled:

k1     -d: its mean is the divergence, the mean of its gradient is 0: as a loss it does nothing
k2     d^2 / 2: the mean of its gradient is that of the divergence: the one to use for that
k3     exp(d) - d - 1: never negative, of low variance, and its mean is the divergence, but the mean
       of its gradient is that of KL(reference || policy): what GRPO's paper uses

Engines sample from slightly other probabilities than the trainer computes, or with older weights.
w = exp(old - engine), of a token or (the sum over its tokens) of a response, corrects for it:
truncate is min(w, high) (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training"), mask is w within low .. high and 0 elsewhere (Liu et al. 2025, "When Speed
Kills Stability"). It weighs the policy's term alone, and has no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from vireo.parallel import Parallel
from vireo.settings.rl import AlgoSettings

# The largest log-ratio. exp(89) is infinite in float32, and infinity times the zero gradient of a
# clipped token is NaN; a ratio times an importance weight is exp(60) at most. A token beyond it has
# no gradient: exp(30) times that of the others would be the only one left.
_MOST = 30.0

Kind = Literal["clip", "gspo", "cispo"]
Aggregation = Literal["token", "sequence", "fixed"]


@dataclass(frozen=True)
class LossSpec:
    """`low`, `high`: how far a ratio may fall below 1, or rise above. `dual`, `kl`, `tis`: None is
    off."""

    kind: Kind = "clip"
    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    kl: str | None = None
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    tis: str | None = None
    tis_level: str = "token"
    tis_high: float = 2.0
    tis_low: float = 0.0

    @classmethod
    def of(cls, algo: AlgoSettings, staleness: int = 0) -> LossSpec:
        """What the settings ask for; `staleness`: updates that a token may be behind."""
        kind = algo.policy_loss or ("gspo" if algo.advantage_estimator == "gspo" else "clip")
        low, high = algo.eps_clip, algo.eps_clip_high
        if kind == "gspo":  # the paper's, of one ratio a response
            high = (0.0004 if low is None else low) if high is None else high
            low = 0.0003 if low is None else low
        low = 0.2 if low is None else low
        corrects = algo.use_tis if algo.use_tis is not None else staleness > 0
        return cls(
            kind=kind,
            low=low,
            high=low if high is None else high,
            dual=algo.eps_clip_c,
            kl={"low_var_kl": "k3"}.get(algo.kl_loss_type, algo.kl_loss_type)
            if algo.use_kl_loss
            else None,
            kl_coef=algo.kl_loss_coef,
            entropy_coef=algo.entropy_coef,
            tis=algo.tis_mode if corrects else None,
            tis_level=algo.tis_level,
            tis_high=algo.tis_clip,
            tis_low=algo.tis_clip_low,
        )


@dataclass
class Tokens:
    """The response tokens of a micro-batch, in reading order, [N] each, float32.

    `logprobs`, and `entropy` if it counts, have a gradient. `engine`: what the engine said of the
    token that it sampled. `weights`: how much a token's loss counts; 0: not at all. `response`
    int64: which response it is of, 0, 1, ...
    """

    logprobs: Tensor
    old: Tensor
    engine: Tensor
    advantages: Tensor
    weights: Tensor
    response: Tensor
    reference: Tensor | None = None
    entropy: Tensor | None = None


@dataclass(frozen=True)
class Stats:
    """Sums over tokens that count, which add up over micro-batches, updates and ranks."""

    sums: dict[str, float]
    least: float = torch.inf  # ratio
    most: float = -torch.inf

    @classmethod
    def empty(cls) -> Stats:
        return cls({})

    def __add__(self, other: Stats) -> Stats:
        names = self.sums.keys() | other.sums.keys()
        sums = {name: self.sums.get(name, 0.0) + other.sums.get(name, 0.0) for name in names}
        return Stats(sums, min(self.least, other.least), max(self.most, other.most))

    def over_ranks(self, parallel: Parallel) -> Stats:
        """The sum over all ranks, on every rank; collective."""
        parts = parallel.gather(self)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def figures(self) -> dict[str, float]:
        """policy_loss (mean over the weights), and means over tokens: kl (k3), entropy, the shares
        clip/low, clip/high and clip/dual of tokens whose loss a bound changed, probs_ratio/min,
        /mean, /max, and of the correction tis/mean and tis/cut (share that a bound changed). Empty
        without tokens."""
        if not self.sums.get("tokens"):
            return {}
        each = dict(self.sums)
        tokens, weight = each.pop("tokens"), each.pop("weight")
        found = {"policy_loss": each.pop("policy_loss") / weight}
        found |= {name: value / tokens for name, value in each.items()}
        return found | {"probs_ratio/min": self.least, "probs_ratio/max": self.most}


def policy_loss(spec: LossSpec, tokens: Tokens) -> tuple[Tensor, Stats]:
    """The sum of weighted token losses, to be minimised, and what there is to say of them.

    ValueError: the loss needs a reference or an entropy that the tokens do not have.
    """
    for name, needed in (("reference", spec.kl and spec.kl_coef), ("entropy", spec.entropy_coef)):
        if needed and getattr(tokens, name) is None:
            raise ValueError(f"the loss needs the {name} of each token, and there is none")
    # Left out, not times 0: what the policy did not write may be impossible for it, and -inf times
    # 0 is NaN.
    counted = tokens.weights > 0
    tokens = replace(tokens, **{n: v[counted] for n, v in vars(tokens).items() if v is not None})
    lp, a = tokens.logprobs, tokens.advantages
    log_ratio = lp - tokens.old
    ratio = log_ratio.clamp(max=_MOST).exp()
    shown = {"ratio": ratio}
    if spec.kind == "gspo":
        mean = _per_response(log_ratio.detach(), tokens, mean=True)[tokens.response]
        sequence = mean.clamp(max=_MOST).exp()
        loss, clips = _clipped(spec, sequence * (lp - lp.detach()).exp(), a)
    elif spec.kind == "cispo":
        bounded = ratio.detach().clamp(1 - spec.low, 1 + spec.high)
        loss = -bounded * a * lp
        clips = {
            "low": (ratio < 1 - spec.low) & (a != 0),
            "high": (ratio > 1 + spec.high) & (a != 0),
        }
    else:
        loss, clips = _clipped(spec, ratio, a)
    if spec.tis is not None:
        weight, cut = _correction(spec, tokens)
        loss = loss * weight
        clips = {name: clipped & (weight > 0) for name, clipped in clips.items()}
        shown |= {"tis": weight, "cut": cut}
    total = (tokens.weights * loss).sum()
    if tokens.reference is not None:
        shown["kl"] = _divergence("k3", lp.detach(), tokens.reference)
        if spec.kl is not None and spec.kl_coef:
            kl = _divergence(spec.kl, lp, tokens.reference)
            total = total + spec.kl_coef * (tokens.weights * kl).sum()
    if tokens.entropy is not None:
        shown["entropy"] = tokens.entropy
        if spec.entropy_coef:
            total = total - spec.entropy_coef * (tokens.weights * tokens.entropy).sum()
    return total, _stats(tokens.weights, loss, clips, shown)


def aggregation(algo: AlgoSettings) -> Aggregation:
    """The setting, or what the estimator's paper has."""
    own: dict[str, Aggregation] = {"dr_grpo": "fixed", "gspo": "sequence"}
    return algo.loss_aggregation or own.get(algo.advantage_estimator, "token")


def aggregation_weights(
    how: Aggregation, masks: Sequence[Sequence[float]], longest: int
) -> tuple[list[Tensor], float]:
    """How much each token's loss counts, float32 [response] a sample, and what the sum of all
    losses of a step is divided by.

    token: every token alike. sequence: every response alike, the mean over its tokens. fixed: every
    token alike, over `longest` tokens a response, however many there are (Dr. GRPO, arXiv
    2503.20783).
    """
    counted = [torch.tensor(mask, dtype=torch.float32) for mask in masks]
    if how == "sequence":
        used = [mask for mask in counted if mask.any()]
        return [mask / mask.sum().clamp(min=1) for mask in counted], float(len(used))
    if how == "fixed":
        return counted, float(longest * len(counted))
    return counted, sum(float(mask.sum()) for mask in counted)


def _clipped(spec: LossSpec, ratio: Tensor, a: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    plain, bounded = -a * ratio, -a * ratio.clamp(1 - spec.low, 1 + spec.high)
    loss = torch.maximum(plain, bounded)
    changed = bounded > plain
    clips = {"low": changed & (ratio < 1), "high": changed & (ratio > 1)}
    if spec.dual is not None:
        most = -a * spec.dual
        clips["dual"] = (a < 0) & (loss > most)
        loss = torch.where(clips["dual"], most, loss)
    return loss, clips


def _correction(spec: LossSpec, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The importance weight of each token, and where a bound changed it."""
    d = tokens.old - tokens.engine
    if spec.tis_level == "sequence":
        d = _per_response(d, tokens)[tokens.response]
    ratio = d.detach().clamp(max=_MOST).exp()
    if spec.tis == "mask":
        cut = (ratio > spec.tis_high) | (ratio < spec.tis_low)
        return torch.where(cut, 0.0, ratio), cut
    return ratio.clamp(max=spec.tis_high), ratio > spec.tis_high


def _per_response(values: Tensor, tokens: Tokens, mean: bool = False) -> Tensor:
    """The sum, or mean, over the tokens of each response, [responses]."""
    size = int(tokens.response.max()) + 1 if len(tokens.response) else 0
    sums = values.new_zeros(size).index_add(0, tokens.response, values)
    if not mean:
        return sums
    counts = values.new_zeros(size).index_add(0, tokens.response, torch.ones_like(values))
    return sums / counts.clamp(min=1)


def _divergence(kind: str, lp: Tensor, reference: Tensor) -> Tensor:
    d = reference - lp
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    d = d.clamp(max=_MOST)  # in both terms: -d alone would pull away from the reference
    return d.expm1() - d


@torch.no_grad()
def _stats(
    weights: Tensor, policy: Tensor, clips: dict[str, Tensor], shown: dict[str, Tensor]
) -> Stats:
    ratio = shown.pop("ratio")
    names = {"tis": "tis/mean", "cut": "tis/cut"}
    columns = {f"clip/{name}": value for name, value in clips.items()}
    columns |= {names.get(name, name): value for name, value in shown.items()}
    sums = {name: float(value.double().sum()) for name, value in columns.items()}
    sums |= {
        "tokens": float(len(ratio)),
        "weight": float(weights.double().sum()),
        "policy_loss": float((weights * policy).double().sum()),
        "probs_ratio/mean": float(ratio.double().sum()),
    }
    if not len(ratio):
        return Stats(sums)
    return Stats(sums, float(ratio.min()), float(ratio.max()))
