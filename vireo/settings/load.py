"""`load_settings`: the typed settings of a command line, or one line that says what is wrong."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pydantic import ValidationError

from vireo.errors import InputError
from vireo.settings.flags import BY_NAME, FLAGS
from vireo.settings.parse import normalise
from vireo.settings.schema import Settings

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def load_settings(argv: list[str]) -> Settings:
    """Reads `--config FILE` and `--flag value` overrides. InputError names the first mistake."""
    values, written = normalise(argv)
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise InputError(_one_line(error.errors(include_url=False)[0], written)) from error


def _one_line(error: ErrorDetails, written: dict[str, str]) -> str:
    """Pydantic's error with the person's own name of the setting, what was found and expected."""
    if error["type"] == "value_error":  # a rule that joins settings: its text names the flags
        return re.sub(
            r"--(\w+)",
            lambda match: written.get(BY_NAME[match[1]].dotted, match[0]),
            str(error["ctx"]["error"]),
        )
    path = ".".join(str(part) for part in error["loc"])
    dotted = path if path in FLAGS else ".".join(path.split(".")[:2])  # without a list's index
    flag = FLAGS[dotted]
    if error["type"] == "missing":
        return f"--{flag.names[0]} is missing: {flag.meaning}"
    return f"{written[dotted]}: found {error['input']!r:.80}, expected {flag.type}"
