"""Recomputation of decoder layers in the backward pass: of none, all, every N-th, or as few as the
memory needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.tensor import DTensor

# Share of the memory for what is not counted: vision tower, head, fragments.
RESERVE = 0.2
PROBE = 256  # tokens; also twice and three times as many


class Recomputed(CheckpointWrapper):
    """A decoder layer that keeps its input alone and runs again in the backward pass, if `active`.

    Every layer is wrapped before the model is sharded; which are active can be settled after.
    """

    def __init__(self, layer: nn.Module):
        super().__init__(layer)
        self.active = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active:
            return self._checkpoint_wrapped_module(*args, **kwargs)
        return super().forward(*args, **kwargs)


def wrap_layers(model: nn.Module, classes: set[str], how: str) -> None:
    """Wrap the layers of `classes` for `how`: none, full, every-N, or auto (see `by_memory`)."""
    if how == "none":
        return
    every = int(how.removeprefix("every-")) if how.startswith("every-") else 1
    found = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in classes:
                layer = Recomputed(child)
                layer.active = found % every == 0
                found += 1
                setattr(parent, name, layer)


def by_memory(policy: nn.Module, tokens: int, run: Callable[[int], Any]) -> str:
    """Activate as few layers as let a micro-batch of `tokens` fit into memory; a line about it.

    `run(n)` does a forward of n tokens with gradients and returns its output (to be dropped);
    collective. What a layer keeps for its backward pass is counted at three sizes: beside bytes of
    each token there are those that do not grow (copies of weights in the compute type), and those
    of each pair of tokens, where attention has a mask.
    """
    layers = [module for module in policy.modules() if isinstance(module, Recomputed)]
    once, given = _kept_by_layer(layers, run, PROBE)
    twice, thrice = (_kept_by_layer(layers, run, n * PROBE)[0] for n in (2, 3))
    more, bend = twice - once, max(0, thrice - 2 * twice + once)
    steps = tokens / PROBE - 1
    kept = once + steps * more + steps * (steps - 1) / 2 * bend  # a parabola through the three
    free = memory_left(policy)
    count = layers_needed(len(layers), kept, given / PROBE * tokens, free)
    for i, layer in enumerate(layers):  # spread evenly
        layer.active = (i + 1) * count // len(layers) > i * count // len(layers)
    gib = 1 / (1 << 30)
    return (
        f"--grad_ckpt auto: {count} of {len(layers)} decoder layers are recomputed: one keeps "
        f"{kept * gib:.3g} GiB for {tokens} tokens, and {free * gib:.3g} GiB are free for "
        "activations"
    )


def layers_needed(layers: int, kept: float, given: float, free: float) -> int:
    """How many of `layers` to recompute so that activations fit into `free` bytes.

    A layer keeps `kept` bytes, or its input of `given` bytes when recomputed; one that is being
    recomputed has both for a while.
    """
    for count in range(layers + 1):
        if (layers - count) * kept + count * given + (kept if count else 0) <= free:
            return count
    return layers


def memory_left(policy: nn.Module) -> float:
    """Bytes for activations on this rank once gradients and AdamW's moments are there.

    Gradients are counted whole: they are summed over micro-batches before they are shared out.
    """
    device = next(policy.parameters()).device
    trained = [p for p in policy.parameters() if p.requires_grad]
    states = sum(4 * p.numel() + 8 * _local(p).numel() for p in trained)
    if device.type == "cuda":
        total, used = torch.cuda.mem_get_info(device)[1], torch.cuda.memory_allocated(device)
    else:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        total = pages // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        used = sum(_local(p).nbytes for p in policy.parameters())
    return max(0.0, total * (1 - RESERVE) - used - states)


def _kept_by_layer(
    layers: list[Recomputed], run: Callable[[int], Any], tokens: int
) -> tuple[int, int]:
    """(most bytes that a layer keeps for its backward pass, bytes of its input)."""
    for layer in layers:
        layer.active = False
    kept, given, inside = [0], [0], [False]
    seen: set[int] = set()  # storages that are counted, or are weights

    def enter(layer: nn.Module, args: Any) -> None:
        inside[0] = True
        seen.clear()
        seen.update(weight.untyped_storage().data_ptr() for weight in layer.parameters())
        given.append(args[0].nbytes if args else 0)

    def leave(_layer: nn.Module, _args: Any, _out: Any) -> None:
        inside[0] = False
        kept.append(0)

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if inside[0] and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kept[-1] += storage.nbytes()
        return tensor

    hooks = [layer.register_forward_pre_hook(enter) for layer in layers]
    hooks += [layer.register_forward_hook(leave) for layer in layers]
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        out = run(tokens)
    del out
    for hook in hooks:
        hook.remove()
    return max(kept), max(given)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
