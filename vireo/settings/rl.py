"""Settings of the RL loop: prompts, rollouts, rewards, and what is learned from them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from vireo.settings.section import Names, Numbers, Section, Text


class PromptSettings(Section):
    """Which prompts are answered, and what their columns mean."""

    prompt_data: Names | None = Field(
        default=None, description="Data files with the prompts to train on."
    )
    eval_prompt_data: Names | None = Field(
        default=None,
        description="Data files with held-out prompts; a name may stand before each: NAME,FILE. "
        "Default: no evaluation.",
    )
    input_key: Text | None = Field(
        default=None,
        description="Column with the prompt, a text or turns; a.b is b inside a. "
        "Default: what the row's layout has.",
    )
    label_key: Text | None = Field(
        default=None,
        description="Column with the expected answer, which rewards get. "
        "Default: what the row's layout has.",
    )
    multimodal_keys: Text | None = Field(
        default=None,
        description='Column with the images: its name, or as published {"image": "NAME"}. '
        "Default: what the row's layout has.",
    )
    apply_chat_template: bool = Field(
        default=True,
        description="Render prompts with the chat template. false: their text is all the model "
        "gets.",
    )
    max_prompt_len: int | None = Field(
        default=None,
        ge=1,
        description="Longest prompt in tokens; a longer one is refused (see on_bad_row). "
        "Default: what max_length leaves.",
    )


class RolloutSettings(Section):
    """The loop: how many prompts are answered at a time, how, and how far ahead."""

    num_rollout: int | None = Field(
        default=None,
        ge=1,
        description="Rollouts after which the run ends. Default: num_epochs passes over the "
        "prompts.",
    )
    rollout_batch_size: int = Field(default=32, ge=1, description="Prompts of one rollout.")
    n_samples_per_prompt: int = Field(
        default=8, ge=1, description="Responses to a prompt: its group."
    )
    num_steps_per_rollout: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps on the samples of one rollout. "
        "Default: 1, or as global_batch_size (in samples) needs.",
    )
    rollout_max_response_len: int = Field(
        default=256, ge=1, description="Longest response in tokens."
    )
    rollout_temperature: float = Field(
        default=1.0, gt=0, description="Temperature that responses are sampled at."
    )
    rollout_top_p: float = Field(
        default=1.0, gt=0, le=1, description="Share of the probability kept."
    )
    rollout_top_k: int = Field(default=0, ge=0, description="Most likely tokens kept. 0: all.")
    over_sampling_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Prompts answered at a time, more than rollout_batch_size: what finishes "
        "first is taken. Default: rollout_batch_size.",
    )
    dynamic_sampling_filter: Names | None = Field(
        default=None,
        description="Filters that a group must pass: mixed_rewards, untruncated, or "
        "MODULE:FUNCTION. Default: none.",
    )
    partial_rollout: bool = Field(
        default=False,
        description="Go on with responses that were cut off when enough had finished, and train on "
        "what finished too early, though one update old. false: both begin again.",
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        description="Updates of the weights that a trained token may be behind. 0: generate, "
        "then train; 1: one rollout ahead.",
    )
    n_samples_per_eval_prompt: int = Field(
        default=1, ge=1, description="Responses to each held-out prompt."
    )
    debug_rollout_only: bool = Field(
        default=False, description="Generate and reward, and train nothing."
    )
    debug_train_only: Text | None = Field(
        default=None,
        description="Folder of an earlier run whose rollouts are trained on again; nothing is "
        "generated.",
    )

    @model_validator(mode="after")
    def _rules(self) -> RolloutSettings:
        more = self.over_sampling_batch_size
        if more is not None and more < self.rollout_batch_size:
            raise ValueError(
                f"--over_sampling_batch_size {more} is less than --rollout_batch_size "
                f"{self.rollout_batch_size}: give as many prompts or more"
            )
        if self.partial_rollout and more is None and not self.max_staleness:
            raise ValueError(
                "--partial_rollout needs --over_sampling_batch_size: nothing is cut off without it"
            )
        if self.debug_rollout_only and self.debug_train_only is not None:
            raise ValueError("--debug_rollout_only and --debug_train_only leave nothing to do")
        return self

    @property
    def oldest(self) -> int:
        """Updates of the weights that a token may be behind when it is trained on."""
        return max(self.max_staleness, int(self.partial_rollout))


class RewardSettings(Section):
    """What a response is worth."""

    reward: Names | None = Field(
        default=None,
        description="Rewards of a response, by name (`vireo rewards` lists them) or "
        "MODULE:FUNCTION. Several are added up. Required.",
    )
    reward_weights: Numbers | None = Field(
        default=None, description="Weight of each reward. Default: 1 each."
    )
    reward_timeout: float = Field(
        default=60.0, gt=0, description="Seconds after which a reward counts as hanging."
    )
    reward_url: Text | None = Field(
        default=None, description="Address that the reward `remote` posts samples to."
    )


class AlgoSettings(Section):
    """From rewards to a loss."""

    advantage_estimator: Literal[
        "grpo", "dr_grpo", "gspo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
    ] = Field(
        default="grpo",
        description="How rewards become advantages. gspo: those of grpo with the loss gspo.",
    )
    normalize_advantages: bool = Field(
        default=False,
        description="Scale advantages to mean 0 and deviation 1 over all tokens of a rollout. "
        "reinforce_plus_plus always does.",
    )
    policy_loss: Literal["clip", "gspo", "cispo"] | None = Field(
        default=None,
        description="Loss of the policy. Default: clip (PPO's), or the estimator's own.",
    )
    loss_aggregation: Literal["token", "sequence", "fixed"] | None = Field(
        default=None,
        description="What counts alike: every token, every response, or every token over "
        "rollout_max_response_len. Default: token; fixed for dr_grpo, sequence for gspo.",
    )
    eps_clip: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="How far the ratio of probabilities may fall below 1. "
        "Default: 0.2; 0.0003 for gspo.",
    )
    eps_clip_high: float | None = Field(
        default=None,
        gt=0,
        description="How far it may rise above 1. Default: eps_clip; 0.0004 for gspo.",
    )
    eps_clip_c: float | None = Field(
        default=None,
        gt=1,
        description="Dual clip: the most that a negative advantage counts. Default: off.",
    )
    use_kl_loss: bool = Field(
        default=False, description="Add the distance from the reference model to the loss."
    )
    kl_loss_coef: float = Field(default=0.0, ge=0, description="How much it counts.")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = Field(
        default="k3", description="How it is estimated. low_var_kl is k3."
    )
    kl_coef: float = Field(
        default=0.0, ge=0, description="Distance from the reference model, taken off the reward."
    )
    entropy_coef: float = Field(
        default=0.0, ge=0, description="How much entropy of the policy is rewarded in the loss."
    )
    use_tis: bool | None = Field(
        default=None,
        description="Weigh tokens by trainer's over engine's probability (importance sampling). "
        "Default: with max_staleness or partial_rollout.",
    )
    tis_mode: Literal["truncate", "mask"] = Field(
        default="truncate",
        description="Weights over tis_clip become it, or 0 (then also those below tis_clip_low).",
    )
    tis_level: Literal["token", "sequence"] = Field(
        default="token", description="Whose ratio it is: a token's, or its whole response's."
    )
    tis_clip: float = Field(default=2.0, gt=0, description="Largest weight.")
    tis_clip_low: float = Field(default=0.0, ge=0, description="Smallest weight of tis_mode mask.")
    ref_load: Text | None = Field(
        default=None,
        description="Folder of the reference model. Default: the model that training starts from.",
    )
    ref_offload: bool = Field(
        default=False, description="Keep the reference model in host memory between its uses."
    )

    @model_validator(mode="after")
    def _rules(self) -> AlgoSettings:
        if self.kl_loss_coef and not self.use_kl_loss:
            raise ValueError("--kl_loss_coef needs --use_kl_loss")
        if self.tis_clip_low >= self.tis_clip:
            raise ValueError(
                f"--tis_clip_low {self.tis_clip_low:g} is not below --tis_clip {self.tis_clip:g}"
            )
        return self

    @property
    def needs_reference(self) -> bool:
        return self.use_kl_loss or self.kl_coef > 0
