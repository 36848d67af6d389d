"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) by PEFT, put in before sharding.

The base is frozen and kept in the compute type; adapters are float32. Which modules get one is
decided here, not by PEFT's patterns, so that it can be printed and a name that hits nothing is an
error.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vireo.errors import InputError
from vireo.families import Family
from vireo.hub import local_folder
from vireo.models.names import is_adapter, named_parameters, part_of
from vireo.nearest import nearest

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Words for all linear modules of a part.
PART_WORDS = {"vision_tower": "vision", "mm_proj": "projector", "language": "language"}
DEFAULT_TARGETS = ("language",)
BASE_MARK = "base_fingerprint"  # in the weight file's own notes
# What an adapter folder may have that plain LoRA has not.
_OTHER_KINDS = (
    *("use_dora", "use_rslora", "use_qalora", "lora_bias", "modules_to_save", "rank_pattern"),
    *("alpha_pattern", "layer_replication", "trainable_token_indices", "target_parameters"),
    *("alora_invocation_tokens", "corda_config", "eva_config", "loftq_config"),
)
_BASE = "base_model_name_or_path"
_NAME = "default"  # PEFT's name of the one adapter


@dataclass(frozen=True)
class Lora:
    """Adapters of rank `r` that count alpha / r times.

    `targets`, `ignores`: words of PART_WORDS, module names (`q_proj`), or dotted paths.
    `closed`: parts that a bare module name does not reach, only their word or a path.
    """

    r: int
    alpha: int
    dropout: float = 0.0
    targets: tuple[str, ...] = DEFAULT_TARGETS
    ignores: tuple[str, ...] = ()
    closed: frozenset[str] = frozenset()


def add_adapters(hf: nn.Module, family: Family, lora: Lora) -> list[str]:
    """Put adapters into `hf` (on any device, meta too), freeze the rest; the modules' names.

    Raises InputError for a target or ignore that matches no linear module.
    """
    from peft import inject_adapter_in_model

    chosen = matched_modules(hf, family, lora)
    meta = next(hf.parameters()).is_meta
    inject_adapter_in_model(peft_config(lora, chosen), hf, low_cpu_mem_usage=meta)
    assert adapted_modules(hf) == chosen  # PEFT finds modules by the ends of their names
    for name, parameter in named_parameters(hf):
        if is_adapter(name):
            parameter.data = parameter.data.float()
    return chosen


def short_names(hf: nn.Module, modules: list[str]) -> list[str]:
    """The last pieces of the names (`q_proj`) where PEFT, which matches by ending, finds the same
    modules by them; else the full names."""
    last = sorted({name.split(".")[-1] for name in modules})
    found = {n for n, _ in hf.named_modules() if n.split(".")[-1] in last}
    return last if found == set(modules) else modules


def peft_config(lora: Lora, modules: list[str]) -> Any:
    """PEFT's own config of these adapters; `modules` by full names."""
    from peft import LoraConfig

    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=modules,
        bias="none",
        task_type=None,
    )


def matched_modules(hf: nn.Module, family: Family, lora: Lora) -> list[str]:
    """Full names of the linear modules that get an adapter, in the model's order."""
    # Not the `out_proj` of torch's own attention, which is read but never called: its type is
    # another one, and an adapter of it would never be reached.
    linear = [name for name, module in hf.named_modules() if type(module) is nn.Linear]
    part = {name: part_of(name, family) for name in linear}
    # Embeddings and head have no adapters: a tied pair would need two at once.
    open_to = [name for name in linear if part[name] not in ("head", "embeddings")]
    closed_by_peft = _taken_for_experts(hf, open_to)
    open_to = [name for name in open_to if name.split(".")[-1] not in closed_by_peft]

    def hits(word: str, flag: str, closed: frozenset[str]) -> set[str]:
        if word in PART_WORDS:
            found = {name for name in open_to if part[name] == PART_WORDS[word]}
        elif "." in word:
            found = {n for n in open_to if n == word or n.startswith(word + ".")}
            found = found or {name for name in open_to if name.endswith("." + word)}
        else:
            found = {n for n in open_to if n.split(".")[-1] == word and part[n] not in closed}
        if not found:
            raise InputError(_no_match(word, flag, hf, open_to, part))
        return found

    wanted = set().union(*(hits(w, "--lora_target_modules", lora.closed) for w in lora.targets))
    unwanted: set[str] = set()
    for word in lora.ignores:
        unwanted |= hits(word, "--lora_ignore_modules", frozenset())
    if not wanted - unwanted:
        raise InputError("--lora_ignore_modules leaves no module of --lora_target_modules over")
    return [name for name in linear if name in wanted - unwanted]


def adapted_modules(hf: nn.Module) -> list[str]:
    """Full names of the modules that have an adapter."""
    names = (name for name, _ in named_parameters(hf))
    return [name.partition(".lora_A.")[0] for name in names if ".lora_A." in name]


def _taken_for_experts(hf: nn.Module, linear: list[str]) -> set[str]:
    """Last pieces of names that PEFT takes for experts, which have such names on disk: it would put
    adapters on the fused tensors in place of the modules."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    taken = set()
    for piece in {name.split(".")[-1] for name in linear}:
        config = peft_config(Lora(1, 1), [piece])
        try:
            convert_peft_config_for_transformers(config, model=hf, conversions=None)
        except ValueError:  # part of a tensor whose other parts are not named
            config.target_modules = set()
        if piece not in config.target_modules:
            taken.add(piece)
    return taken


def _tensor_with(hf: nn.Module, word: str) -> str | None:
    """The end of the name of the tensor that holds what has this name on disk, where layouts differ
    (weights of all experts in one)."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    for entry in get_model_conversion_mapping(hf):  # type: ignore[arg-type]
        patterns = [*entry.source_patterns, *entry.target_patterns]
        if hasattr(entry, "operations") and any(word in p.split(".") for p in patterns):
            return entry.target_patterns[0]
    return None


def _no_match(word: str, flag: str, hf: nn.Module, linear: list[str], part: dict) -> str:
    names = sorted({n for name in linear if not (n := name.split(".")[-1]).isdigit()})
    words = [w for w, p in PART_WORDS.items() if p in part.values()]
    parts = sorted({part[n] for n in linear if n.split(".")[-1] == word and part[n]})
    if parts:
        word_of = {p: w for w, p in PART_WORDS.items()}
        where = " and ".join(word_of.get(p, p) for p in parts)
        return f"{flag} {word}: only {where} has it, which is frozen; name that part, or a path"
    other = next((m for n, m in hf.named_modules() if n.split(".")[-1] == word), None)
    if other is not None and not isinstance(other, nn.Linear):
        kind = type(other).__name__
        places = ", ".join(names)
        return f"{flag} {word} is of type {kind}, and adapters go on linear modules: {places}"
    if tensor := _tensor_with(hf, word):
        return (
            f"{flag} {word} is in the tensor {tensor}, and adapters go on linear modules: "
            f"{', '.join(names)}"
        )
    near = nearest(word, [*names, *words])
    hint = f"; did you mean {near}?" if near else "."
    return (
        f"{flag} {word}: no such linear module in this model{hint} It has {', '.join(names)}; "
        f"whole parts are {', '.join(words)}"
    )


def summary(modules: Iterable[str]) -> str:
    """The names for a person: numbered layers as one, `language_model.layers.{0-27}.q_proj`."""
    groups: dict[str, list[int]] = {}
    for name in modules:
        pieces = name.split(".")
        at = next((i for i, piece in enumerate(pieces) if piece.isdigit()), None)
        number = -1 if at is None else int(pieces[at])
        if at is not None:
            pieces[at] = "{}"
        groups.setdefault(".".join(pieces), []).append(number)
    return ", ".join(g.replace("{}", _ranges(n)) if "{}" in g else g for g, n in groups.items())


def _ranges(numbers: list[int]) -> str:
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    shown = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return shown if len(numbers) == 1 else f"[{shown}]"


@torch.no_grad()
def init_adapters(hf: nn.Module, seed: int) -> None:
    """A uniform as PEFT's (Kaiming, a = sqrt 5), B zero: the same values on any number of ranks."""
    for name, parameter in named_parameters(hf):
        if not is_adapter(name):
            continue
        if ".lora_B." in name:
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).zero_()
            continue
        generator = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
        full = torch.empty(parameter.shape)
        nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
        set_full(parameter, full)


@torch.no_grad()
def set_full(parameter: Tensor, full: Tensor) -> None:
    """Fill a parameter from the full tensor that every rank holds; a shard takes its rows."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(full)
        return
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local = parameter.to_local()
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    if local.numel():
        local.copy_(full[offset[0] : offset[0] + shape[0]])


# -- files ---------------------------------------------------------------------------------------


def published_name(name: str) -> str:
    """A parameter's name as PEFT's files have it."""
    return "base_model.model." + name.replace(f".{_NAME}.", ".")


def read_adapter(folder: str | Path) -> Lora:
    """What an adapter folder holds, its modules as targets; InputError for other kinds."""
    path = Path(folder)
    try:
        config = json.loads((path / ADAPTER_CONFIG).read_text())
        with safe_open(path / ADAPTER_WEIGHTS, framework="pt") as file:
            names = list(file.keys())
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{folder} holds no readable adapter: {error}") from error
    strange = [key for key in _OTHER_KINDS if config.get(key)]
    if config.get("init_lora_weights", True) not in (True, False, "gaussian"):
        strange.append(f"init_lora_weights {config['init_lora_weights']}")  # moves the base's own
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or strange:
        raise InputError(
            f"{folder}: only plain LoRA adapters can be gone on with, found "
            f"{', '.join([str(config.get('peft_type')), *strange])}"
        )
    modules = [
        n.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        for n in names
        if n.endswith(".lora_A.weight")
    ]
    if not modules:
        raise InputError(f"{folder}/{ADAPTER_WEIGHTS} holds no LoRA weights")
    scale = config.get("r"), config.get("lora_alpha")
    if not all(isinstance(value, int) and value > 0 for value in scale):
        raise InputError(f"{folder}/{ADAPTER_CONFIG}: r and lora_alpha are {scale}")
    return Lora(*scale, config.get("lora_dropout") or 0.0, tuple(modules))


def base_of(folder: str | Path) -> str:
    """The folder of the model that an adapter folder was trained on."""
    try:
        return local_folder(json.loads((Path(folder) / ADAPTER_CONFIG).read_text())[_BASE])
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{folder}/{ADAPTER_CONFIG} does not name a base: {error}") from error


def other_base(folder: str | Path, fingerprint: int) -> str:
    """A notice if an adapter folder says that it was trained on another model ('' if not)."""
    with safe_open(Path(folder) / ADAPTER_WEIGHTS, framework="pt") as file:
        mark = (file.metadata() or {}).get(BASE_MARK)
    if mark is None or mark == str(fingerprint):
        return ""
    return f"the adapters of {folder} were trained on another base: its weight files differ"


def fill_adapters(hf: nn.Module, folder: str | Path) -> None:
    """Fill all adapters of `hf` from an adapter folder; every rank reads it.

    Raises InputError for weights that are missing, left over or of another shape: a key under
    another prefix would leave its module untrained without a word.
    """
    path = Path(folder) / ADAPTER_WEIGHTS
    wanted = {published_name(n): p for n, p in named_parameters(hf) if is_adapter(n)}
    with safe_open(path, framework="pt") as file:
        found = set(file.keys())
        unused, missing = sorted(found - set(wanted)), sorted(set(wanted) - found)
        for what, names in (("has no place for", unused), ("lacks", missing)):
            if names:
                raise InputError(
                    f"{path}: {len(names)} adapter weights: the "
                    f"{'model' if what != 'lacks' else 'file'} {what} {names[0]}"
                )
        for name, parameter in wanted.items():
            full = file.get_tensor(name)
            if full.shape != parameter.shape:
                raise InputError(
                    f"{path}: {name} has shape {tuple(full.shape)}, "
                    f"the model wants {tuple(parameter.shape)}"
                )
            set_full(parameter, full)


@torch.no_grad()
def merge_adapters(hf: nn.Module, adapters: dict[str, Tensor], scale: float) -> None:
    """W += scale x B A, in float32, for each pair of `adapters` (by parameter name) in a plain
    model without adapters."""
    weights = dict(hf.named_parameters(remove_duplicate=False))
    for name, a in adapters.items():
        if ".lora_A." not in name:
            continue
        b = adapters[name.replace(".lora_A.", ".lora_B.")]
        module = name.partition(".lora_A.")[0]
        weight = weights[f"{module}.weight"]
        weight.add_((scale * (b.float() @ a.float())).to(weight.dtype))
