"""Functions that a person names: one of a table, or MODULE:FUNCTION of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from vireo.errors import InputError, first_line
from vireo.nearest import nearest


def named(what: str, name: str, table: Mapping[str, str]) -> Callable[..., Any]:
    """The function `name`: where `table` says, or MODULE:FUNCTION; modules of the current folder
    count. InputError, which calls it a `what`: there is none."""
    module, colon, attribute = table.get(name, name).partition(":")
    if not colon:
        near = nearest(name, table)
        hint = f"did you mean {near}? " if near else ""
        raise InputError(
            f"unknown {what} {name!r}; {hint}There are {', '.join(table)}, or give "
            "MODULE:FUNCTION of your own"
        )
    if os.getcwd() not in sys.path:  # an installed command does not look there
        sys.path.append(os.getcwd())
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"{what} {name!r} cannot be imported: {first_line(error)}") from error
    if not callable(found):
        raise InputError(f"{what} {name!r} is no function but {type(found).__name__}")
    return found
