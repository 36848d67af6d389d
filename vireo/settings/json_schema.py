"""The JSON Schema of a settings file, by which an editor completes and checks it."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from vireo.settings.schema import Settings


class _Generator(GenerateJsonSchema):
    """Pydantic's, for what a file may hold."""

    def function_before_schema(
        self, schema: core_schema.BeforeValidatorFunctionSchema
    ) -> dict[str, Any]:
        """A list may be written as text, joined by commas."""
        as_text = {"type": "string", "minLength": 1}
        return {"anyOf": [super().function_before_schema(schema), as_text]}

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # a title would only say the name again


def json_schema() -> dict[str, Any]:
    """The schema of a file with sections. Nothing in it is required: flags can give the rest."""
    schema = Settings.model_json_schema(by_alias=True, schema_generator=_Generator)
    for section in (schema, *schema["$defs"].values()):
        section.pop("required", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
