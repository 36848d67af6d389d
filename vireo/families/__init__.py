"""The model families Vireo knows: one data-only entry each, found by `model_type`.

A new family is one file here, which is found by itself, and a tiny builder in `tiny/`.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

from vireo.families.entry import Family, Key

__all__ = ["FAMILIES", "Family", "Key", "family_of", "get_family"]

FAMILIES: dict[str, Family] = {
    family.name: family
    for found in pkgutil.iter_modules(__path__)
    if not found.ispkg
    and (family := getattr(import_module(f"{__name__}.{found.name}"), "FAMILY", None))
}


def get_family(name: str) -> Family:
    """The entry of a family by its `model_type`; LookupError names the families that exist."""
    try:
        return FAMILIES[name]
    except KeyError:
        known = ", ".join(sorted(FAMILIES))
        raise LookupError(f"model family {name!r} is not known; known families: {known}") from None


def family_of(config: Any) -> Family:
    """The entry for a loaded config (or anything with a `model_type`); LookupError if none."""
    return get_family(config.model_type)
