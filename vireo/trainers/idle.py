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
    if settings.run.eval_steps and settings.data.eval_file is None:
        notices.append("--eval_steps has no effect without --eval_file")
    if settings.run.check_action == "stop" and not settings.run.check_steps:
        notices.append("--check_action has no effect with --check_steps 0")
    if settings.fsdp.checkpoint == "full" and not settings.fsdp.enable:
        notices.append("--fsdp_checkpoint has no effect with --fsdp_enable false")
    return notices
