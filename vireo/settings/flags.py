"""Every name a setting can be given by, read off the tree in `schema`.

Each has its dotted name, which says where it is in the tree, and a flat one, which is the bare
field name unless it is told otherwise here.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from vireo.errors import InputError
from vireo.nearest import nearest
from vireo.settings.schema import Settings
from vireo.settings.section import Positive, Section

_PREFIXES = {"fsdp": "fsdp_", "lora": "lora_"}  # of the flat names of a section
_NAMES = {
    "model.vlm_model_name_or_path": (
        "vlm_model_name_or_path",
        "model_name_or_path",
        "hf_checkpoint",
    ),
    "data.shuffle": ("shuffle", "rollout_shuffle"),
    "batch.per_device_train_batch_size": ("per_device_train_batch_size", "micro_batch_size"),
    "optim.lr_scheduler": ("lr_scheduler", "lr_decay_style"),
    "run.save_dir": ("save_dir", "save"),
    "run.resume": ("resume", "load"),
    "run.save_steps": ("save_steps", "save_interval"),
    "run.eval_steps": ("eval_steps", "eval_interval"),
    "prompts.max_prompt_len": ("max_prompt_len", "rollout_max_prompt_len"),
    "rollout.dynamic_sampling_filter": ("dynamic_sampling_filter", "dynamic_sampling_filter_path"),
    "rollout.debug_train_only": ("debug_train_only", "load_debug_rollout_data"),
    "rewards.reward": ("reward", "rm_type", "reward_fn"),
    "rewards.reward_url": ("reward_url", "rm_url"),
    "fsdp.grad_ckpt": ("grad_ckpt",),
}
_SWITCHES = {"fsdp.grad_ckpt": "none|full|every-N|auto"}  # more than a switch, and one as published
_NONE_IS_A_VALUE = {"run.report_to"}  # as published commands have it: no tracker at all
_WORDS = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    list: "names A,B",
}
_BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


@dataclass(frozen=True)
class Flag:
    """One setting: its dotted name, its flat names (the first is the usual one), its type."""

    dotted: str
    names: tuple[str, ...]
    type: str  # in words, as the table and the error texts say it
    is_bool: bool
    is_list: bool
    optional: bool  # may be None
    required: bool  # has no default, and `default` is None
    default: Any
    meaning: str


def spelling(name: str) -> str:
    """The one form of a flag or file key: `-` and `_` are alike."""
    return name.replace("-", "_")


def _plain(annotation: Any) -> tuple[Any, bool]:
    """The type without Annotated and None, and whether None was among its choices."""
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        (inner,) = (a for a in get_args(annotation) if a is not types.NoneType)
        return _plain(inner)[0], True
    return annotation, False


def _words(plain: Any, info: FieldInfo) -> str:
    if get_origin(plain) is Literal:
        return "|".join(get_args(plain))
    if plain == list[Positive]:
        return "numbers A,B > 0"
    limits = [
        f"{sign} {getattr(limit, attribute):g}"
        for limit in info.metadata
        for attribute, sign in _BOUNDS
        if hasattr(limit, attribute)
    ]
    return " ".join([_WORDS[get_origin(plain) or plain], " and ".join(limits)]).strip()


def flags_of(tree: type[Section], section: str = "") -> Iterator[Flag]:
    """The settings of a tree or of one section by itself, in their order."""
    for attribute, info in tree.model_fields.items():
        name = info.alias or attribute
        plain, optional = _plain(info.annotation)
        if isinstance(plain, type) and issubclass(plain, Section):
            yield from flags_of(plain, name)
            continue
        if get_origin(plain) is dict:  # given by flags of other names
            continue
        dotted = f"{section}.{name}" if section else name
        yield Flag(
            dotted=dotted,
            names=_NAMES.get(dotted, (_PREFIXES.get(section, "") + name,)),
            type=_SWITCHES.get(dotted) or _words(plain, info),
            is_bool=plain is bool or dotted in _SWITCHES,
            is_list=get_origin(plain) is list,
            optional=optional and dotted not in _NONE_IS_A_VALUE,
            required=info.is_required(),
            default=None if info.default is PydanticUndefined else info.default,
            meaning=info.description or "",
        )


FLAGS: dict[str, Flag] = {flag.dotted: flag for flag in flags_of(Settings)}
SECTIONS: tuple[str, ...] = tuple(dict.fromkeys(d.split(".")[0] for d in FLAGS if "." in d))
BY_NAME: dict[str, Flag] = {n: f for f in FLAGS.values() for n in (*f.names, f.dotted)}


def find(name: str, what: str, dashes: str, written: str) -> Flag:
    """The setting of that name. InputError: there is none; the text has the nearest name."""
    if name in BY_NAME:
        return BY_NAME[name]
    near = nearest(name, [*BY_NAME, "config"])
    hint = f"did you mean {dashes}{near}?" if near else "`vireo settings` lists them all"
    raise InputError(f"unknown {what} {written}; {hint}")
