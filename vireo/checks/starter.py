"""A starting entry for a family that has none: what the model and its processor show, filled in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from vireo.checks.rows import natural_side, picture
from vireo.errors import InputError, first_line
from vireo.families import FAMILIES, Key

_AUTO = ("AutoModelForImageTextToText", "AutoModelForCausalLM")
_PROJECTOR = ("merger", "projector", "connector", "resampler")
_VISION = ("vision", "projector")
_ATTENDS = "CrossAttention"
# What would leak from row to row of a packed sequence, by a word in the model or its config.
_LEAKS = ("linear_attention", "mamba", _ATTENDS)


class UnknownFamily(InputError):
    """The model's family has no entry. `entry`: the text of one to start from."""

    def __init__(self, name: str, entry: str):
        self.entry = entry
        super().__init__(
            f"no entry for the model family {name!r}: save the one above as "
            f"vireo/families/{name}.py, correct it, and run this command again until nothing fails"
        )


def check_known(model: str) -> None:
    """Raises UnknownFamily if transformers knows the model in this folder and Vireo does not."""
    try:
        name = json.loads((Path(model) / "config.json").read_text())["model_type"]
    except (OSError, ValueError, KeyError, TypeError):  # said better by whoever loads it
        return
    if name not in FAMILIES and name in transformers.CONFIG_MAPPING:
        raise UnknownFamily(name, starting_entry(model))


def starting_entry(model: str) -> str:
    """The text of vireo/families/NAME.py for the model in this folder, to be corrected by a person.

    Layers, parts and processor keys are looked up; how rows join is a guess that the grid tests.
    """
    config = transformers.AutoConfig.from_pretrained(model)
    auto, hf = _empty_model(config)
    parts, decoder, tower = _parts(hf)
    fields: dict[str, Any] = {
        "name": config.model_type,
        "auto_class": auto,
        "decoder_layers": decoder,
    }
    notes: dict[str, str] = {}
    if tower:
        fields |= {"vision_layers": tower, "parts": parts}
        try:
            seen, notes = _pictures(model)
        except Exception as error:  # a processor is a program of its own
            raise InputError(
                f"{model}: its processor makes nothing of a picture and a question: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error
        fields |= seen
    else:
        fields["parts"] = {part: p for part, p in parts.items() if part not in _VISION}
    if hasattr(hf.model, "get_rope_index"):
        fields["positions"] = "mrope"
    if any(word in repr(hf) + repr(config) for word in _LEAKS):
        fields["can_pack"] = False
    if _ATTENDS in repr(hf):  # to a row's images side by side
        fields["can_mix"] = False
        packed = {n: key for n, key in fields["keys"].items() if key.dim == 1}
        fields["keys"] |= dict.fromkeys(packed, Key("padded"))
    body = "".join(f"    {name}={_source(value, notes)},\n" for name, value in fields.items())
    return (
        f'"""{config.model_type}: say in one line what is special about it."""\n\n'
        f"from vireo.families.entry import Family{', Key' if tower else ''}\n\n"
        f"FAMILY = Family(\n{body})\n"
    )


def _empty_model(config: Any) -> tuple[str, Any]:
    for auto in _AUTO:
        try:
            with torch.device("meta"):
                return auto, getattr(transformers, auto).from_config(config)
        except ValueError:  # no class of that kind for this config
            continue
    raise InputError(f"transformers has no {' nor '.join(_AUTO)} for {config.model_type!r}")


def _parts(hf: Any) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...], tuple[str, ...]]:
    """Paths by part, and the class names of the decoder's and the tower's layers."""
    paths = {id(module): path for path, module in hf.named_modules()}
    embeddings = paths[id(hf.get_input_embeddings())]
    language = embeddings.rpartition(".")[0]
    others = {
        f"model.{name}": module
        for name, module in hf.model.named_children()
        if next(module.parameters(), None) is not None
        and not f"{language}.".startswith(f"model.{name}.")
        and language != "model"
    }
    bridges = [path for path in others if any(word in path for word in _PROJECTOR)]
    towers = [path for path in others if path not in bridges]
    tower = max(towers, key=lambda path: _size(others[path]), default="")
    inside = [] if not tower else [n for n, _ in others[tower].named_children()]
    projector = [path for path in others if path != tower]
    projector += [f"{tower}.{n}" for n in inside if any(word in n for word in _PROJECTOR)]
    projector += [f"model.{n}" for n, _ in hf.model.named_parameters(recurse=False)]
    parts = {
        "vision": (tower,),
        "projector": tuple(projector),
        "language": (language,),
        "embeddings": (embeddings,),
        "head": (paths[id(hf.get_output_embeddings())],),
    }
    seen = _classes(_layers(others[tower])) if tower else ()
    return parts, _classes(_layers(hf.get_submodule(language))), seen


def _layers(module: nn.Module) -> nn.ModuleList:
    """The longest list of layers in a module, the largest of several."""
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=lambda found: (len(found), _size(found)), default=nn.ModuleList())


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _classes(layers: nn.ModuleList) -> tuple[str, ...]:
    return tuple(dict.fromkeys(type(layer).__name__ for layer in layers))


def _pictures(model: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields about images, and the shapes of each key in rows of one and of two images."""
    processor = transformers.AutoProcessor.from_pretrained(model)
    tokenizer, side = processor.tokenizer, natural_side(processor)
    shown = [picture((side, side), 0), picture((3 * side, 2 * side), 1)]

    def render(images: int) -> str:
        parts = [{"type": "image"}] * images + [{"type": "text", "text": "q"}]
        return processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)

    def call(images: int) -> dict[str, Tensor]:
        return dict(processor(text=[render(images)], images=[shown[:images]], return_tensors="pt"))

    one, two, plain, text = call(1), call(2), render(0), render(1)
    fields: dict[str, Any] = {
        "keys": {n: _key(one, two, n) for n in one if n not in ("input_ids", "attention_mask")}
    }
    start = _alike(plain, text)
    end = _alike(plain[start:][::-1], text[start:][::-1])
    fields["placeholder"] = text[start : len(text) - end].strip()
    ids = one["input_ids"][0].tolist()
    if len(ids) == len(tokenizer(text)["input_ids"]):
        fields["expands"] = False
    if whole := getattr(processor, "full_image_sequence", ""):
        at = whole.index(whole.strip())
        around = whole[:at], whole[at + len(whole.strip()) :]
        fields |= {"around": around} if any(around) else {}
    control = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    seen = {*ids, *two["input_ids"][0].tolist()} - set(tokenizer(plain)["input_ids"])
    words = sorted(seen & control)
    fields["image_tokens"] = tuple(tokenizer.decode([i]) for i in words)
    notes = {n: f"{list(one[n].shape)}, of two {list(two[n].shape)}" for n in fields["keys"]}
    return fields, notes


def _alike(a: str, b: str) -> int:
    """How many characters two texts have in common from their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _key(one: dict[str, Tensor], two: dict[str, Tensor], name: str) -> Key:
    """The likeliest kind of a key, from its shapes in a row of one image and in one of two."""
    a, b = one[name].shape, two[name].shape
    lengths = one["input_ids"].shape[1], two["input_ids"].shape[1]
    tokens = [i for i, sizes in enumerate(zip(a, b)) if sizes == lengths]
    if tokens and len(a) == 2:
        return Key("token")
    if tokens:  # what each token sees: a response sees what the end of its prompt does
        return Key("token", dim=tokens[0] - 1, grow="last")  # of a row, unbatched
    if len(a) == 1 or a[0] != b[0]:
        return Key("packed")
    grown = [i for i, sizes in enumerate(zip(a, b)) if sizes[0] != sizes[1]]
    if len(a) == 2 or not grown:
        return Key("padded")
    return Key("packed", dim=-1 if grown == [len(a) - 1] else grown[0])


def _source(value: Any, notes: dict[str, str]) -> str:
    """Python for a field's value, in double quotes."""
    if isinstance(value, dict):
        lines = [
            f'        "{name}": {_source(inner, {})},'
            + (f"  # {notes[name]}" if name in notes else "")
            for name, inner in value.items()
        ]
        return "\n".join(["{", *lines, "    }"])
    if isinstance(value, tuple):
        inside = ", ".join(_source(inner, {}) for inner in value)
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, Key):
        dim = "" if value.dim is None else f", dim={value.dim}"
        grow = "" if value.grow == "fill" else f', grow="{value.grow}"'
        return f'Key("{value.kind}"{dim}{grow})'
    return json.dumps(value) if isinstance(value, str) else repr(value)
