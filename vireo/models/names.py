"""Which module or parameter belongs to which part of a model, by the family's entry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from vireo.errors import InputError
from vireo.families import FAMILIES, Family


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by the names that the model's checkpoint uses, whatever wraps its layers."""
    for name, parameter in model.named_parameters():
        yield plain_name(name), parameter


def plain_name(name: str) -> str:
    """A name without what recomputation and adapters put into it."""
    return name.replace("_checkpoint_wrapped_module.", "").replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is a low-rank adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def part_of(name: str, family: Family) -> str | None:
    """The part (vision, projector, language, ...) of a parameter's name; the longest path wins."""
    best, found = -1, None
    for part, paths in family.parts.items():
        for path in paths:
            if (name == path or name.startswith(path + ".")) and len(path) > best:
                best, found = len(path), part
    return found


def freeze(model: nn.Module, family: Family, parts: set[str]) -> None:
    """Switch the gradients of `parts` off, and of what no forward reaches. Neither holds any
    optimizer state."""
    unused = unused_paths(model, family)
    for name, parameter in named_parameters(model):
        if part_of(name, family) in parts or name.startswith(unused):
            parameter.requires_grad_(False)


def unused_paths(model: nn.Module, family: Family) -> tuple[str, ...]:
    """Paths of the modules that no forward reaches, each with a dot behind it."""
    paths = list(family.unused)
    if family.tower_layers is not None:
        tower: Any = model.get_submodule(family.tower_layers)
        config: Any = model.config
        layers = len(tower)
        shown = config.vision_feature_layer  # 0: what goes into the tower; -1: its last output
        shown = [shown] if isinstance(shown, int) else shown
        last = max(layer % (layers + 1) for layer in shown)
        paths += [f"{family.tower_layers}.{i}" for i in range(last, layers)]
    return tuple(f"{path}." for path in paths)


def check_layers(model: nn.Module, family: Family) -> None:
    """InputError where no decoder layer is of a kind that the entry knows: none would be sharded or
    recomputed by itself."""
    present = {type(module).__name__ for module in model.modules()}
    if not set(family.decoder_layers) & present:
        others = sorted(n for n in present if n.endswith("DecoderLayer"))
        raise InputError(
            f"this {family.name} model has no decoder layer of a kind that is known here "
            f"({', '.join(family.decoder_layers)}), but {', '.join(others) or 'others'}: take a "
            "model with one of them"
        )


def wrap_classes(
    model: nn.Module, family: Family, wanted: list[str] | None
) -> tuple[set[str], str]:
    """Class names of the layers to shard one by one, and a notice for the person ('' for none).

    Names of an older layout, and of other families in a list made for several, are understood.
    """
    present = {type(module).__name__ for module in model.modules()}
    mine = set(family.decoder_layers) & present
    if not wanted:
        return mine, ""
    tower = sorted(set(wanted) & set(family.vision_layers))
    if tower:
        raise InputError(
            f"--fsdp_auto_wrap_cls {','.join(tower)}: a layer of the vision tower, which is "
            f"sharded by itself; name the decoder layer instead: {', '.join(sorted(mine))}"
        )
    old = [name for name in wanted if name in family.layer_aliases]
    chosen = set(wanted) & mine | (mine if old else set())
    if not chosen:
        layers = sorted(name for name in present if name.endswith("Layer")) or sorted(mine)
        raise InputError(
            f"--fsdp_auto_wrap_cls {','.join(wanted)}: no such layer in this {family.name} model; "
            f"it has {', '.join(layers)}"
        )
    known = {name for f in FAMILIES.values() for name in (*f.decoder_layers, *f.layer_aliases)}
    notes = []
    if old:
        notes.append(f"{', '.join(old)} is the older name of {', '.join(sorted(mine))}")
    if others := [name for name in wanted if name not in mine and name not in old]:
        strange = [name for name in others if name not in known]
        notes.append(
            f"{', '.join(others)}: not in this model"
            + (", nor in any known family" if strange else "")
        )
    return chosen, "; ".join(notes)
