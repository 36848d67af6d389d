"""The normaliser: flags and a file become one nested dict, which pydantic then types."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from vireo.errors import InputError
from vireo.settings.files import read_file
from vireo.settings.flags import BY_NAME, SECTIONS, Flag, find, spelling
from vireo.settings.schema import RL_SECTIONS, SFT, TRAINER_DEFAULTS

SERVER_ARGS = "engine.server_args"


class Given(NamedTuple):
    value: Any
    name: str  # its one spelling
    written: str  # as the person wrote it, for error texts


def is_rl(dotted: str) -> bool:
    """Whether a setting has a meaning for trainers with rollouts alone."""
    rollout = ("cluster.rollout_num_gpus", "cluster.rollout_num_gpus_per_engine")
    return dotted.split(".")[0] in RL_SECTIONS or dotted in (*rollout, "cluster.colocate")


def normalise(argv: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the nested values, and dotted name -> the name as written. Flags beat the file."""
    config, given = _from_argv(argv)
    if config is not None:
        given = {**_from_file(config), **given}
    nested: dict[str, Any] = {section: {} for section in SECTIONS}
    if "trainer" not in given and any(is_rl(dotted) for dotted in given):
        nested["trainer"] = "grpo"
    for dotted, entry in given.items():
        section, _, key = dotted.rpartition(".")
        (nested[section] if section else nested)[key] = entry.value
    if "engine" not in nested["engine"] and _is_placed(nested):
        nested["engine"]["engine"] = "vllm" if _asks_for_vllm(nested["engine"]) else "sglang"
    for dotted, default in TRAINER_DEFAULTS.get(nested.get("trainer"), {}).items():
        section, _, key = dotted.partition(".")
        nested[section].setdefault(key, default)
    return nested, {dotted: entry.written for dotted, entry in given.items()}


def _is_placed(nested: dict[str, Any]) -> bool:
    """Whether it is a run with rollouts that Ray places: its engine is a server, if not said."""
    cluster = nested["cluster"]
    places = cluster.get("launcher") is not None or cluster.get("actor_num_gpus_per_node")
    return bool(places) and nested.get("trainer", SFT[0]) not in SFT


def _asks_for_vllm(engine: dict[str, Any]) -> bool:
    names = engine.get("server_args") or {}
    return bool(engine.get("vllm_url")) or any(str(name).startswith("vllm-") for name in names)


def _from_argv(argv: list[str]) -> tuple[str | None, dict[str, Given]]:
    """`--flag value`, `--flag=value` or a bare boolean `--flag`; the same flag again replaces."""
    tokens, config, given = deque(argv), None, dict[str, Given]()
    while tokens:
        written, has_value, value = tokens.popleft().partition("=")
        if not written.startswith("--"):
            raise InputError(f"unexpected {written!r}: a flag starts with --, a list is A,B")
        name = spelling(written[2:])
        if name not in BY_NAME and name.startswith(("sglang_", "vllm_")):
            if not has_value and tokens and not tokens[0].startswith("--"):
                value = tokens.popleft()
            args = given.setdefault(SERVER_ARGS, Given({}, "server_args", written)).value
            args[written[2:].replace("_", "-")] = value
            continue
        flag = None if name == "config" else find(name, "flag", "--", written)
        if not has_value:
            if tokens and not tokens[0].startswith("--"):
                value = tokens.popleft()
                while flag and flag.is_list and tokens and not tokens[0].startswith("--"):
                    value += "," + tokens.popleft()
            elif flag and flag.is_bool:
                value = "true"
            else:
                raise InputError(f"{written} needs a value: {flag.type if flag else 'a file'}")
        if flag:
            none = flag.optional and value.lower() == "none"
            _put(given, flag, Given(None if none else value, name, written))
        elif config is not None:
            raise InputError(f"{written} is given twice: settings come from one file")
        else:
            config = value
    return config, given


def _from_file(path: str) -> dict[str, Given]:
    """Sections, dotted keys and flat names, all by the names the flags have."""
    given: dict[str, Given] = {}
    for key, value in read_file(path).items():
        items = {key: value}
        section = spelling(str(key))
        if section in SECTIONS and (isinstance(value, dict | None) or section not in BY_NAME):
            if not isinstance(value, dict | None):
                raise InputError(f"{key} ({path}): found {value!r:.80}, expected a section of keys")
            items = {f"{key}.{inner}": item for inner, item in (value or {}).items()}
        for written, item in items.items():
            if spelling(str(written)) == SERVER_ARGS:
                given[SERVER_ARGS] = Given(item, "server_args", f"{written} ({path})")
                continue
            name, shown = spelling(str(written)), f"{written} ({path})"
            flag = find(name, "key", "", shown)
            if isinstance(item, bool) and not flag.is_bool:  # pydantic would take it for 0 or 1
                raise InputError(f"{shown}: found {item}, expected {flag.type}")
            _put(given, flag, Given(item, name, shown), once=True)
    return given


def _put(given: dict[str, Given], flag: Flag, new: Given, once: bool = False) -> None:
    old = given.get(flag.dotted)
    if old and (once or old.name != new.name):
        raise InputError(f"{old.written} and {new.written} are the same setting; leave one out")
    given[flag.dotted] = new
