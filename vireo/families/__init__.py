"""The model families Vireo knows: one data-only entry each, found by `model_type`.

A new family is one file here, one line in `FAMILIES`, and a tiny builder in `tiny/`.
"""

from __future__ import annotations

from typing import Any

from vireo.families import qwen2_5_vl, qwen2_vl, qwen3
from vireo.families.entry import Family, Key

__all__ = ["FAMILIES", "Family", "Key", "family_of", "get_family"]

FAMILIES: dict[str, Family] = {
    entry.name: entry for entry in (qwen2_vl.FAMILY, qwen2_5_vl.FAMILY, qwen3.FAMILY)
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
