"""Variable-length attention: rows end to end in one sequence, each attending to itself alone.

`torch.nn.attention.varlen` computes it on a GPU; elsewhere, and in float32, the same is computed
with masks. It is registered with transformers under a name that has "flash" in it: to such a name
its vision towers give the bounds of their windows (`cu_seq_lens_q`), where any other makes them
loop over windows in Python. The bounds of packed rows come from the policy instead: transformers
passes keywords to both towers alike, and a recomputed layer runs again in the backward pass, on
another thread, where neither keywords nor context variables reach it.
"""

from __future__ import annotations

import inspect
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vireo.families import Family
from vireo.models.names import part_of

NAME = "vireo_flash_varlen"
_GROUPED = {"enable_gqa"} & set(inspect.signature(varlen_attn).parameters)


class Bounds:
    """Where the rows of a packed sequence begin and end: `cu` int32 [rows + 1], on the device.

    `masks` holds what is computed from it once, for all layers.
    """

    def __init__(self, cu: Tensor, longest: int):
        self.cu, self.longest = cu, longest
        self.masks: dict[tuple[bool, int | None], Tensor] = {}

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Bounds:
        cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(cu.to(device, non_blocking=True), max(lengths))

    def mask(self, causal: bool, window: int | None) -> Tensor:
        """Which keys a query may see, bool [T, T]."""
        if (causal, window) not in self.masks:
            place = torch.arange(int(self.cu[-1]), device=self.cu.device)
            row = torch.searchsorted(self.cu[1:], place, right=True)
            mask = row[:, None] == row
            if causal:
                mask &= place[:, None] >= place
            if window is not None:
                mask &= place[:, None] - place < window
            self.masks[causal, window] = mask
        return self.masks[causal, window]


class Attention:
    """Which attention the parts of a model compute, switched between packed and padded inputs.

    The parts that the family's entry lists take sequences of any lengths end to end: a vision tower
    always, a language model where its rows are packed. The others have transformers' own (sdpa).
    """

    def __init__(self, hf: Any, family: Family):
        self.bounds: Bounds | None = None  # of the rows of the last forward, for its backward too
        self._language: dict[int, Any] = {}
        for name, module in hf.named_modules():
            config, part = getattr(module, "config", None), part_of(name, family)
            if part not in family.varlen or config is None:
                continue
            if getattr(config, "attention_dropout", 0.0):  # the kernel has none
                continue
            if part == "language":
                module.packed_attention = self
                self._language[id(config)] = config
            else:
                config._attn_implementation_internal = NAME

    def packed(self, lengths: list[int] | None, device: torch.device) -> None:
        """The next forward has rows of these lengths end to end; None: padded ones, with a mask."""
        self.bounds = Bounds.of(lengths, device) if lengths and self._language else None
        for config in self._language.values():
            config._attn_implementation_internal = NAME if self.bounds else "sdpa"


def attend(
    module: nn.Module,
    q_1HTD: Tensor,
    k_1GTD: Tensor,
    v_1GTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """[1, T, H, D]; G divides H: as many queries share a key."""
    causal = module.is_causal if is_causal is None else is_causal
    if cu_seq_lens_q is None:
        bounds = module.packed_attention.bounds
    else:
        bounds = _tower_bounds(cu_seq_lens_q)
    assert bounds is not None, "packed rows without their bounds"
    assert attention_mask is None
    assert dropout == 0
    if torch.is_autocast_enabled(kind := q_1HTD.device.type):  # rotary angles made them float32
        dtype = torch.get_autocast_dtype(kind)
        q_1HTD, k_1GTD, v_1GTD = (x.to(dtype) for x in (q_1HTD, k_1GTD, v_1GTD))
    if kind != "cuda" or q_1HTD.dtype == torch.float32:
        return _with_masks(q_1HTD, k_1GTD, v_1GTD, bounds, scaling, bool(causal), sliding_window)
    grouped = q_1HTD.shape[1] != k_1GTD.shape[1]
    left = -1 if sliding_window is None else sliding_window - 1
    out_THD: Any = varlen_attn(
        *(x[0].transpose(0, 1) for x in (q_1HTD, k_1GTD, v_1GTD)),
        *(bounds.cu, bounds.cu, bounds.longest, bounds.longest),
        scale=scaling,
        window_size=(left, 0 if causal else -1),
        **dict.fromkeys(_GROUPED, grouped),
    )
    return out_THD[None], None


def _tower_bounds(cu: Tensor) -> Bounds:
    """The bounds in a tower's own tensor, which all of its layers share: the longest of them is
    read from the device once."""
    if not hasattr(cu, "bounds"):
        cu.bounds = Bounds(cu.to(torch.int32), int(cu.diff().max()))  # type: ignore[attr-defined]
    return cu.bounds  # type: ignore[attr-defined]


def _with_masks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Bounds,
    scaling: float | None,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, None]:
    """The same by scaled_dot_product_attention, exact in any number format."""
    mask = bounds.mask(causal, window)
    grouped = q.shape[1] != k.shape[1]
    out = nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
