"""Layers compiled one by one (`torch.compile`): fewer, fused kernels, in other roundings."""

from __future__ import annotations

import torch
from torch import nn


def compile_layers(model: nn.Module, classes: set[str]) -> int:
    """Compile the layers of `classes` in place, before the model is sharded; how many there are.

    All layers of a class share one compilation, for any number of tokens. Attention stays as it is
    (see `attention.attend`), and so does what FSDP does round a layer.
    """
    # One compilation for each way that a layer is called: with and without gradients, and by class.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    layers = [module for module in model.modules() if type(module).__name__ in classes]
    for layer in layers:
        layer.compile(dynamic=True)
    return len(layers)
