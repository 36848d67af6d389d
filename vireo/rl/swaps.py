"""What an engine may do otherwise than the trainer: one factor each, to be tried in scoring."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image as Pil
from torch import Tensor

from vireo.data.conversation import ImageRef
from vireo.data.images import resized
from vireo.data.pixels import TURNS, orientation
from vireo.data.prompt import Prompt
from vireo.data.ragged import Example
from vireo.data.received import received
from vireo.data.references import open_reference
from vireo.data.render import Renderer
from vireo.data.response import with_response
from vireo.models.heads import Softmax
from vireo.models.names import part_of
from vireo.models.policy import Policy
from vireo.rl.score import Shape
from vireo.rollout.sample import Sample, Sampling

SHARP, SOFT = Pil.Resampling.BICUBIC, Pil.Resampling.BILINEAR
Pair = tuple[Prompt, Sample]
Row = tuple[Example, Softmax]


@dataclass
class Trainer:
    """What scores responses, unsharded. `other`: other weights, by their names in memory."""

    policy: Policy
    renderer: Renderer
    shape: Shape = field(default_factory=Shape)
    other: Mapping[str, Tensor] | None = None

    def row(self, pair: Pair) -> Row:
        prompt, sample = pair
        example = with_response(prompt.example, sample.response_ids, self.renderer.positions)
        return example, Softmax(sample.sampling.softmax_temperature, self.renderer.banned_ids)


Changed = Callable[[Trainer, Pair, Row], Row | None]
State = Callable[[Trainer, Sequence[Pair]], AbstractContextManager[None] | None]


@dataclass(frozen=True)
class Swap:
    """`row` gives what is scored in the place of a row, None where that is the same; `around` puts
    the model into another state, None where it has no such state. `noisy`: that state has a noise
    floor of its own. `needed`: the model may need what is taken away, and raise."""

    name: str
    meaning: str
    row: Changed | None = None
    around: State | None = None
    packing: bool = True
    noisy: bool = False
    needed: bool = False


# -- other rows ------------------------------------------------------------------------------------


def with_pictures(trainer: Trainer, prompt: Prompt, pictures: list[Pil.Image]) -> Prompt:
    """The prompt with other pictures, prepared as an engine prepares what it receives."""
    by_ids = trainer.renderer.family.forms["embedded"] == "ids"
    form: dict[str, Any] = {"ids": prompt.ids} if by_ids else {"text": prompt.text}
    return replace(received(trainer.renderer, pictures, **form), row=prompt.row)


def _shown(pictures: Callable[[Trainer, Prompt], list[Pil.Image]]) -> Changed:
    """The row with other pictures; not where the prompt would get other ids: those of engine and
    trainer are compared by themselves."""

    def swap(trainer: Trainer, pair: Pair, row: Row) -> Row | None:
        prompt, sample = pair
        changed = pictures(trainer, prompt) if prompt.pictures else []
        if not changed:
            return None
        other = with_pictures(trainer, prompt, changed)
        same = all(v.equal(prompt.example.fields[n]) for n, v in other.example.fields.items())
        return None if same or other.expanded != prompt.expanded else trainer.row((other, sample))

    return swap


def _each(change: Callable[[Pil.Image], Pil.Image]) -> Changed:
    return _shown(lambda trainer, prompt: [change(picture) for picture in prompt.pictures])


def _halved(picture: Pil.Image) -> Pil.Image:
    small = picture.resize([max(1, side // 2) for side in picture.size], SHARP)
    return small.resize(picture.size, SHARP)


def _unturned(trainer: Trainer, prompt: Prompt) -> list[Pil.Image]:
    turns = [_turn(ref) for ref in prompt.row.images] if prompt.row else []
    undo = [TURNS.get({6: 8, 8: 6}.get(turn, turn)) for turn in turns]
    pairs = zip(prompt.pictures, undo)
    return [p if how is None else p.transpose(how) for p, how in pairs] if any(undo) else []


def _turn(ref: ImageRef) -> int:
    if isinstance(ref.value, Pil.Image):
        return orientation(ref.value)
    with open_reference(ref) as stream:
        image = Pil.open(stream)
        image.load()  # some formats have it behind the pixels
        return orientation(image)


def _resized(other: Callable[[Any, str], tuple[Any, str]]) -> Changed:
    """The row's pictures as they were before they got their final size (where the renderer gives
    it), resized with `other` than their (filter, library)."""

    def pictures(trainer: Trainer, prompt: Prompt) -> list[Pil.Image]:
        if prompt.row is None or trainer.renderer.family.grid is None:
            return []
        inner = trainer.renderer.processor.image_processor
        filter, library = other(inner.resample, getattr(inner, "backend", "pil"))
        how = SimpleNamespace(resample=filter, backend=library)
        given = trainer.renderer.pictures(prompt.row)
        return [resized(g, p.size, how) for g, p in zip(given, prompt.pictures)]

    return _shown(pictures)


def _flat(trainer: Trainer, pair: Pair, row: Row) -> Row | None:
    fields = row[0].fields
    flat = fields["positions"][:1].expand_as(fields["positions"]).contiguous()
    same = flat.equal(fields["positions"])
    return None if same else (replace(row[0], fields=fields | {"positions": flat}), row[1])


def without(name: str) -> Swap:
    """The swap that drops one of the family's keys."""

    def swap(trainer: Trainer, pair: Pair, row: Row) -> Row | None:
        fields = {n: v for n, v in row[0].fields.items() if n != name}
        return (replace(row[0], fields=fields), row[1]) if name in row[0].fields else None

    return Swap(f"without {name}", f"the model does not get {name}", swap, needed=True)


def _softmax(**other: Any) -> Changed:
    def swap(trainer: Trainer, pair: Pair, row: Row) -> Row | None:
        changed = replace(row[1], **other)
        return None if changed == row[1] else (row[0], changed)

    return swap


# -- other states of the model ---------------------------------------------------------------------


@contextmanager
def _parameters(policy: Policy, change: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    held = [(name, parameter, parameter.data) for name, parameter in policy.hf.named_parameters()]
    try:
        for name, parameter, data in held:
            parameter.data = change(name, data).to(data.device)
        yield
    finally:
        for _, parameter, data in held:
            parameter.data = data


def in_format(policy: Policy, dtype: torch.dtype) -> AbstractContextManager[None]:
    """The model's parameters in another number format."""
    return _parameters(policy, lambda name, data: data.to(dtype))


def _other_format(trainer: Trainer, pairs: Sequence[Pair]) -> AbstractContextManager[None]:
    is_bf16 = next(trainer.policy.parameters()).dtype == torch.bfloat16
    return in_format(trainer.policy, torch.float32 if is_bf16 else torch.bfloat16)


def _other_weights(*parts: str) -> State:
    """Other weights in these parts (none: in all)."""

    def around(trainer: Trainer, pairs: Sequence[Pair]) -> AbstractContextManager[None] | None:
        other, family = trainer.other, trainer.policy.family
        if other is None or (parts and not any(p.pictures for p, _ in pairs)):
            return None

        def change(name: str, data: Tensor) -> Tensor:
            chosen = not parts or part_of(name, family) in parts
            return other[name].to(data.dtype) if chosen else data

        return _parameters(trainer.policy, change)

    return around


@contextmanager
def attention(policy: Policy, kernel: str) -> Iterator[None]:
    """Every part of the model computes transformers' attention of this name; padded rows only."""
    found = {id(c): c for m in policy.hf.modules() if (c := getattr(m, "config", None))}
    configs = [c for c in found.values() if hasattr(c, "_attn_implementation_internal")]
    held = [(config, config._attn_implementation_internal) for config in configs]
    try:
        for config, _ in held:
            config._attn_implementation_internal = kernel
        yield
    finally:
        for config, before in held:
            config._attn_implementation_internal = before


def _truncated(trainer: Trainer, pairs: Sequence[Pair]) -> AbstractContextManager[None] | None:
    sampling = pairs[0][1].sampling
    cuts = sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)
    text = trainer.renderer.config.get_text_config()
    if not cuts or getattr(text, "final_logit_softcapping", None) is not None:
        return None
    return _cut_logits(trainer, sampling)


@contextmanager
def _cut_logits(trainer: Trainer, sampling: Sampling) -> Iterator[None]:
    """The head gives tokens beyond top-k and top-p (as `Sampler` cuts) no probability."""

    def cut(_module: Any, _given: Any, logits_NV: Tensor) -> Tensor:
        logits_NV = logits_NV.float()
        allowed_NV = logits_NV.clone()
        allowed_NV[:, list(trainer.renderer.banned_ids)] = -torch.inf
        p_NV = (allowed_NV / sampling.softmax_temperature).softmax(-1)
        sorted_NV, order_NV = p_NV.sort(dim=-1, descending=True, stable=True)
        gone_NV = sorted_NV.cumsum(-1) - sorted_NV >= sampling.top_p
        if sampling.top_k:
            gone_NV[:, sampling.top_k :] = True
        return logits_NV.masked_fill(gone_NV.gather(-1, order_NV.argsort(-1)), -torch.inf)

    handle = trainer.policy._language.lm_head.register_forward_hook(cut)
    try:
        yield
    finally:
        handle.remove()


SWAPS = (
    Swap(
        "eager attention",
        "attention by plain matrix products",
        around=lambda trainer, pairs: attention(trainer.policy, "eager"),
        packing=False,
    ),
    Swap(
        "sdpa attention",
        "attention by torch's sdpa",
        around=lambda trainer, pairs: attention(trainer.policy, "sdpa"),
        packing=False,
    ),
    Swap(
        "number format",
        "bf16 in the place of fp32, or fp32 of bf16",
        around=_other_format,
        noisy=True,
    ),
    Swap(
        "resize filter",
        "pictures are resized with another filter",
        _resized(lambda filter, library: (SHARP if filter != SHARP else SOFT, library)),
    ),
    Swap(
        "resize library",
        "pictures are resized by Pillow in the place of torchvision, or the other way round",
        _resized(lambda filter, library: (filter, "torchvision" if library == "pil" else "pil")),
    ),
    Swap("EXIF ignored", "pictures lie as they are stored", _shown(_unturned)),
    Swap(
        "image flipped",
        "left and right of pictures are exchanged",
        _each(lambda p: p.transpose(Pil.Transpose.FLIP_LEFT_RIGHT)),
    ),
    Swap("half size", "pictures have lost half of their resolution", _each(_halved)),
    Swap(
        "blank image",
        "pictures are plain gray",
        _each(lambda p: Pil.new("RGB", p.size, (127, 127, 127))),
    ),
    Swap("1-D positions", "tokens of images are counted like words", _flat),
    Swap("temperature 1", "log-probs are not of the sampling temperature", _softmax(temperature=1)),
    Swap("no ban mask", "tokens that are banned have probability", _softmax(banned=())),
    Swap("raw logits", "neither temperature nor ban mask", _softmax(temperature=1, banned=())),
    Swap("renormalised", "log-probs are of what top-p and top-k leave", None, _truncated),
    Swap("other weights", "the engine has the other weights", None, _other_weights()),
    Swap(
        "old embeddings",
        "images are seen with the other weights, all else with the trainer's",
        None,
        _other_weights("vision", "projector"),
    ),
)
