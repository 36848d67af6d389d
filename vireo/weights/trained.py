"""The weights of a policy in training as an engine gets them: whole, merged, renamed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vireo.data.render import Renderer
from vireo.models.build import empty_policy
from vireo.models.names import is_adapter, plain_name
from vireo.models.policy import Policy
from vireo.weights.named import published

BASE, ADAPTERS = ".base_layer.weight", (".lora_A.default.weight", ".lora_B.default.weight")


def whole(policy: Policy, scale: float | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name in a plain model, full tensor), one at a time; collective on all ranks.

    `scale`: of the adapters, which are merged into their base in float32: W + scale B A.
    """
    parameters = dict(policy.hf.named_parameters())
    for name, parameter in parameters.items():
        if is_adapter(name):
            continue
        value = _full(parameter)
        if scale is not None and name.endswith(BASE):
            down, up = (_full(parameters[name.replace(BASE, each)]) for each in ADAPTERS)
            value = (value.float() + scale * (up.float() @ down.float())).to(value.dtype)
        yield plain_name(name), value


def for_engine(
    policy: Policy,
    renderer: Renderer,
    dtype: torch.dtype,
    like: Iterable[str],
    scale: float | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor in `dtype`) of `whole`; `like`: the names that the engine knows."""
    plain = empty_policy(renderer.config, renderer.family).hf
    for name, value in published(plain, renderer.family, whole(policy, scale), like):
        yield name, value.to(dtype) if value.is_floating_point() else value


def _full(parameter: Tensor) -> Tensor:
    value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return value.detach()
