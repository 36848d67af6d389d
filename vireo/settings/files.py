"""A settings file, YAML or TOML, as plain nested dicts."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import yaml

from vireo.errors import InputError


class _Loader(yaml.SafeLoader):
    """Refuses a key written twice, of which YAML would quietly keep the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                problem = f"the key {key.value} is given twice"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return node


def read_file(path: str) -> dict[Any, Any]:
    """The file's keys and values. InputError: not there, not YAML or TOML, or not a mapping."""
    ending = Path(path).suffix.lower()
    if ending not in (".yaml", ".yml", ".toml"):
        raise InputError(f"--config {path}: expected a .yaml, .yml or .toml file")
    try:
        text = Path(path).read_text(encoding="utf-8")
        # _Loader is a SafeLoader: no tag makes an object.
        tree = tomllib.loads(text) if ending == ".toml" else yaml.load(text, Loader=_Loader)
    except OSError as error:
        raise InputError(f"--config {path}: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InputError(f"--config {path}{place}: {error.problem}") from error
    except (ValueError, TypeError, yaml.YAMLError) as error:  # not UTF-8, bad TOML, odd keys
        raise InputError(f"--config {path}: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise InputError(f"--config {path}: expected `name: value` lines, found {tree!r:.80}")
    return tree
