"""Losses of the policy against numbers worked by hand, and their gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from vireo.parallel import Parallel, alone
from vireo.rl.losses import (
    LossSpec,
    Stats,
    Tokens,
    aggregation,
    aggregation_weights,
    policy_loss,
)
from vireo.settings.rl import AlgoSettings

L = math.log


def tokens(ratios: list[float], a: list[float], **more: object) -> Tokens:
    """Tokens of one response with these ratios; log-probs before were -1."""
    n = len(ratios)
    old = torch.full((n,), -1.0)
    made = {
        "logprobs": (old + torch.tensor(ratios).log()).requires_grad_(),
        "old": old,
        "engine": old.clone(),
        "advantages": torch.tensor(a),
        "weights": torch.ones(n),
        "response": torch.zeros(n, dtype=torch.int64),
    }
    return Tokens(**made | more)  # type: ignore[arg-type]


def gradient(spec: LossSpec, given: Tokens) -> list[float]:
    loss, _ = policy_loss(spec, given)
    (found,) = torch.autograd.grad(loss, given.logprobs)
    return found.tolist()


def test_clip_by_hand() -> None:
    # A > 0: 1.1 stays, 1.5 becomes 1.3, 0.5 stays. A < 0: 0.5 becomes 0.8, 1.5 stays.
    given = tokens([1.1, 1.5, 0.5, 0.5, 1.5], [1.0, 2.0, 1.0, -1.0, -2.0])
    loss, stats = policy_loss(LossSpec(low=0.2, high=0.3), given)
    assert loss.item() == pytest.approx(-1.1 - 2.6 - 0.5 + 0.8 + 3.0, abs=1e-5)
    assert gradient(LossSpec(low=0.2, high=0.3), given) == pytest.approx([-1.1, 0, -0.5, 0, 3.0])
    found = stats.figures()
    assert (found["clip/low"], found["clip/high"]) == (0.2, 0.2)
    assert found["policy_loss"] == pytest.approx(loss.item() / 5)
    assert found["probs_ratio/min"] == pytest.approx(0.5)
    assert found["probs_ratio/max"] == pytest.approx(1.5)
    assert found["probs_ratio/mean"] == pytest.approx(5.1 / 5)


def test_dual_clip_bounds_what_a_negative_advantage_counts() -> None:
    given = tokens([5.0, 2.0, 5.0], [-1.0, -1.0, 1.0])
    loss, stats = policy_loss(LossSpec(dual=3.0), given)
    assert loss.item() == pytest.approx(3.0 + 2.0 - 1.2, abs=1e-5)
    assert gradient(LossSpec(dual=3.0), given) == pytest.approx([0, 2.0, 0])
    assert stats.figures()["clip/dual"] == pytest.approx(1 / 3)


def test_gspo_by_hand() -> None:
    # Response 0: log-ratios log 2 and 0 (mean log sqrt 2), its third token does not count.
    # Response 1: one token, ratio 0.5.
    given = tokens(
        [2.0, 1.0, 9.0, 0.5],
        [1.0, 1.0, 1.0, -2.0],
        response=torch.tensor([0, 0, 0, 1]),
        weights=torch.tensor([0.5, 0.5, 0.0, 1.0]),
    )
    open_ = LossSpec(kind="gspo", low=0.9, high=0.9)
    loss, _ = policy_loss(open_, given)
    s = math.sqrt(2)
    assert loss.item() == pytest.approx(-s + 2 * 0.5, abs=1e-5)
    # d/dlp of -A s w: the paper's gradient, s A / length for each token of the response
    assert gradient(open_, given) == pytest.approx([-s / 2, -s / 2, 0, 1.0], abs=1e-5)
    shut = LossSpec(kind="gspo", low=0.2, high=0.3)
    loss, stats = policy_loss(shut, given)
    assert loss.item() == pytest.approx(-1.3 + 2 * 0.8, abs=1e-5)
    assert gradient(shut, given) == pytest.approx([0, 0, 0, 0])
    assert stats.figures()["clip/high"] == pytest.approx(2 / 3)
    assert stats.figures()["policy_loss"] == pytest.approx(loss.item() / 2)  # over the weights


def test_cispo_by_hand() -> None:
    given = tokens([1.5, 0.5, 1.0], [1.0, -1.0, 2.0])
    spec = LossSpec(kind="cispo", low=0.2, high=0.3)
    loss, stats = policy_loss(spec, given)
    lp = [-1 + L(1.5), -1 + L(0.5), -1.0]
    assert loss.item() == pytest.approx(-1.3 * lp[0] + 0.8 * lp[1] - 2 * lp[2], abs=1e-5)
    assert gradient(spec, given) == pytest.approx([-1.3, 0.8, -2.0])  # clipped ones as well
    assert stats.figures()["clip/low"] == pytest.approx(1 / 3)
    # an advantage of 0 makes a loss of 0, clipped or not
    found = policy_loss(spec, tokens([1.5, 0.5], [0.0, 0.0]))[1].figures()
    assert found["clip/low"] == found["clip/high"] == 0


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [
        ("k1", 0.5, 1.0),  # lp - reference
        ("k2", 0.125, 0.5),
        ("k3", math.exp(-0.5) - 1 + 0.5, 1 - math.exp(-0.5)),
    ],
)
def test_divergences_by_hand(kind: str, value: float, slope: float) -> None:
    given = tokens([1.0], [0.0], reference=torch.tensor([-1.5]))
    spec = LossSpec(kl=kind, kl_coef=0.1)
    loss, stats = policy_loss(spec, given)
    assert loss.item() == pytest.approx(0.1 * value, abs=1e-6)
    assert gradient(spec, given) == pytest.approx([0.1 * slope], abs=1e-6)
    assert stats.figures()["kl"] == pytest.approx(math.exp(-0.5) - 0.5, abs=1e-6)


def test_the_mean_gradient_of_k2_is_that_of_the_divergence_and_of_k1_is_none() -> None:
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([0.5, 0.2, -0.7], dtype=torch.float64).log_softmax(-1)
    lp = logits.log_softmax(-1)
    p = lp.detach().exp()
    (exact,) = torch.autograd.grad((lp.exp() * (lp - other)).sum(), logits, retain_graph=True)
    reverse = (other.exp() * (other - lp)).sum()
    (back,) = torch.autograd.grad(reverse, logits, retain_graph=True)
    for kind, wanted in (("k1", torch.zeros(3)), ("k2", exact), ("k3", back)):
        given = Tokens(
            lp, lp.detach(), lp.detach(), torch.zeros(3), p, torch.zeros(3).long(), other
        )
        loss, _ = policy_loss(LossSpec(kl=kind, kl_coef=1.0), given)  # weighted: the expectation
        (got,) = torch.autograd.grad(loss, logits, retain_graph=True)
        torch.testing.assert_close(got, wanted.double(), atol=1e-9, rtol=1e-7)


def test_entropy_is_rewarded() -> None:
    entropy = torch.tensor([2.0, 1.0], requires_grad=True)
    given = tokens([1.0, 1.0], [0.0, 0.0], entropy=entropy, weights=torch.tensor([1.0, 0.0]))
    loss, stats = policy_loss(LossSpec(entropy_coef=0.1), given)
    assert loss.item() == pytest.approx(-0.2)
    loss.backward()
    assert entropy.grad is not None
    assert entropy.grad.tolist() == pytest.approx([-0.1, 0.0])
    assert stats.figures()["entropy"] == 2.0


def test_importance_weights_by_hand() -> None:
    # exp(old - engine) is 0.1, 1.5, 4; of the whole response 0.6
    engine = torch.full((3,), -1.0) - torch.tensor([0.1, 1.5, 4.0]).log()
    given = tokens([1.0] * 3, [1.0, 1.0, 1.0], engine=engine)
    for spec, weights, cut in (
        (LossSpec(tis="truncate", tis_high=2.0), [0.1, 1.5, 2.0], 1 / 3),
        (LossSpec(tis="mask", tis_low=0.5, tis_high=2.0), [0.0, 1.5, 0.0], 2 / 3),
        (LossSpec(tis="truncate", tis_level="sequence"), [0.6] * 3, 0.0),
        (LossSpec(tis="mask", tis_level="sequence", tis_low=0.7), [0.0] * 3, 1.0),
    ):
        loss, stats = policy_loss(spec, given)
        assert loss.item() == pytest.approx(-sum(weights), abs=1e-5)
        assert gradient(spec, given) == pytest.approx([-w for w in weights], abs=1e-5)
        assert stats.figures()["tis/mean"] == pytest.approx(sum(weights) / 3, abs=1e-5)
        assert stats.figures()["tis/cut"] == pytest.approx(cut)


def test_a_token_that_the_correction_takes_out_is_not_counted_as_clipped() -> None:
    engine = torch.tensor([-1.0, -9.0])  # weights 1 and exp(8), which becomes 0
    given = tokens([1.5, 1.5], [1.0, 1.0], engine=engine)
    loss, stats = policy_loss(LossSpec(tis="mask"), given)
    assert loss.item() == pytest.approx(-1.2)
    assert stats.figures()["clip/high"] == stats.figures()["tis/cut"] == 0.5


def test_the_correction_is_of_the_policy_alone() -> None:
    given = tokens(
        [1.0], [1.0], engine=torch.tensor([9.0]), reference=torch.tensor([-2.0])
    )  # a weight of exp(-10)
    loss, _ = policy_loss(LossSpec(tis="truncate", kl="k2", kl_coef=1.0), given)
    assert loss.item() == pytest.approx(0.5 - math.exp(-10), abs=1e-6)


@pytest.mark.parametrize("kind", ["clip", "gspo", "cispo"])
@pytest.mark.parametrize("tis", [None, "truncate", "mask"])
def test_wild_ratios_give_finite_losses_and_gradients(kind: str, tis: str | None) -> None:
    old = torch.tensor([-200.0, -0.1, -1.0, -1.0])
    engine = torch.tensor([-1.0, -200.0, -0.1, -1.0])
    given = tokens([1.0] * 4, [1.0, 1.0, -1.0, -1.0], old=old, engine=engine)
    given.logprobs = torch.tensor([-0.1, -200.0, -150.0, -1.0], requires_grad=True)
    given.weights = torch.tensor([1.0, 1.0, 1.0, 0.0])
    given.response = torch.tensor([0, 1, 1, 1])
    given.reference = torch.tensor([-300.0, -1.0, -0.1, -1.0])
    for high in (2.0, math.inf):
        spec = LossSpec(kind=kind, tis=tis, tis_high=high, kl="k3", kl_coef=0.1)  # type: ignore[arg-type]
        loss, stats = policy_loss(spec, given)
        assert loss.isfinite()
        assert all(map(math.isfinite, gradient(spec, given)))
        assert all(map(math.isfinite, stats.figures().values()))


@pytest.mark.parametrize("kind", ["clip", "gspo", "cispo"])
@pytest.mark.parametrize("tis", [None, "truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_what_the_policy_did_not_write_may_be_impossible_for_it(kind, tis, level) -> None:
    spec = LossSpec(kind, tis=tis, tis_level=level, kl="k3", kl_coef=0.1, entropy_coef=0.1)
    ratios, entropy = torch.tensor([1.1, 0.9]), torch.tensor([1.0, 2.0])
    rest = {"reference": torch.tensor([-1.5, -0.5]), "entropy": entropy}
    plain = tokens(ratios.tolist(), [1.0, 1.0], engine=torch.tensor([-1.1, -0.8]), **rest)
    loss, stats = policy_loss(spec, plain)
    (wanted,) = torch.autograd.grad(loss, plain.logprobs)

    def between(values: Tensor, value: float) -> Tensor:
        return torch.tensor([values[0], value, values[1]])

    for lp, old in ((-math.inf, -math.inf), (-math.inf, -1.0), (-1.0, -math.inf)):
        given = Tokens(
            between(plain.logprobs.detach(), lp).requires_grad_(),
            between(plain.old, old),
            between(plain.engine, -math.inf),
            between(plain.advantages, 0.0),
            between(plain.weights, 0.0),
            torch.zeros(3, dtype=torch.int64),
            between(rest["reference"], -math.inf),
            between(entropy, math.nan),
        )
        got, more = policy_loss(spec, given)
        assert got.item() == loss.item()
        (slopes,) = torch.autograd.grad(got, given.logprobs)
        assert slopes.tolist() == between(wanted, 0.0).tolist()
        assert more == stats


def test_a_reference_far_above_never_pulls_away_from_it() -> None:
    for d, slope in ((2.0, 1 - math.exp(2)), (29.0, 1 - math.exp(29)), (40.0, 0.0), (400.0, 0.0)):
        given = tokens([1.0], [0.0], reference=torch.tensor([-1.0 + d]))
        assert gradient(LossSpec(kl="k3", kl_coef=1.0), given) == pytest.approx([slope], rel=1e-5)


def test_a_loss_without_what_it_needs_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the reference"):
        policy_loss(LossSpec(kl="k2", kl_coef=0.1), tokens([1.0], [1.0]))
    with pytest.raises(ValueError, match="needs the entropy"):
        policy_loss(LossSpec(entropy_coef=0.1), tokens([1.0], [1.0]))
    policy_loss(LossSpec(kl="k2"), tokens([1.0], [1.0]))  # its coefficient is 0


def many(seed: int = 0) -> Tokens:
    chance = torch.Generator().manual_seed(seed)
    n = 24

    def draw() -> Tensor:
        return torch.randn(n, generator=chance, dtype=torch.float64)

    old = -draw().abs()
    return Tokens(
        (old + 0.2 * draw()).requires_grad_(),
        old,
        old + 0.1 * draw(),
        draw(),
        torch.rand(n, generator=chance, dtype=torch.float64) * (draw() > -1),
        torch.arange(4).repeat_interleave(torch.tensor([3, 9, 5, 7])),
        old + 0.3 * draw(),
        draw().abs(),
    )


SPECS = [
    LossSpec(kl="k3", kl_coef=0.1, entropy_coef=0.01, dual=3.0, tis="truncate"),
    LossSpec(kind="gspo", low=0.05, high=0.05, tis="mask", tis_level="sequence", tis_low=0.5),
    LossSpec(kind="cispo", kl="k2", kl_coef=0.2),
]


@pytest.mark.parametrize("spec", SPECS, ids=["clip", "gspo", "cispo"])
def test_micro_batches_add_up(spec: LossSpec) -> None:
    whole = many()
    loss, stats = policy_loss(spec, whole)
    (wanted,) = torch.autograd.grad(loss, whole.logprobs)
    total, parts, pieces = 0.0, Stats.empty(), []
    for responses in ((0, 1), (2, 3)):
        at = torch.isin(whole.response, torch.tensor(responses))
        values = {name: value[at] for name, value in vars(whole).items()}
        values["response"] = values["response"] - responses[0]
        values["logprobs"] = values["logprobs"].detach().requires_grad_()
        part = Tokens(**values)
        one, more = policy_loss(spec, part)
        pieces.append(torch.autograd.grad(one, part.logprobs)[0])
        total, parts = total + one.item(), parts + more
    assert total == pytest.approx(loss.item())
    torch.testing.assert_close(torch.cat(pieces), wanted)
    assert parts.figures() == pytest.approx(stats.figures())
    empty = replace(whole, **{n: v[:0] for n, v in vars(whole).items()})
    assert (parts + policy_loss(spec, empty)[1]).figures() == parts.figures()


def test_ranks_add_up_also_with_one_that_has_no_tokens(monkeypatch) -> None:
    stats = [policy_loss(SPECS[0], many(seed))[1] for seed in (0, 1)]
    ranks = [stats[0], Stats.empty(), stats[1]]
    monkeypatch.setattr(Parallel, "gather", lambda self, value: ranks)
    assert stats[0].over_ranks(alone()).figures() == (stats[0] + stats[1]).figures()


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[2]], ids=["clip", "cispo"])
def test_gradients_are_those_of_finite_differences(spec: LossSpec) -> None:
    given = many(1)
    spec = replace(spec, low=0.9, high=5.0)  # no bound in between

    def loss(lp: Tensor) -> Tensor:
        if spec.kind == "cispo":  # its bounded ratio is a constant
            ratio = (given.logprobs.detach() - given.old).exp().clamp(1 - spec.low, 1 + spec.high)
            kl = (given.reference - lp).square() / 2  # type: ignore[operator]
            each = -ratio * given.advantages * lp + spec.kl_coef * kl
            return (given.weights * each).sum()
        return policy_loss(spec, replace(given, logprobs=lp))[0]

    lp = given.logprobs.detach().requires_grad_()
    (got,) = torch.autograd.grad(policy_loss(spec, replace(given, logprobs=lp))[0], lp)
    step = 1e-6
    for i in range(len(lp)):
        move = torch.zeros_like(lp)
        move[i] = step
        with torch.no_grad():
            slope = (loss(lp + move) - loss(lp - move)) / (2 * step)
        assert got[i].item() == pytest.approx(slope.item(), abs=1e-6)


def test_gspo_has_the_gradient_of_the_objective_of_whole_sequences() -> None:
    given = many(2)
    sizes = torch.bincount(given.response).double()
    a = torch.tensor([1.0, -2.0, 0.5, -0.3], dtype=torch.float64)
    given.advantages, given.weights = a[given.response], 1 / sizes[given.response]
    spec = LossSpec(kind="gspo", low=0.9, high=5.0)  # no bound in between

    def objective(lp: Tensor) -> Tensor:  # the paper's equation 5, of the ratios of equation 7
        mean = torch.bincount(given.response, (lp - given.old).detach()) / sizes
        return -(a * mean.exp()).sum()

    lp = given.logprobs.detach()
    assert policy_loss(spec, given)[0].item() == pytest.approx(objective(lp).item())
    for i, got in enumerate(gradient(spec, given)):
        move = torch.zeros_like(lp)
        move[i] = 1e-6
        slope = (objective(lp + move) - objective(lp - move)) / 2e-6
        assert got == pytest.approx(slope.item(), abs=1e-6)


def test_equal_bits_have_ratios_of_one_exactly() -> None:
    lp = -torch.rand(100) * 7
    given = tokens([1.0] * 100, [1.0] * 100, old=lp, engine=lp)
    given.logprobs = lp.clone().requires_grad_()
    for kind in ("clip", "gspo", "cispo"):
        found = policy_loss(LossSpec(kind=kind), given)[1].figures()  # type: ignore[arg-type]
        assert [found[f"probs_ratio/{n}"] for n in ("min", "mean", "max")] == [1.0, 1.0, 1.0]
        assert found["clip/low"] == found["clip/high"] == 0


def test_no_tokens_at_all() -> None:
    given = tokens([], [])
    loss, stats = policy_loss(LossSpec(kind="gspo", tis="mask", tis_level="sequence"), given)
    loss.backward()
    assert given.logprobs.grad is not None
    assert loss.item() == 0
    assert stats.figures() == Stats.empty().figures() == {}


def test_weights_of_the_three_aggregations_by_hand() -> None:
    masks = [[1, 1, 1, 0], [1], [0, 0]]
    weights, total = aggregation_weights("token", masks, 10)
    assert ([w.tolist() for w in weights], total) == ([[1, 1, 1, 0], [1], [0, 0]], 4)
    weights, total = aggregation_weights("sequence", masks, 10)
    third = pytest.approx(1 / 3)
    assert ([w.tolist() for w in weights], total) == ([[third, third, third, 0], [1], [0, 0]], 2)
    weights, total = aggregation_weights("fixed", masks, 10)
    assert ([w.tolist() for w in weights], total) == ([[1, 1, 1, 0], [1], [0, 0]], 30)


def test_the_total_is_exact_beyond_what_float32_can_count() -> None:
    masks = [np.ones(2**20)] * 16 + [np.ones(1)]  # float32 has no 2^24 + 1
    assert aggregation_weights("token", masks, 1)[1] == 2**24 + 1


def test_the_settings_and_their_defaults() -> None:
    def made(staleness: int = 0, **given: object) -> LossSpec:
        return LossSpec.of(AlgoSettings.model_validate(given), staleness)

    plain = made()
    assert (plain.kind, plain.low, plain.high, plain.dual) == ("clip", 0.2, 0.2, None)
    assert (plain.kl, plain.tis) == (None, None)
    assert (made(eps_clip=0.1).high, made(eps_clip_high=0.28).high) == (0.1, 0.28)
    gspo = made(advantage_estimator="gspo")
    assert (gspo.kind, gspo.low, gspo.high) == ("gspo", 0.0003, 0.0004)
    assert made(advantage_estimator="gspo", eps_clip=0.1).high == 0.1
    assert made(policy_loss="cispo").kind == "cispo"
    assert made(use_kl_loss=True, kl_loss_type="low_var_kl").kl == "k3"
    assert made(1).tis == "truncate"
    assert made(1, use_tis=False).tis is None
    assert made(use_tis=True, tis_mode="mask").tis == "mask"
    assert aggregation(AlgoSettings()) == "token"
    assert aggregation(AlgoSettings(advantage_estimator="dr_grpo")) == "fixed"
    assert aggregation(AlgoSettings(advantage_estimator="gspo")) == "sequence"
    assert aggregation(AlgoSettings(loss_aggregation="sequence")) == "sequence"
