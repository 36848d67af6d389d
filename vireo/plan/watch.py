"""What a forward computes and keeps, seen while it runs on the meta device: by hooks of its linear
modules, by those of autograd's saved tensors, and by an attention that has the shapes alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# With "flash" in it, as that of models.attention: towers then hand over the bounds of windows.
NAME = "vireo_flash_counted"
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Load:
    """What a forward gets.

    rows: tokens of each row, image placeholders among them; supervised: positions that reach the
    head. Images: `grids` of (frames, rows, columns) in patches where the family has grids, else
    `tiles`, each of the tower's one size.
    """

    rows: tuple[int, ...]
    supervised: int
    grids: tuple[Grid, ...] = ()
    tiles: int = 0


@dataclass(frozen=True)
class Product:
    """A matrix product of one forward, and which gradients the backward pass computes of it.

    `flops` are of the product itself; each of `gradients` costs as much again.
    """

    part: str
    attention: bool
    flops: float
    gradients: int


@dataclass
class Layer:
    """Bytes that a layer keeps for its backward pass, and those of its input; its weights, and how
    many of them train; the work of running it again, which ends before its last product: nothing
    of the layer needs what that makes."""

    vision: bool
    kept: int = 0
    given: int = 0
    weights: int = 0
    trained: int = 0
    again: float = 0.0
    last: float = 0.0
    attends: bool = False


@dataclass
class Trace:
    """`kept`: bytes kept outside layers, by part. `weights`, `trained`: numbers of all parameters,
    and of those that train; `words`: outputs of the head."""

    products: list[Product] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)
    weights: int = 0
    trained: int = 0
    words: int = 0


class Watcher:
    """Fills `trace` with what one forward of `hf` does inside `watching`. `part_of` names a
    module's part; `wasted`: nothing reads what it computes."""

    def __init__(
        self,
        hf: Any,
        load: Load,
        part_of: Callable[[nn.Module], str],
        is_layer: Callable[[nn.Module], bool],
        wasted: Callable[[nn.Module], bool],
    ):
        self.hf, self.load = hf, load
        self.part_of, self.is_layer, self.wasted = part_of, is_layer, wasted
        self.trace = Trace()
        self.counting = True
        self.layer: Layer | None = None
        # Storages that are counted, or are weights. A weight's memory is not an activation's.
        self.seen = {p.untyped_storage()._cdata for p in hf.parameters()}
        self.held: list[Tensor] = []  # a storage's place can be given again once it is gone
        self.at = "language"
        whole = {id(p): p for p in hf.parameters()}.values()
        self.trace.words = hf.lm_head.out_features
        self.trace.weights = sum(p.numel() for p in whole)
        self.trace.trained = sum(p.numel() for p in whole if p.requires_grad)

    @contextmanager
    def watching(self) -> Iterator[None]:
        hooks: list[Any] = []
        for module in self.hf.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d)):
                hooks.append(module.register_forward_pre_hook(self._begin))
                hooks.append(module.register_forward_hook(self._product))
            if self.is_layer(module):
                hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                hooks.append(module.register_forward_hook(self._leave))
        token = _watcher.set(self)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor):
                yield
        finally:
            _watcher.reset(token)
            for hook in hooks:
                hook.remove()

    def _begin(self, module: nn.Module, _args: Any) -> None:
        self.at = self.part_of(module)

    def _product(self, module: Any, args: tuple[Any, ...], out: Tensor) -> None:
        weight, given = module.weight, args[0]
        flops = 2.0 * out.numel() * math.prod(weight.shape[1:])
        gradients = weight.requires_grad + given.requires_grad
        if self.wasted(module):
            gradients = 0
        self._add(Product(self.part_of(module), False, flops, gradients))

    def _add(self, product: Product) -> None:
        self.trace.products.append(product)
        if self.layer is not None:
            self.layer.again += self.layer.last
            self.layer.last = product.flops

    def attended(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, pairs: float) -> None:
        """Scores and mixing: two products, of whose four gradients those are computed that lead to
        a trained weight. That of the probabilities leads to queries and to keys."""
        heads = q.shape[1]
        scores, mixing = (2.0 * pairs * heads * x.shape[-1] for x in (q, v))
        to_scores = q.requires_grad + k.requires_grad
        to_mixing = v.requires_grad + (to_scores > 0)
        if self.wasted(module):
            to_scores = to_mixing = 0
        if self.layer is not None:
            self.layer.attends = True
        part = self.part_of(module)
        self._add(Product(part, True, scores, to_scores))
        self._add(Product(part, True, mixing, to_mixing))

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = args[0] if args else kwargs["hidden_states"]
        vision = self.part_of(module) in ("vision", "projector")
        self.layer = Layer(vision, given=given.nbytes)
        self.layer.weights = sum(p.numel() for p in module.parameters())
        self.layer.trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        if not self.wasted(module):
            self.trace.layers.append(self.layer)

    def _leave(self, _module: nn.Module, _args: Any, _out: Any) -> None:
        self.layer = None

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if self.counting and storage._cdata not in self.seen:
            self.seen.add(storage._cdata)
            self.held.append(tensor)
            if self.layer is not None:
                self.layer.kept += storage.nbytes()
            else:
                self.trace.kept[self.at] = self.trace.kept.get(self.at, 0) + storage.nbytes()
        return tensor


_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


class _Flash(torch.autograd.Function):
    """Keeps inputs, output and the logarithm of each row's sum, as the kernel does (Dao 2023,
    arXiv:2307.08691)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
        sums = q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, sums)
        return out


def _attend(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Any,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_rest: Any,
) -> tuple[Tensor, None]:
    """q [R, H, T, D]. Rows of a packed sequence are the load's own, those of a tower its windows,
    else each of the R is one."""
    watcher = _watcher.get()
    assert watcher is not None
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    lengths: Sequence[int]
    if cu_seq_lens_q is not None:
        lengths = cu_seq_lens_q.diff().tolist()
    else:
        lengths = watcher.load.rows if causal else [q.shape[2]] * q.shape[0]
    window = None if sliding_window is None else int(sliding_window)
    pairs = sum(_pairs(length, causal, window) for length in lengths)
    watcher.attended(module, q, k, v, pairs)
    out: Any = _Flash.apply(q, k, v)
    return out, None


def _pairs(length: int, causal: bool, window: int | None) -> float:
    """Pairs of a query and a key that it sees: all, or half of them where it looks back alone."""
    far = 0 if window is None else max(0, length - window)  # these see `window` keys, not all
    return (length**2 - far**2) / 2 if causal else length**2 - far**2


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
