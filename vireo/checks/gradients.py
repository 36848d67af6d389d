"""Which parameters learn from a batch, and what frozen ones cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vireo.checks.joined import image_rows
from vireo.checks.report import Cannot, Finding, listed
from vireo.checks.subject import Subject
from vireo.data.conversation import Conversation
from vireo.models.names import freeze, named_parameters, part_of, unused_paths

PICTURES = frozenset({"vision", "projector"})
WORDS = frozenset({"language", "embeddings", "head"})


def every_parameter_learns(subject: Subject) -> Finding:
    """Each parameter but `unused` gets a gradient from the drawn rows; `unused` ones get none."""
    with _frozen(subject, None):
        learned = _gradients(subject, subject.drawn)
    paths = unused_paths(subject.policy.hf, subject.family)
    named = [name for name, _ in named_parameters(subject.policy.hf)]
    stirred = {name for name in named if name.startswith(paths) and learned.get(name)}
    still = {name for name in named if not name.startswith(paths) and not learned.get(name)}
    return listed(
        [
            f"{path} learns, and the entry has it in `unused`, so it would never be trained"
            for path in _modules(stirred, named)
        ]
        + [
            f"{path} gets no gradient: cut off, or to be listed in `unused`"
            for path in _modules(still, named)
        ]
    )


def _modules(chosen: set[str], named: list[str]) -> list[str]:
    """For each name the largest module whose parameters are all chosen, or the parameter itself."""

    def whole(path: str) -> bool:
        return chosen.issuperset(name for name in named if name.startswith(f"{path}."))

    found: dict[str, None] = {}
    for name in sorted(chosen):
        while (parent := name.rpartition(".")[0]) and whole(parent):
            name = parent
        found[name] = None
    return list(found)


def text_leaves_the_tower_alone(subject: Subject) -> Finding:
    """Rows without images give the tower and the projector no gradient, or one of zeros."""
    if not subject.family.has_vision:
        raise Cannot("a text family has no tower")
    with _frozen(subject, frozenset()):
        learned = _gradients(subject, [row for row in subject.drawn if not row.images])
    parts = {name: part_of(name, subject.family) for name in learned}
    return listed(
        [
            f"{name} learns from text rows"
            for name, size in learned.items()
            if size and parts[name] in PICTURES
        ]
    )


def frozen_parts_cost_nothing(subject: Subject) -> Finding:
    """Frozen parts get no gradient and the others do; nothing of a frozen tower is kept in memory
    for the backward pass."""
    wrong: list[str] = []
    paths = unused_paths(subject.policy.hf, subject.family)
    vision = subject.family.has_vision
    rows = image_rows(subject, subject.drawn) if vision else subject.drawn
    for parts in (PICTURES, WORDS) if vision else (frozenset({"embeddings", "head"}),):
        with _frozen(subject, parts), _kept_inside(subject, parts) as kept:
            learned = _gradients(subject, rows)
        for name, parameter in named_parameters(subject.policy.hf):
            still = part_of(name, subject.family) in parts or name.startswith(paths)
            if still and (name in learned or parameter.grad is not None):
                wrong.append(f"{name} is frozen and gets a gradient")
            elif not still and name not in learned:
                wrong.append(f"with {', '.join(sorted(parts))} frozen, {name} gets no gradient")
        if parts == PICTURES and kept:
            wrong.append(f"{sum(kept):,} bytes of the frozen tower are kept for the backward pass")
    return listed(wrong)


@contextmanager
def _frozen(subject: Subject, parts: frozenset[str] | None) -> Iterator[None]:
    """With `parts` (and `unused`) frozen as a run freezes them; None: everything can train."""
    hf = subject.policy.hf
    before = {name: p.requires_grad for name, p in named_parameters(hf)}
    try:
        hf.requires_grad_(True)
        if parts is not None:
            freeze(hf, subject.family, set(parts))
        yield
    finally:
        for name, parameter in named_parameters(hf):
            parameter.requires_grad_(before[name])


def _gradients(subject: Subject, rows: Sequence[Conversation]) -> dict[str, float]:
    """The largest gradient of each parameter that gets one; each is dropped as soon as seen."""
    found: dict[str, float] = {}
    handles = []

    def note(name: str):
        def seen(parameter: Tensor) -> None:
            assert parameter.grad is not None
            found[name] = max(found.get(name, 0.0), float(parameter.grad.abs().max()))
            parameter.grad = None

        return seen

    for name, parameter in named_parameters(subject.policy.hf):
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(note(name)))
    try:
        for batch in subject.batches(subject.examples(rows), packing=False):
            logprobs = subject.run(batch, packing=False)
            if logprobs.requires_grad:
                logprobs.mean().backward()
    finally:
        for handle in handles:
            handle.remove()
    return found


@contextmanager
def _kept_inside(subject: Subject, parts: frozenset[str]) -> Iterator[list[int]]:
    """Bytes of each tensor that the modules of `parts` keep for the backward pass."""
    kept: list[int] = []
    depth = 0
    modules = dict(subject.policy.hf.named_modules())
    roots = [
        modules[p] for part in parts for p in subject.family.parts.get(part, ()) if p in modules
    ]
    handles = []

    def enter(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    def pack(tensor: Tensor) -> Tensor:
        if depth > 0 and not isinstance(tensor, nn.Parameter):
            kept.append(tensor.numel() * tensor.element_size())
        return tensor

    for module in roots:
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield kept
    finally:
        for handle in handles:
            handle.remove()
