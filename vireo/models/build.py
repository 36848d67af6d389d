"""Build a model on no memory, shard it, and fill the shards: load, freeze, recompute, shard."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from vireo.data.model_folder import running_code
from vireo.families import Family
from vireo.models.compiled import compile_layers
from vireo.models.load import fill_from_checkpoint
from vireo.models.lora import Lora, add_adapters, fill_adapters, init_adapters
from vireo.models.names import check_layers, freeze, wrap_classes
from vireo.models.policy import Policy
from vireo.models.recompute import Recomputed, wrap_layers
from vireo.parallel import Parallel, alone


@dataclass(frozen=True)
class ModelSpec:
    """What to build.

    `frozen` names parts; `dtype` is the compute type. Masters are float32, except for the frozen
    base under adapters and a model that is frozen as a whole, which have the compute type.
    `adapter`: a folder whose adapters `lora` describes and the run starts from.
    """

    path: str
    frozen: frozenset[str] = frozenset()
    dtype: torch.dtype = torch.float32
    shard: bool = True
    recompute: str = "none"  # which decoder layers: none, full, every-N, auto
    wrap: tuple[str, ...] | None = None
    lora: Lora | None = None
    adapter: str | None = None
    seed: int = 0
    compile: bool = False


def build_policy(
    spec: ModelSpec,
    config: Any,
    family: Family,
    parallel: Parallel,
    dummy: dict[str, Tensor] | None = None,
    load: bool = True,
) -> tuple[Policy, str]:
    """The sharded, loaded model and a notice ('' for none).

    Memory: no rank ever holds the whole model; rank 0 holds one tensor of it at a time.
    `load=False` leaves the weights unset, for a checkpoint that will fill them.
    """
    policy = empty_policy(config, family, dummy)
    switch_cache_off(policy.hf.config)
    if spec.lora is not None:
        add_adapters(policy.hf, family, spec.lora)
    else:
        freeze(policy.hf, family, set(spec.frozen))
    if spec.lora is not None or not any(p.requires_grad for p in policy.hf.parameters()):
        for parameter in policy.hf.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(spec.dtype)
    if spec.shard or spec.recompute != "none":
        check_layers(policy.hf, family)
    classes, notice = wrap_classes(policy.hf, family, list(spec.wrap) if spec.wrap else None)
    if spec.compile:
        compile_layers(policy.hf, classes | set(family.vision_layers))
    wrap_layers(policy.hf, classes, spec.recompute)
    if spec.shard:
        shard(policy, family, classes, spec.dtype, parallel)
    give_memory(policy, policy.hf, parallel.device)
    if load or spec.lora is not None:  # a checkpoint of adapters holds nothing else
        fill_from_checkpoint(policy.hf, spec.path, parallel)
    if spec.adapter is not None:
        fill_adapters(policy.hf, spec.adapter)
    elif spec.lora is not None:
        init_adapters(policy.hf, spec.seed)
    return policy, notice


def empty_policy(config: Any, family: Family, dummy: dict[str, Tensor] | None = None) -> Policy:
    """The model's modules without memory for their parameters."""
    auto = getattr(transformers, family.auto_class)
    config = copy.deepcopy(config)  # which the model keeps, and its policy writes to
    if family.remote:  # whose buffers nothing but its own code can make
        from accelerate import init_empty_weights  # PEFT needs it too

        with running_code(config.name_or_path), init_empty_weights(include_buffers=False):
            hf = auto.from_config(config, dtype=torch.float32, trust_remote_code=True)
    else:
        with torch.device("meta"):
            hf = auto.from_config(config, dtype=torch.float32)
    return Policy(hf, family, dummy)


def give_memory(model: nn.Module, hf: Any, device: torch.device | str) -> None:
    """Memory for weights, which have no values yet, and values for the buffers that no checkpoint
    holds. `hf` is the transformers model in `model`."""
    made = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        if name in made:
            buffer.copy_(made[name])
    hf.tie_weights()
    init_buffers(hf)


def whole_model(config: Any, family: Family, folder: str, dtype: torch.dtype | None = None) -> Any:
    """The model with the weights of its folder, unsharded, in float32 or `dtype` (its buffers stay
    as its code makes them, where `from_pretrained` of transformers 5 would empty them)."""
    hf = empty_policy(config, family).hf
    give_memory(hf, hf, "cpu")
    fill_from_checkpoint(hf, folder, alone())
    for parameter in hf.parameters():
        parameter.data = parameter.data.to(dtype or torch.float32)
    return hf


def shard(
    policy: Policy, family: Family, classes: set[str], dtype: torch.dtype, parallel: Parallel
) -> None:
    """FSDP2: each decoder layer and each layer of the vision tower, then the rest as the root.

    Ranks cannot drift: the tower runs in every micro-batch (see Policy), frozen or not. That of a
    family with code of its own is a part of the root: it may run several times in one forward, as
    often as it has slices for, and so would what its layers gather.
    """
    # Inputs of layers are not cast: the vision tower's rotary angles are float32, as they are in
    # the plain model and in an engine.
    precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    layers = classes | set(() if family.remote else family.vision_layers)
    recomputed = {m._checkpoint_wrapped_module for m in policy.modules() if _wraps(m)}
    sharded: list[FSDPModule] = []
    for module in reversed(list(policy.hf.modules())):  # inner modules before outer ones
        if _wraps(module) or (type(module).__name__ in layers and module not in recomputed):
            sharded.append(fully_shard(module, mesh=parallel.mesh, mp_policy=precision))
    sharded.append(fully_shard(policy, mesh=parallel.mesh, mp_policy=precision))
    for module in sharded:  # gradients are summed over ranks, exactly: no division by their number
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(policy, "generate")


def _wraps(module: nn.Module) -> bool:
    return isinstance(module, Recomputed)


def switch_cache_off(config: Any) -> None:
    """No key-value cache in training: recomputation fills it twice, and packing needs it off."""
    for part in [config, *(getattr(config, name) for name in getattr(config, "sub_configs", {}))]:
        if hasattr(part, "use_cache"):
            part.use_cache = False


def init_buffers(hf: Any) -> None:
    """Values of buffers that no checkpoint holds (rotary frequencies, numbers of positions), as the
    model makes them; its parameters, which the same function would fill, are kept away from it."""
    for module, model in _with_models(hf):
        if not module._non_persistent_buffers_set:
            continue
        owners = [(m, dict(m._parameters)) for m in module.modules()]
        for owner, parameters in owners:
            for name, parameter in parameters.items():
                if parameter is not None:
                    stand_in = torch.empty(parameter.shape, device="meta")
                    owner._parameters[name] = nn.Parameter(stand_in, requires_grad=False)
        try:
            model._init_weights(module)
        finally:
            for owner, parameters in owners:
                owner._parameters.update(parameters)


def _with_models(module: nn.Module, model: Any = None) -> Iterator[tuple[nn.Module, Any]]:
    """Every module, with the innermost model round it: a tower of another family is one, too."""
    model = module if isinstance(module, transformers.PreTrainedModel) else model
    yield module, model
    for child in module.children():
        yield from _with_models(child, model)
