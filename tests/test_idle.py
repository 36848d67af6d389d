"""Settings that change nothing are said aloud, and those that do are not."""

from __future__ import annotations

import pytest

from vireo.settings import load_settings
from vireo.trainers.idle import idle_rollout_settings, idle_settings

GRPO = "--trainer grpo --model_name_or_path m --prompt_data p.jsonl --reward exact_match"


def notices(more: str) -> list[str]:
    settings = load_settings([*GRPO.split(), *more.split()])
    return idle_settings(settings) + idle_rollout_settings(settings)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--eval_interval 5", "--eval_steps has no effect without --eval_prompt_data"),
        ("--n_samples_per_eval_prompt 4", "without --eval_prompt_data"),
        ("--debug_train_only r --eval_prompt_data e.jsonl", "no effect with --debug_train_only"),
        ("--reward_url http://h:1", "without --reward remote"),
        ("--ref_load m", "--ref_load has no effect: nothing asks for a reference"),
        ("--ref_offload", "--ref_offload has no effect: nothing asks for a reference"),
        ("--kl_loss_type k1", "--kl_loss_type has no effect without --use_kl_loss"),
        ("--tis_clip 3", "--tis_clip has no effect without --use_tis"),
        ("--use_tis --tis_clip_low 0.5", "without --tis_mode mask"),
    ],
)
def test_a_rollout_setting_without_effect_is_named(flags: str, expected: str) -> None:
    (notice,) = notices(flags)
    assert expected in notice


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--eval_interval 5 --eval_prompt_data e.jsonl --n_samples_per_eval_prompt 4",
        "--kl_coef 0.1 --ref_load m --ref_offload",
        "--use_kl_loss --kl_loss_coef 0.1 --kl_loss_type k1",
        "--max_staleness 1 --tis_clip 3",
        "--use_tis --tis_mode mask --tis_clip_low 0.5",
    ],
)
def test_one_with_an_effect_is_not(flags: str) -> None:
    assert notices(flags) == []
