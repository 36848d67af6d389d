"""Build a model on no memory, shard it, and fill the shards: load, freeze, recompute, shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from vireo.families import Family
from vireo.models.load import fill_from_checkpoint
from vireo.models.lora import Lora, add_adapters, fill_adapters, init_adapters
from vireo.models.names import freeze, wrap_classes
from vireo.models.policy import Policy
from vireo.parallel import Parallel


@dataclass(frozen=True)
class ModelSpec:
    """What to build.

    `frozen` names parts; `dtype` is the compute type. Masters are float32, except for the frozen
    base under adapters, which has the compute type. `adapter`: a folder whose adapters `lora`
    describes and the run starts from.
    """

    path: str
    frozen: frozenset[str] = frozenset()
    dtype: torch.dtype = torch.float32
    shard: bool = True
    recompute: bool = False  # activation checkpointing of each decoder layer
    wrap: tuple[str, ...] | None = None
    lora: Lora | None = None
    adapter: str | None = None
    seed: int = 0


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
        for parameter in policy.hf.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(spec.dtype)
    else:
        freeze(policy.hf, family, set(spec.frozen))
    classes, notice = wrap_classes(policy.hf, family, list(spec.wrap) if spec.wrap else None)
    if spec.recompute:
        wrap_layers(policy.hf, classes, lambda layer: checkpoint_wrapper(layer))
    if spec.shard:
        shard(policy, family, classes, spec.dtype, parallel)
    policy.to_empty(device=parallel.device)
    policy.hf.tie_weights()
    init_buffers(policy.hf)
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
    with torch.device("meta"):
        hf = auto.from_config(config, dtype=torch.float32)
    return Policy(hf, family, dummy)


def shard(
    policy: Policy, family: Family, classes: set[str], dtype: torch.dtype, parallel: Parallel
) -> None:
    """FSDP2: each decoder layer and each layer of the vision tower, then the rest as the root.

    Ranks cannot drift: the tower runs in every micro-batch (see Policy), frozen or not.
    """
    # Inputs of layers are not cast: the vision tower's rotary angles are float32, as they are in
    # the plain model and in an engine.
    precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    layers = classes | set(family.vision_layers)
    recomputed = {m._checkpoint_wrapped_module for m in policy.modules() if _recomputes(m)}
    sharded: list[FSDPModule] = []
    for module in reversed(list(policy.hf.modules())):  # inner modules before outer ones
        if _recomputes(module) or (type(module).__name__ in layers and module not in recomputed):
            sharded.append(fully_shard(module, mesh=parallel.mesh, mp_policy=precision))
    sharded.append(fully_shard(policy, mesh=parallel.mesh, mp_policy=precision))
    for module in sharded:  # gradients are summed over ranks, exactly: no division by their number
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(policy, "generate")


def _recomputes(module: nn.Module) -> bool:
    return isinstance(module, CheckpointWrapper)


def wrap_layers(model: nn.Module, classes: set[str], wrap: Any) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in classes:
                setattr(parent, name, wrap(child))


def switch_cache_off(config: Any) -> None:
    """No key-value cache in training: recomputation fills it twice, and packing needs it off."""
    for part in [config, *(getattr(config, name) for name in getattr(config, "sub_configs", {}))]:
        if hasattr(part, "use_cache"):
            part.use_cache = False


def init_buffers(hf: Any) -> None:
    """Values of buffers that no checkpoint holds (rotary frequencies, numbers of positions), as the
    model makes them; its parameters, which the same function would fill, are kept away from it."""
    for module in hf.modules():
        if not module._non_persistent_buffers_set:
            continue
        owners = [(m, dict(m._parameters)) for m in module.modules()]
        for owner, parameters in owners:
            for name, parameter in parameters.items():
                if parameter is not None:
                    stand_in = torch.empty(parameter.shape, device="meta")
                    owner._parameters[name] = nn.Parameter(stand_in, requires_grad=False)
        try:
            hf._init_weights(module)
        finally:
            for owner, parameters in owners:
                owner._parameters.update(parameters)
