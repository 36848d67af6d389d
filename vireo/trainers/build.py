"""From settings to a train engine: model, adapters, optimizer, and what a checkpoint holds."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vireo.data.ragged import Batch
from vireo.data.render import Renderer
from vireo.errors import InputError
from vireo.hub import local_folder
from vireo.models.build import ModelSpec, build_policy
from vireo.models.load import fingerprint
from vireo.models.lora import Lora, adapted_modules, other_base, read_adapter
from vireo.models.recompute import by_memory
from vireo.parallel import Parallel
from vireo.rl.reference import Reference
from vireo.settings import Settings
from vireo.settings.schema import LoraSettings
from vireo.training import checkpoint
from vireo.training.engine import TrainEngine
from vireo.training.optimizer import adamw


@dataclass
class Built:
    """`compute`: the type of the forward. `adapters`: what an export needs to know of them, None
    without. `notices`: for the person."""

    engine: TrainEngine
    compute: torch.dtype
    adapters: dict[str, Any] | None = None
    notices: list[str] = field(default_factory=list)


def build_engine(
    settings: Settings,
    renderer: Renderer,
    parallel: Parallel,
    *,
    packing: bool,
    start_from: Path | None,
) -> Built:
    """The sharded model with its optimizer, filled from the model folder or a checkpoint."""
    family, folder = renderer.family, renderer.model_path
    wanted = settings.fsdp.mp_dtype or ("bf16" if parallel.device.type == "cuda" else "fp32")
    dtype = torch.bfloat16 if wanted == "bf16" else torch.float32
    if dtype == torch.float32:  # by default convolutions round to TF32
        torch.backends.cudnn.allow_tf32 = False
    frozen = frozen_parts(settings)
    lora, adapter = lora_of(settings.lora, frozen)
    wrap = settings.fsdp.auto_wrap_cls
    spec = ModelSpec(
        folder,
        frozen=frozen,
        dtype=dtype,
        shard=settings.fsdp.enable,
        recompute=settings.fsdp.grad_ckpt,
        wrap=tuple(wrap) if wrap else None,
        lora=lora,
        adapter=adapter,
        seed=settings.run.seed,
        compile=settings.model.compile,
    )
    together = family.has_vision and family.can_mix
    policy, notice = build_policy(
        spec,
        renderer.config,
        family,
        parallel,
        renderer.dummy() if together else None,
        load=start_from is None,
    )
    optim = settings.optim
    own_rates = {
        "vision": optim.vision_lr,
        "projector": optim.mm_proj_lr,
        "embeddings": optim.embeddings_lr,
        "head": optim.embeddings_lr,
    }
    optimizer = adamw(
        policy,
        lr=optim.lr,
        betas=(optim.adam_beta1, optim.adam_beta2),
        eps=optim.adam_eps,
        weight_decay=optim.weight_decay,
        part_lr={part: rate for part, rate in own_rates.items() if rate is not None},
    )
    built = Built(
        TrainEngine(
            policy,
            optimizer,
            parallel,
            empty=Batch.of([renderer.empty()]),
            empty_images=None if family.can_mix else Batch.of([renderer.empty_with_image()]),
            packing=packing,
            pad_id=renderer.pad_id,
            clip_grad_norm=optim.clip_grad_norm,
            autocast=dtype if dtype != torch.float32 and not settings.fsdp.enable else None,
        ),
        dtype,
    )
    if notice:
        built.notices.append(f"--fsdp_auto_wrap_cls: {notice}")
    if settings.fsdp.grad_ckpt == "auto":
        built.notices.append(_recompute_by_memory(settings, built.engine, renderer))
    if lora is not None:
        mark = parallel.gather(fingerprint(folder) if parallel.main else None)[0]
        if adapter is not None and (notice := other_base(adapter, mark)):
            built.notices.append(notice)
        built.adapters = {
            "r": lora.r,
            "alpha": lora.alpha,
            "dropout": lora.dropout,
            "modules": adapted_modules(policy.hf),
            "base": settings.model.vlm_model_name_or_path,
            "fingerprint": mark,
        }
    if start_from is not None:
        _check_base(start_from, built.adapters, folder)
        checkpoint.load(start_from, policy, optimizer, parallel)
    return built


def build_reference(
    settings: Settings, renderer: Renderer, built: Built, parallel: Parallel
) -> Reference | None:
    """What the algorithm measures its distance from, if it does: the base under the adapters, or a
    sharded copy of a model folder in the compute type."""
    algo = settings.algo
    if not algo.needs_reference:
        return None
    if built.adapters is not None and algo.ref_load is None:
        return Reference(built.engine)
    spec = ModelSpec(
        renderer.model_path if algo.ref_load is None else local_folder(algo.ref_load),
        frozen=frozenset(renderer.family.parts),
        dtype=built.compute,
        shard=settings.fsdp.enable,
        wrap=tuple(settings.fsdp.auto_wrap_cls or ()) or None,
    )
    dummy = built.engine.policy.dummy
    policy, _ = build_policy(spec, renderer.config, renderer.family, parallel, dummy)
    other = copy.copy(built.engine)  # packs, pads and casts alike
    other.policy = policy
    return Reference(other, offload=algo.ref_offload)


def _recompute_by_memory(settings: Settings, engine: TrainEngine, renderer: Renderer) -> str:
    tokens = settings.batch.max_tokens_per_gpu
    assert tokens is not None  # the settings' own rule

    def run(size: int) -> object:
        return engine.forward(Batch.of([renderer.empty(size)]))

    notice = by_memory(engine.policy, tokens, run)
    engine.reshard()
    return notice


def frozen_parts(settings: Settings) -> frozenset[str]:
    """Parts that keep their weights. Embeddings and head go with the language model, unless
    --freeze_embeddings says otherwise."""
    model = settings.model
    embeddings = model.freeze_embeddings
    if embeddings is None:
        embeddings = model.freeze_language
    chosen = {
        "vision": model.freeze_vision,
        "projector": model.freeze_mm_proj,
        "language": model.freeze_language,
        "embeddings": embeddings,
        "head": embeddings,
    }
    return frozenset(part for part, freeze in chosen.items() if freeze)


def lora_of(given: LoraSettings, frozen: frozenset[str]) -> tuple[Lora | None, str | None]:
    """The adapters that the settings ask for, and the folder to fill them from, if any."""
    ignores = tuple(given.ignore_modules or ())
    if given.adapter is not None:
        others = given.model_copy(update={"adapter": None})
        if others != LoraSettings():
            also = next(n for n, v in others if v != getattr(LoraSettings(), n))
            raise InputError(
                f"--lora_adapter gives rank, scale and modules: leave --lora_{also} out"
            )
        folder = local_folder(given.adapter)
        return read_adapter(folder), folder
    if not given.r:
        return None, None
    targets = {"targets": tuple(given.target_modules)} if given.target_modules else {}
    lora = Lora(given.r, given.alpha, given.dropout, ignores=ignores, closed=frozen, **targets)
    return lora, None


def _check_base(path: Path, adapters: dict[str, Any] | None, folder: str) -> None:
    """A checkpoint of adapters belongs to one base, and none to whole weights."""
    before = checkpoint.read_progress(path).get("adapters")
    if (before is None) != (adapters is None):
        has = "whole weights" if before is None else "adapters"
        raise InputError(f"{path} holds {has}: resume with the same --lora_r")
    if before and adapters:
        for key in ("r", "alpha"):
            if before[key] != adapters[key]:
                raise InputError(
                    f"{path} was trained with --lora_{key} {before[key]}, found {adapters[key]}"
                )
        if before["modules"] != adapters["modules"]:
            raise InputError(
                f"{path} has adapters on {len(before['modules'])} modules, not on these "
                f"{len(adapters['modules'])}: resume with the same --lora_target_modules and "
                "--lora_ignore_modules"
            )
        if before["fingerprint"] != adapters["fingerprint"]:
            raise InputError(
                f"{folder} is not the model that {path} was trained on: its weight files differ"
            )
