"""The weights of a policy in training as an engine gets them: whole, merged, renamed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from vireo.models.names import is_adapter, plain_name
from vireo.models.policy import Policy
from vireo.parallel import whole
from vireo.weights.named import Names

BASE, ADAPTERS = ".base_layer.weight", (".lora_A.default.weight", ".lora_B.default.weight")


def merged(policy: Policy, scale: float | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name in a plain model, full tensor), one at a time; collective on all ranks.

    `scale`: of the adapters, which are merged into their base in float32: W + scale B A.
    """
    parameters = {name: value.detach() for name, value in policy.hf.named_parameters()}
    for name, parameter in parameters.items():
        if is_adapter(name):
            continue
        value = whole(parameter)
        if scale is not None and name.endswith(BASE):
            down, up = (whole(parameters[name.replace(BASE, each)]) for each in ADAPTERS)
            value = (value.float() + scale * (up.float() @ down.float())).to(value.dtype)
        yield plain_name(name), value


def for_engine(
    policy: Policy,
    names: Names,
    dtype: torch.dtype,
    like: Iterable[str],
    scale: float | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor in `dtype`) of `merged`. `names`: of the transformers model without
    adapters, which needs no memory; `like`: those that the engine knows."""
    for name, value in names.published(merged(policy, scale), like):
        yield name, value.to(dtype) if value.is_floating_point() else value
