"""Settings that a person gave and that have no effect in this run: said aloud, never an error."""

from __future__ import annotations

from vireo.settings import Settings
from vireo.trainers.build import frozen_parts


def idle_settings(settings: Settings) -> list[str]:
    """One notice a setting that differs from its default and changes nothing."""
    model, optim, lora = settings.model, settings.optim, settings.lora
    adapters = bool(lora.r or lora.adapter)
    frozen_now = frozen_parts(settings)
    rates = (
        ("vision_lr", optim.vision_lr, "vision", "--freeze_vision is true"),
        ("mm_proj_lr", optim.mm_proj_lr, "projector", "--freeze_mm_proj is true"),
        ("embeddings_lr", optim.embeddings_lr, "embeddings", "--freeze_embeddings is true"),
    )
    notices = []
    if not adapters and lora != type(lora)():
        notices.append("--lora_r is 0: the other lora settings have no effect")
    if not adapters:
        notices += [
            f"--{name} has no effect: {why}"
            for name, rate, part, why in rates
            if rate is not None and part in frozen_now
        ]
    else:
        if optim.embeddings_lr is not None:
            notices.append("--embeddings_lr has no effect: embeddings and head get no adapters")
        if model.freeze_embeddings is False or model.freeze_language:
            notices.append(
                "--freeze_language and --freeze_embeddings do not place adapters: the "
                "base is frozen, and --lora_target_modules says what gets one"
            )
        if "freeze_mm_proj" in model.model_fields_set and not model.freeze_mm_proj:
            notices.append(
                "adapters leave the projector's own weights as they are; "
                "--lora_target_modules language,mm_proj adapts it too"
            )
    if settings.data.shuffle_buffer != 1000 and not settings.data.streaming:
        notices.append("--shuffle_buffer is for --streaming, and has no effect")
    if not settings.run.hub_private and settings.run.push_to_hub is None:
        notices.append("--hub_private is for --push_to_hub, and has no effect")
    if not settings.data.eval_file and not settings.prompts.eval_prompt_data:
        file = "--eval_prompt_data" if settings.prompts.prompt_data else "--eval_file"
        if settings.run.eval_steps:
            notices.append(f"--eval_steps has no effect without {file}")
    if settings.run.check_action == "stop" and not settings.run.check_steps:
        notices.append("--check_action has no effect with --check_steps 0")
    if settings.fsdp.checkpoint == "full" and not settings.fsdp.enable:
        notices.append("--fsdp_checkpoint has no effect with --fsdp_enable false")
    return notices


def idle_rollout_settings(settings: Settings) -> list[str]:
    """As `idle_settings`, of what only a trainer with rollouts has."""
    rollout, algo, rewards = settings.rollout, settings.algo, settings.rewards
    usual = type(algo)()
    names = (name for name in type(algo).model_fields if name.startswith("tis_"))
    set_tis = [name for name in names if getattr(algo, name) != getattr(usual, name)]
    notices = []
    if rollout.n_samples_per_eval_prompt > 1 and not settings.prompts.eval_prompt_data:
        notices.append("--n_samples_per_eval_prompt has no effect without --eval_prompt_data")
    if rollout.debug_train_only and settings.prompts.eval_prompt_data:
        notices.append("--eval_prompt_data has no effect with --debug_train_only: no engine runs")
    if rewards.reward_url is not None and "remote" not in (rewards.reward or ()):
        notices.append("--reward_url has no effect without --reward remote")
    if not algo.needs_reference:
        notices += [
            f"--{name} has no effect: nothing asks for a reference (--use_kl_loss, --kl_coef)"
            for name in ("ref_load", "ref_offload")
            if getattr(algo, name)
        ]
    if algo.kl_loss_type != usual.kl_loss_type and not algo.use_kl_loss:
        notices.append("--kl_loss_type has no effect without --use_kl_loss")
    if set_tis and not (algo.use_tis or (algo.use_tis is None and rollout.oldest)):
        notices += [f"--{name} has no effect without --use_tis" for name in set_tis]
    elif algo.tis_clip_low and algo.tis_mode != "mask":
        notices.append("--tis_clip_low has no effect without --tis_mode mask")
    return notices
