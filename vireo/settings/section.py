"""What every section of the settings tree has in common, and its two kinds of text."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _split(value: Any) -> Any:
    return [item.strip() for item in value.split(",")] if isinstance(value, str) else value


Text = Annotated[str, Field(min_length=1)]  # an empty shell variable is a mistake, not a path
Names = Annotated[list[Text], BeforeValidator(_split), Field(min_length=1)]
Positive = Annotated[float, Field(gt=0)]
Numbers = Annotated[list[Positive], BeforeValidator(_split), Field(min_length=1)]


def _recompute(value: Any) -> Any:
    """`grad_ckpt` as published is a switch: on is full, off is none."""
    switch = str(value).lower()
    value = {"true": "full", "false": "none"}.get(switch, value)
    if value not in ("none", "full", "auto") and not re.fullmatch(r"every-[1-9]\d*", str(value)):
        raise ValueError(
            f"--grad_ckpt: found {value!r}, expected none, full, every-N (as every-2) or auto"
        )
    return value


Recompute = Annotated[str, BeforeValidator(_recompute)]


class Section(BaseModel):
    """A part of the tree: an unknown key is an error, and so are NaN and infinity."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
