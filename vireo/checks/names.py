"""Whether the names in a family's entry are those of the model and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from vireo.checks.report import Finding, listed
from vireo.checks.subject import Subject
from vireo.models.names import named_parameters, part_of

PARTS = ("language", "embeddings", "head")
VISION_PARTS = ("vision", "projector")


def tokens_and_ids(subject: Subject) -> Finding:
    """Image tokens and pad id are right; every id has an embedding, every label a logit."""
    return listed([*_wrong_tokens(subject), *_wrong_ids(subject)])


def _wrong_tokens(subject: Subject) -> Iterator[str]:
    family, renderer = subject.family, subject.renderer
    if not family.has_vision:
        return
    if not renderer.image_ids:
        yield f"image_tokens: the tokenizer has none of {', '.join(family.image_tokens)}"
    if not family.placeholder:
        yield "placeholder: a family with vision needs what its template writes for an image"
    for name in ("image_token_id", "image_token_index"):
        token_id = getattr(renderer.config, name, None)
        if token_id is not None and token_id not in renderer.image_ids:
            token = renderer.tokenizer.decode([token_id])
            yield f"image_tokens lacks {token!r}, the config's {name}: it could be sampled"
    # What stands in the ids of an image row, and in none of its text.
    control = {i for i, t in renderer.tokenizer.added_tokens_decoder.items() if t.special}
    texts: set[int] = set()
    images: set[int] = set()
    for example in subject.examples(subject.drawn):
        (images if example.images else texts).update(example.fields["input_ids"].tolist())
    for token_id in sorted((images - texts) & control - renderer.image_ids):
        yield f"image_tokens lacks {renderer.tokenizer.decode([token_id])!r}: only images have it"


def _wrong_ids(subject: Subject) -> Iterator[str]:
    renderer, hf = subject.renderer, subject.policy.hf
    rows = hf.get_input_embeddings().weight.shape[0]
    logits = hf.get_output_embeddings().weight.shape[0]
    examples = subject.examples()
    largest = max(int(example.fields["input_ids"].max()) for example in examples)
    label = max(int(example.fields["labels"].max()) for example in examples)
    for name, value, size in (
        ("the largest id", largest, rows),
        ("the pad id", renderer.pad_id, rows),
        ("the largest image token", max(renderer.image_ids, default=0), rows),
        ("the largest label", label, logits),
    ):
        if not 0 <= value < size:
            yield f"{name} is {value}, and the model has room for {size}"
    if renderer.pad_id in renderer.image_ids:
        yield f"the pad id {renderer.pad_id} is an image token"


def layer_classes(subject: Subject) -> Finding:
    """The classes that are sharded one by one are those of each part's largest list of layers."""
    family, hf = subject.family, subject.policy.hf
    present = {type(module).__name__ for module in hf.modules()}
    wrong = []
    for what, names, part in (
        ("decoder_layers", family.decoder_layers, "language"),
        ("vision_layers", family.vision_layers, "vision"),
    ):
        if not names:
            continue
        if not set(names) & present:
            wrong.append(f"{what}: the model has no {' nor '.join(names)}")
        elsewhere = [
            f"{what}: {path} is in the part {found!r}, expected {part!r}: mend `parts`"
            for path, module in hf.named_modules()
            if type(module).__name__ in names and (found := part_of(path, family)) != part
        ]
        wrong += elsewhere[:1]
        lists = [
            (sum(p.numel() for p in module.parameters()), path, module)
            for path, module in hf.named_modules()
            if isinstance(module, nn.ModuleList) and part_of(path, family) == part
        ]
        if lists:
            _, path, layers = max(lists, key=lambda found: found[0])
            others = sorted({type(layer).__name__ for layer in layers} - set(names))
            wrong += [f"{what} lacks {name}, a layer of {path}" for name in others]
    return listed(wrong)


def parts_cover_the_model(subject: Subject) -> Finding:
    """Every path of a part is a module of the model, and every parameter has a part."""
    family, hf = subject.family, subject.policy.hf
    known = {name for name, _ in (*hf.named_modules(), *named_parameters(hf))}
    needed = PARTS + (VISION_PARTS if family.has_vision else ())
    wrong = [f"parts has no {part!r}" for part in needed if part not in family.parts]
    wrong += [
        f"parts: {part} is at {path!r}, and the model has no such module or parameter"
        for part, paths in family.parts.items()
        for path in paths
        if path not in known
    ]
    own = dict(hf.named_modules())
    for part, module in (
        ("embeddings", hf.get_input_embeddings()),
        ("head", hf.get_output_embeddings()),
    ):
        paths = family.parts.get(part, ())
        if paths and not any(own.get(path) is module for path in paths):
            path = next(path for path, one in own.items() if one is module)
            wrong.append(f"parts: {part} is at {', '.join(paths)}, and in the model at {path!r}")
    wrong += [f"varlen: there is no part {p!r}" for p in family.varlen if p not in family.parts]
    wrong += [
        f"{name} is in no part" for name, _ in named_parameters(hf) if part_of(name, family) is None
    ]
    return listed(wrong)
