"""Mismatch metrics against numbers worked by hand, and the trainer's scoring of responses."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.launch import torchrun
from tests.ranks.mismatch import measured, pairs
from tests.tiny_models import policy, renderer, tiny
from vireo.data.response import with_response
from vireo.errors import RowError
from vireo.models.policy import Policy
from vireo.parallel import alone
from vireo.rl.mismatch import NAMES, NEAR, Mismatch
from vireo.rl.score import Shape, score
from vireo.rollout.sample import Sampling

LOG2 = math.log(2)


def figures(engine: list, trainer: list, images: list, masks: list | None = None) -> dict:
    return Mismatch.of(engine, [torch.tensor(t) for t in trainer], images, masks).figures()


def test_equal_log_probs_have_no_error() -> None:
    found = figures([[-1.0, -2.5], [0.0]], [[-1.0, -2.5], [0.0]], [False, True])
    ones = ("token_mult_prob_error", "sampling_importance_ratio", "seq_mult_prob_error")
    for name in NAMES:
        expected = 1.0 if name in ones or name == "seq_ratio_error" else 0.0
        assert found[name] == found[f"text/{name}"] == found[f"image_first/{name}"] == expected


def test_metrics_worked_by_hand() -> None:
    """Probabilities 1/2 and 1/4 of the engine, 1/4 and 1/4 of the trainer: d is -log 2, then 0."""
    found = figures([[-LOG2, -2 * LOG2]], [[-2 * LOG2, -2 * LOG2]], [False])
    expected = {
        "token_mult_prob_error": (2 + 1) / 2,
        "gen_kl_error": (1 / 2 + LOG2 - 1) / 2,
        # M is 3/8: k(log 2/3) = 2/3 - log 2/3 - 1, k(log 4/3) = 4/3 - log 4/3 - 1.
        "js_divergence_error": (2 / 3 - math.log(2 / 3) - 1 + 4 / 3 - math.log(4 / 3) - 1) / 2 / 2,
        "sampling_importance_ratio": (1 / 2 + 1) / 2,
        "mean_abs": LOG2 / 2,
        "max_abs": LOG2,
        "seq_mult_prob_error": (2 + 1) / 2,
        "seq_ratio_error": 2.0,
    }
    assert {name: found[name] for name in NAMES} == pytest.approx(expected, abs=1e-6)
    assert {name: found[f"text/{name}"] for name in NAMES} == pytest.approx(expected, abs=1e-6)
    assert not any(name.startswith("image") for name in found)


def test_masked_tokens_count_nowhere() -> None:
    wild = float("nan")
    found = figures(
        [[-LOG2, wild, -1.0], [wild]],
        [[-2 * LOG2, 0.0, -1.0], [-3.0]],
        [False, True],
        [[1, 0, 1], [0]],
    )
    assert found == pytest.approx(figures([[-LOG2, -1.0]], [[-2 * LOG2, -1.0]], [False]))


def test_a_short_response_counts_as_much_as_a_long_one_in_sequence_metrics() -> None:
    """One token that is off by log 3 beside eight that are right; gaps of one sign add up."""
    found = figures([[-1.0 - math.log(3)], [-1.0] * 8], [[-1.0], [-1.0] * 8], [False, False])
    assert found["token_mult_prob_error"] == pytest.approx((3 + 8) / 9, abs=1e-6)
    assert found["seq_mult_prob_error"] == pytest.approx((3 + 1) / 2, abs=1e-6)
    assert found["seq_ratio_error"] == pytest.approx((3 + 1) / 2, abs=1e-6)
    found = figures([[-1.0, -1.0, -1.0]], [[-1.1, -1.1, -0.9]], [False])
    assert found["seq_ratio_error"] == pytest.approx(math.exp(0.1), abs=1e-6)
    assert found["seq_mult_prob_error"] == pytest.approx(math.exp(0.1), abs=1e-6)


def test_tokens_are_split_by_where_the_image_is() -> None:
    """Text off by 0.1, the first NEAR tokens after an image by 0.2, later ones by 0.3; places are
    counted in the response, masked tokens included."""
    near, later = [-1.2] * NEAR, [-1.3] * 3
    masks = [[1, 1], [0] + [1] * (NEAR - 1 + 3)]
    made = Mismatch.of(
        [[-1.0] * 2, [-1.0] * (NEAR + 3)],
        [torch.tensor([-1.1] * 2), torch.tensor(near + later)],
        [False, True],
        masks,
    )
    found = made.figures()
    assert found["text/max_abs"] == pytest.approx(0.1)
    assert found["image_first/mean_abs"] == pytest.approx(0.2)
    assert found["image_later/mean_abs"] == pytest.approx(0.3)
    assert made.tokens[:, 0].tolist() == [2 + NEAR - 1 + 3, 2, NEAR - 1, 3]


def test_sums_of_parts_are_the_sums_of_the_whole() -> None:
    draw = torch.Generator().manual_seed(0)
    engine = [(-torch.rand(n, generator=draw)).tolist() for n in (3, 0, 12, 7, 1)]
    trainer = [-torch.rand(len(one), generator=draw) for one in engine]
    images = [False, True, True, False, True]
    whole = Mismatch.of(engine, trainer, images).figures()
    parts = [
        Mismatch.of(engine[a:b], trainer[a:b], images[a:b]) for a, b in ((0, 2), (2, 2), (2, 5))
    ]
    assert (parts[0] + parts[1] + parts[2]).figures() == pytest.approx(whole)
    assert whole == Mismatch.of(engine, trainer, images).over_ranks(alone()).figures()
    assert Mismatch.of([], [], []).figures() == {}


def test_metrics_are_exact_where_both_nearly_agree() -> None:
    """exp(x) - x - 1 of 1e-6 is 5e-13: rounding to float32 on the way would lose it."""
    gap = 2.0**-20
    found = figures([[-0.5]], [[-0.5 - gap]], [False])
    assert found["gen_kl_error"] == pytest.approx(gap**2 / 2, rel=1e-5, abs=0)
    assert found["token_mult_prob_error"] - 1 == pytest.approx(gap, rel=1e-5, abs=0)


def test_what_is_not_aligned_is_refused() -> None:
    with pytest.raises(ValueError, match="not aligned"):
        figures([[-1.0, -1.0]], [[-1.0]], [False])
    with pytest.raises(ValueError, match="not aligned"):
        figures([[-1.0]], [[-1.0]], [False], [[1, 1]])
    with pytest.raises(ValueError, match="not aligned"):
        figures([[-1.0]], [[-1.0]], [])


# -- scoring ---------------------------------------------------------------------------------------


def model_of(family: str) -> Policy:
    """The policy as trainers make it: a blank picture only where rows of all kinds mix."""
    made = policy(family)
    return made if made.family.can_mix else Policy(made.hf, made.family, None).eval()


def plain(family: str, prompt, sample) -> torch.Tensor:
    """log p of the response by the model's own logits of one padded row."""
    made, model = renderer(family), policy(family)
    example = with_response(prompt.example, sample.response_ids, made.positions)
    inputs = {n: v[None] for n, v in example.fields.items() if example.keys[n].kind != "packed"}
    inputs |= {n: v for n, v in example.fields.items() if example.keys[n].kind == "packed"}
    for name in ("labels", "loss_weight", "positions"):
        inputs.pop(name)
    with torch.no_grad():
        logits = model.hf(**inputs, use_cache=False).logits[0].double()
    count = len(sample.response_ids)
    logits = logits[-count - 1 : -1] / sample.sampling.softmax_temperature
    logits[:, list(made.banned_ids)] = -torch.inf
    targets = torch.tensor(sample.response_ids)
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].float()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "mllama", "gemma3", "qwen3", "minicpmv4_6"])
def test_responses_are_scored_as_the_model_alone_scores_them(family: str) -> None:
    """Rows with 0 to 2 images and three temperatures, in every shape of micro-batch."""
    made = renderer(family)
    some = pairs(made)
    for (_, sample), temperature in zip(some, (1.0, 0.7, 0.0, 0.7, 1.5)):
        sample.sampling = Sampling(temperature=temperature)
    expected = [plain(family, prompt, sample) for prompt, sample in some]
    for shape in (Shape(), Shape(rows=1), Shape(budget=2000), Shape(rows=3, packing=False)):
        found = score(model_of(family), made, some, shape)
        for one, other, (_, sample) in zip(found, expected, some):
            assert one.dtype == torch.float32
            assert len(one) == len(sample.response_ids)
            assert (one - other).abs().max() <= 1e-5


def test_banned_tokens_and_temperature_are_part_of_what_is_scored() -> None:
    some = pairs(renderer("qwen2_5_vl"))
    base = score(policy("qwen2_5_vl"), renderer("qwen2_5_vl"), some)
    hot = [(p, replace(s, sampling=Sampling(temperature=2.0))) for p, s in some]
    other = score(policy("qwen2_5_vl"), renderer("qwen2_5_vl"), hot)
    assert (torch.cat(base) - torch.cat(other)).abs().min() > 1e-3


def test_a_response_without_tokens_has_no_log_probs() -> None:
    some = pairs(renderer("qwen2_5_vl"))[:2]
    some[0] = (some[0][0], replace(some[0][1], response_ids=[], logprobs=[]))
    found = score(policy("qwen2_5_vl"), renderer("qwen2_5_vl"), some)
    assert [len(one) for one in found] == [0, len(some[1][1].response_ids)]
    only = score(policy("qwen2_5_vl"), renderer("qwen2_5_vl"), some[:1])
    assert [len(one) for one in only] == [0]
    assert score(policy("qwen2_5_vl"), renderer("qwen2_5_vl"), []) == []


def test_a_row_over_the_budget_is_refused() -> None:
    with pytest.raises(RowError, match="do not fit"):
        score(
            policy("qwen2_5_vl"),
            renderer("qwen2_5_vl"),
            pairs(renderer("qwen2_5_vl")),
            Shape(budget=10),
        )


@pytest.mark.parametrize("families", [("qwen2_5_vl", "mllama")])
def test_two_ranks_score_and_measure_as_one_does(families, tmp_path: Path) -> None:
    """Each rank has other responses, or none; families that mix and that cannot."""
    folders = [shutil.copytree(tiny(family), tmp_path / family) for family in families]
    torchrun(2, "-m", "tests.ranks.mismatch", *map(str, folders))
    for family, folder in zip(families, folders):
        found = json.loads((folder / "mismatch.json").read_text())
        some = pairs(renderer(family))
        expected = score(model_of(family), renderer(family), some)
        both = [one for rank in found["logprobs"] for one in rank]
        for one, other in zip(both, expected, strict=True):
            assert (torch.tensor(one) - other).abs().max() <= 1e-5
        wanted = measured(expected, some).figures()
        for figures_of_rank in (*found["figures"], *found["one idle"]):
            assert figures_of_rank == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_scoring_leaves_no_gradients() -> None:
    model: Policy = policy("qwen2_5_vl")
    found = score(model, renderer("qwen2_5_vl"), pairs(renderer("qwen2_5_vl")))
    assert not any(one.requires_grad for one in found)
