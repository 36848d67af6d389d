"""Variable-length attention: rows end to end in one sequence, each attending to itself alone.

`torch.nn.attention.varlen` computes it on a GPU; elsewhere, and in float32, rows of one length are
computed together. It is registered with transformers under a name that has "flash" in it: to such a
name its vision towers give the bounds of their windows (`cu_seq_lens_q`), where any other makes
them loop over windows in Python.

The bounds of packed rows reach a language model in the place of its mask. Keywords would go to both
towers, and a layer that is recomputed in the backward pass, on another thread, gets its arguments
again, and nothing else.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vireo.families import Family
from vireo.models.names import part_of

NAME = "vireo_flash_varlen"
_GROUPED = {"enable_gqa"} & set(inspect.signature(varlen_attn).parameters)


class Bounds:
    """Where the rows of a packed sequence begin and end: `cu` int32 [rows + 1], on the device."""

    def __init__(self, lengths: list[int], device: torch.device):
        starts = [0, *accumulate(lengths)]
        self.cu = torch.tensor(starts, dtype=torch.int32).to(device, non_blocking=True)
        self.longest = max(lengths)
        by_length: dict[int, list[int]] = {}
        for start, length in zip(starts, lengths):
            by_length.setdefault(length, []).append(start)
        self.lengths = [(length, torch.tensor(at)) for length, at in by_length.items()]

    @cached_property
    def groups(self) -> list[Tensor]:
        """Places of the tokens of all rows of one length, [rows, length], for each length."""
        return [
            (at[:, None] + torch.arange(length)).to(self.cu.device) for length, at in self.lengths
        ]


_packed: ContextVar[Bounds | None] = ContextVar("packed", default=None)


@contextlib.contextmanager
def packed_rows(lengths: list[int] | None, device: torch.device) -> Iterator[None]:
    """A forward inside has rows of these lengths end to end; None: padded ones, with a mask."""
    token = _packed.set(Bounds(lengths, device) if lengths else None)
    try:
        yield
    finally:
        _packed.reset(token)


def use_varlen(hf: Any, family: Family) -> None:
    """Let the parts that the family's entry lists compute this attention. The others, and layers
    with dropout, which the kernel has not, keep transformers' own."""
    for name, module in hf.named_modules():
        config = getattr(module, "config", None)
        if (
            config is not None
            and part_of(name, family) in family.varlen
            and not getattr(config, "attention_dropout", 0.0)
        ):
            config._attn_implementation_internal = NAME


def mask_or_bounds(*args: Any, **kwargs: Any) -> Any:
    """What stands in the place of a layer's mask: the bounds of packed rows, or sdpa's mask."""
    bounds = _packed.get()
    return sdpa_mask(*args, **kwargs) if bounds is None else bounds


@torch.compiler.disable  # kernels of its own, and bounds that are other ones in every micro-batch
def attend(
    module: nn.Module,
    q_1HTD: Tensor,
    k_1GTD: Tensor,
    v_1GTD: Tensor,
    attention_mask: Tensor | Bounds | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """[1, T, H, D], or what sdpa makes of inputs with a mask. G divides H: as many queries share a
    key."""
    if cu_seq_lens_q is not None:
        bounds = _tower_bounds(cu_seq_lens_q)
    elif isinstance(attention_mask, Bounds):
        bounds = attention_mask
    else:
        given = (module, q_1HTD, k_1GTD, v_1GTD, attention_mask, dropout, scaling, is_causal)
        return sdpa_attention_forward(*given, **rest)
    causal = module.is_causal if is_causal is None else is_causal
    if torch.is_autocast_enabled(kind := q_1HTD.device.type):  # rotary angles made them float32
        dtype = torch.get_autocast_dtype(kind)
        q_1HTD, k_1GTD, v_1GTD = (x.to(dtype) for x in (q_1HTD, k_1GTD, v_1GTD))
    if kind != "cuda" or q_1HTD.dtype == torch.float32:
        return _by_length(q_1HTD, k_1GTD, v_1GTD, bounds, scaling, bool(causal), sliding_window)
    q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1) for x in (q_1HTD, k_1GTD, v_1GTD))
    left = -1 if sliding_window is None else sliding_window - 1
    more: dict[str, Any] = dict.fromkeys(_GROUPED, q_1HTD.shape[1] != k_1GTD.shape[1])
    more |= {"scale": scaling, "window_size": (left, 0 if causal else left)}
    cu, longest = bounds.cu, bounds.longest
    out_THD: Any = varlen_attn(q_THD, k_TGD, v_TGD, cu, cu, longest, longest, **more)
    return out_THD[None], None


def _tower_bounds(cu: Tensor) -> Bounds:
    """The bounds in a tower's own tensor, which all of its layers share: it is read from the device
    once."""
    if not hasattr(cu, "bounds"):
        cu.bounds = Bounds(cu.diff().tolist(), cu.device)  # type: ignore[attr-defined]
    return cu.bounds  # type: ignore[attr-defined]


def _by_length(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Bounds,
    scaling: float | None,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, None]:
    """The same by scaled_dot_product_attention, in any number format: rows of one length at a time,
    which are bit for bit what they are alone."""
    out = torch.empty_like(q[0])  # [H, T, D]
    for places in bounds.groups:
        q_RHLD, k_RGLD, v_RGLD = (x[0][:, places].transpose(0, 1) for x in (q, k, v))
        mask = None
        if window is not None:
            place = torch.arange(places.shape[1], device=q.device)
            apart = place[:, None] - place
            mask = (apart >= 0) & (apart < window) if causal else apart.abs() < window
        some = nn.functional.scaled_dot_product_attention(
            q_RHLD,
            k_RGLD,
            v_RGLD,
            attn_mask=mask,
            scale=scaling,
            is_causal=causal and mask is None,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        out = out.index_copy(1, places.flatten(), some.transpose(0, 1).flatten(1, 2))
    return out.transpose(0, 1)[None].contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask_or_bounds)
