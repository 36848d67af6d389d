"""What a rollout looks like in numbers: rewards, groups, lengths."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

from vireo.rollout.sample import Sample


def rollout_figures(groups: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Of finished, rewarded groups:

    reward, reward_std            mean over samples, and the mean deviation within a group
    reward/NAME                   mean of each reward, without its weight
    groups/all_right, all_wrong   shares of groups whose rewards are all >= 1, all <= 0
    groups/mixed                  share of groups whose rewards are not all equal: the ones that
                                  teach something
    response_length/mean, max     tokens
    prompt_length/mean            tokens, images expanded
    truncated                     share of responses that the length limit ended
    unscored                      share of responses that a reward could not score, and that count 0
    samples, groups, response_tokens
    """
    samples = [sample for group in groups for sample in group]
    rewards = [[reward_of(sample) for sample in group] for group in groups]
    lengths = [len(sample.response_ids) for sample in samples]
    names = list(samples[0].rewards)
    return {
        "reward": fmean(r for group in rewards for r in group),
        "reward_std": fmean(pstdev(group) for group in rewards),
        **{f"reward/{n}": fmean(sample.rewards[n] for sample in samples) for n in names},
        "groups/all_right": fmean(min(group) >= 1 for group in rewards),
        "groups/all_wrong": fmean(max(group) <= 0 for group in rewards),
        "groups/mixed": fmean(min(group) < max(group) for group in rewards),
        "response_length/mean": fmean(lengths),
        "response_length/max": max(lengths),
        "prompt_length/mean": fmean(len(sample.prompt_ids) for sample in samples),
        "truncated": fmean(sample.finish == "length" for sample in samples),
        "unscored": fmean("unscored" in sample.metadata for sample in samples),
        "samples": len(samples),
        "groups": len(groups),
        "response_tokens": sum(lengths),
    }


def reward_of(sample: Sample) -> float:
    """ValueError: it has none."""
    if sample.reward is None:
        raise ValueError(f"{sample.name} has no reward")
    return sample.reward
