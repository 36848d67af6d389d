"""What every section of the settings tree has in common, and its two kinds of text."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _split(value: Any) -> Any:
    return [item.strip() for item in value.split(",")] if isinstance(value, str) else value


Text = Annotated[str, Field(min_length=1)]  # an empty shell variable is a mistake, not a path
Names = Annotated[list[Text], BeforeValidator(_split), Field(min_length=1)]
Positive = Annotated[float, Field(gt=0)]
Numbers = Annotated[list[Positive], BeforeValidator(_split), Field(min_length=1)]


class Section(BaseModel):
    """A part of the tree: an unknown key is an error, and so are NaN and infinity."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
