"""`load_settings`: the typed settings of a command line, or one line that says what is wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from vireo.errors import InputError
from vireo.settings.flags import BY_NAME, FLAGS, Flag, flags_of
from vireo.settings.parse import normalise
from vireo.settings.schema import SFT, Settings
from vireo.settings.section import Section

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

One = TypeVar("One", bound=Section)


def load_settings(argv: list[str], *, ahead: bool = False) -> Settings:
    """Reads `--config FILE` and `--flag value` overrides. InputError names the first mistake.

    `ahead`: of a trainer with rollouts, the default of max_staleness is 1.
    """
    values, written = normalise(argv)
    if ahead and values.get("trainer", SFT[0]) not in SFT:
        values["rollout"].setdefault("max_staleness", 1)
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise InputError(_one_line(error.errors(include_url=False)[0], written)) from error


def read_section(section: type[One], given: Mapping[str, Any]) -> One:
    """A section by itself, of a command's flags by name. InputError names the first mistake."""
    flags = {flag.dotted: flag for flag in flags_of(section)}
    values = {
        name: None
        if name in flags and flags[name].optional and str(value).lower() == "none"
        else value
        for name, value in given.items()
    }
    try:
        return section.model_validate(values)
    except ValidationError as error:
        written = {name: f"--{name}" for name in flags}
        first = error.errors(include_url=False)[0]
        raise InputError(_one_line(first, written, flags)) from error


def _one_line(
    error: ErrorDetails, written: dict[str, str], flags: Mapping[str, Flag] = FLAGS
) -> str:
    """Pydantic's error with the person's own name of the setting, what was found and expected."""
    if error["type"] == "value_error":  # a rule that joins settings: its text names the flags
        return re.sub(
            r"--(\w+)",
            lambda match: (
                written.get(BY_NAME[match[1]].dotted, match[0]) if match[1] in BY_NAME else match[0]
            ),
            str(error["ctx"]["error"]),
        )
    dotted = ".".join(str(part) for part in error["loc"])
    while dotted not in flags:  # a list's index
        dotted = dotted.rpartition(".")[0]
    flag = flags[dotted]
    if error["type"] == "missing":
        return f"--{flag.names[0]} is missing: {flag.meaning}"
    return f"{written[dotted]}: found {error['input']!r:.80}, expected {flag.type}"
