"""Vision towers for text models: how a new model of a family begins with an existing text model.

A module a family: `TEXT`, the `model_type`s of text models that it takes, and
`make(text, tokenizer, size)`, which gives the config and the processor of the whole. `text` is the
config of the text model, with room for the family's image tokens; `tokenizer` has them. Sizes are
"published", that of a tower that people train with, and "demo", for a CPU.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from types import ModuleType

SIZES = ("published", "demo")


def builder_of(family: str) -> ModuleType:
    """The module of a family; LookupError names the families that have one."""
    known = [found.name for found in pkgutil.iter_modules(__path__)]
    if family not in known:
        raise LookupError(f"no text model grows into a {family!r}; {', '.join(known)} can be made")
    return import_module(f"{__name__}.{family}")
