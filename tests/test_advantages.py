"""Advantages against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vireo.rl.advantages import GROUPED, advantages

TWO = ["a", "b", "a", "b", "a"]  # groups of 3 and 2, interleaved
REWARDS = [1.0, 5.0, 0.0, 3.0, 2.0]
MASKS = [[1, 1], [1], [1, 1, 1], [1, 1], [1]]


def firsts(estimator: str, **options) -> list[float]:
    return [a[0].item() for a in advantages(estimator, REWARDS, TWO, MASKS, **options)]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # a: 1, 0, 2 with mean 1 and deviation 1; b: 5, 3 with mean 4 and deviation sqrt(2)
        ("grpo", [0.0, 1 / math.sqrt(2), -1.0, -1 / math.sqrt(2), 1.0]),
        ("gspo", [0.0, 1 / math.sqrt(2), -1.0, -1 / math.sqrt(2), 1.0]),
        ("dr_grpo", [0.0, 1.0, -1.0, -1.0, 1.0]),
        # others' means of a: 1, 1.5, 0.5; of b: 3, 5
        ("rloo", [0.0, 2.0, -1.5, -2.0, 1.5]),
    ],
)
def test_groups_by_hand(estimator: str, expected: list[float]) -> None:
    assert firsts(estimator) == pytest.approx(expected, abs=2e-6)
    for value, mask in zip(advantages(estimator, REWARDS, TWO, MASKS), MASKS):
        assert value.dtype == torch.float32
        assert value.tolist() == [value[0].item()] * len(mask)


def test_penalties_come_off_the_reward() -> None:
    # totals: 1 - 0.5 = 0.5 and 0 - 0.1 = -0.1 (the second token of it does not count)
    got = advantages(
        "dr_grpo",
        [1.0, 0.0],
        ["g", "g"],
        [[1, 1], [1, 0]],
        penalties=[torch.tensor([0.2, 0.3]), torch.tensor([0.1, 7.0])],
    )
    assert got[0].tolist() == pytest.approx([0.3, 0.3])
    assert got[1].tolist() == pytest.approx([-0.3, 0.0])


def test_reinforce_plus_plus_by_hand() -> None:
    # still to come: [2 - .1 - .2, 2 - .2] = [1.7, 1.8] and [-1, 0 (masked)]; over the three tokens
    # 1.7, 1.8, -1 the mean is 2.5 / 3 and the deviation (n) sqrt(5.0467 / 3) = 1.29701
    got = advantages(
        "reinforce_plus_plus",
        [2.0, -1.0],
        ["a", "b"],
        [[1, 1], [1, 0]],
        penalties=[torch.tensor([0.1, 0.2]), torch.tensor([0.0, 9.0])],
    )
    mean, deviation = 2.5 / 3, math.sqrt((0.8667**2 + 0.9667**2 + 1.8333**2) / 3)
    expected = [(1.7 - mean) / deviation, (1.8 - mean) / deviation]
    assert got[0].tolist() == pytest.approx(expected, abs=1e-4)
    assert got[1].tolist() == pytest.approx([(-1 - mean) / deviation, 0.0], abs=1e-4)


def test_the_baseline_form_is_centred_in_its_group_and_scaled_over_all_tokens() -> None:
    # centred: a 0, -1, 1; b 1, -1; by token 0 0 | 1 | -1 -1 -1 | -1 -1 | 1: sum -3, sum of squares
    # 7, so the mean is -1 / 3 and the deviation sqrt(7 / 9 - 1 / 9) = sqrt(2 / 3)
    got = advantages("reinforce_plus_plus_baseline", REWARDS, TWO, MASKS)
    centred = [0, 0, 1, -1, -1, -1, -1, -1, 1]
    expected = [(value + 1 / 3) / math.sqrt(2 / 3) for value in centred]
    assert torch.cat(got).tolist() == pytest.approx(expected, abs=1e-5)


def test_normalized_over_all_tokens_when_asked() -> None:
    flat = torch.cat(advantages("dr_grpo", REWARDS, TWO, MASKS, normalize=True)).double()
    assert flat.mean().item() == pytest.approx(0, abs=1e-6)
    assert flat.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    # 0.1 + 0.2 is not 0.3 in binary: a difference of rounding stays one
    close = advantages("dr_grpo", [0.1 + 0.2, 0.3], ["a", "a"], [[1], [1]], normalize=True)
    assert max(value.abs().item() for value in close) < 1e-10


@pytest.mark.parametrize("estimator", [*GROUPED, "reinforce_plus_plus"])
def test_equal_rewards_give_zero_exactly(estimator: str) -> None:
    # in groups of three: the mean of three 0.1 is 0.10000000000000002
    for normalize in (False, True):
        got = advantages(estimator, [0.1] * 6, list("ababab"), [[1, 1]] * 6, normalize=normalize)
        assert all(value.tolist() == [0.0, 0.0] for value in got)


@pytest.mark.parametrize("estimator", [*GROUPED, "reinforce_plus_plus"])
def test_tokens_that_do_not_count_have_none_and_change_nothing(estimator: str) -> None:
    few = advantages(estimator, [1.0, 0.0], ["a", "a"], [[1, 1], [1]])
    more = advantages(estimator, [1.0, 0.0], ["a", "a"], [[1, 0, 1], [1, 0]])
    assert more[0].tolist() == pytest.approx([few[0][0].item(), 0.0, few[0][1].item()])
    assert more[1].tolist() == pytest.approx([few[1][0].item(), 0.0])
    odd = [torch.tensor([0.0, math.inf, 0.0]), torch.tensor([0.0, math.nan])]
    same = advantages(estimator, [1.0, 0.0], ["a", "a"], [[1, 0, 1], [1, 0]], penalties=odd)
    assert torch.cat(same).tolist() == torch.cat(more).tolist()
    empty = advantages(estimator, [1.0, 0.0], ["a", "a"], [[0], [0]])
    assert [value.tolist() for value in empty] == [[0.0], [0.0]]


@given(
    rewards=st.lists(st.integers(-5, 5), min_size=8, max_size=8),
    shift=st.integers(-9, 9),
    order=st.permutations(range(8)),
    estimator=st.sampled_from(["grpo", "dr_grpo", "rloo"]),
)
@settings(max_examples=60, deadline=None)
def test_what_changes_nothing(rewards, shift, order, estimator) -> None:
    groups = list("aabbbabb")
    masks = [[1] * (1 + i % 3) for i in range(8)]
    base = advantages(estimator, rewards, groups, masks)
    moved = [r + shift * (g == "a") for r, g in zip(rewards, groups)]
    for ours, theirs in zip(advantages(estimator, moved, groups, masks), base):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    mixed = [[values[i] for i in order] for values in (rewards, groups, masks)]
    for i, got in zip(order, advantages(estimator, *mixed)):
        torch.testing.assert_close(got, base[i], atol=1e-6, rtol=0)


@pytest.mark.parametrize("estimator", GROUPED)
def test_a_group_of_one_has_nothing_to_compare_with(estimator: str) -> None:
    with pytest.raises(ValueError, match="group 'b' has one"):
        advantages(estimator, [1.0, 0.0, 2.0], ["a", "b", "a"], [[1]] * 3)


def test_wrong_inputs() -> None:
    with pytest.raises(ValueError, match="the reward of sample 1 is nan"):
        advantages("grpo", [1.0, math.nan], ["a", "a"], [[1], [1]])
    with pytest.raises(ValueError, match="not of the same samples"):
        advantages("grpo", [1.0], ["a", "a"], [[1], [1]])
    with pytest.raises(ValueError, match="not of the same samples"):
        advantages("grpo", [1.0, 2.0], ["a", "a"], [[1], [1]], penalties=[])
    with pytest.raises(ValueError, match="a penalty of sample 0 is no finite number"):
        advantages(
            "grpo", [1.0, 2.0], ["a", "a"], [[1]] * 2, penalties=[torch.tensor([math.nan])] * 2
        )
    with pytest.raises(ValueError, match="2 penalties for 1 tokens"):
        advantages("grpo", [1.0, 2.0], ["a", "a"], [[1], [1]], penalties=[torch.ones(2)] * 2)
    with pytest.raises(ValueError, match="unknown estimator 'ppo'"):
        advantages("ppo", [1.0, 2.0], ["a", "a"], [[1], [1]])
