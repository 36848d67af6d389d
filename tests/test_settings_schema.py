"""`vireo settings --schema`: it accepts what Vireo writes and refuses what Vireo refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from vireo import cli
from vireo.settings import load_settings
from vireo.settings.flags import FLAGS
from vireo.settings.json_schema import json_schema

TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": int | float,
    "null": type(None),
}
BOUNDS = {
    "minimum": lambda value, limit: value >= limit,
    "maximum": lambda value, limit: value <= limit,
    "exclusiveMinimum": lambda value, limit: value > limit,
    "exclusiveMaximum": lambda value, limit: value < limit,
}
NOTES = {"$schema", "$defs", "title", "description", "default"}


def problems(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str = "file") -> list:
    """What is wrong with `value` by the part of JSON Schema that ours uses; no other is let by."""
    found: list[str] = []
    if "$ref" in schema:
        found += problems(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root, at)
    if "anyOf" in schema:
        tried = [problems(value, choice, root, at) for choice in schema["anyOf"]]
        found += [] if [] in tried else tried[0]
    if "type" in schema:
        is_type = isinstance(value, TYPES[schema["type"]])
        if not is_type or (isinstance(value, bool) and schema["type"] != "boolean"):
            return [*found, f"{at}: {value!r} is no {schema['type']}"]
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{at}: {value!r} is not in {schema['enum']}")
    found += [
        f"{at}: {value!r} against {name} {schema[name]}"
        for name, holds in BOUNDS.items()
        if name in schema and not holds(value, schema[name])
    ]
    if isinstance(value, str) and len(value) < schema.get("minLength", 0):
        found.append(f"{at}: too short")
    if isinstance(value, list) and len(value) < schema.get("minItems", 0):
        found.append(f"{at}: too few")
    for i, item in enumerate(value if "items" in schema else []):
        found += problems(item, schema["items"], root, f"{at}[{i}]")
    if "properties" in schema:
        for name, item in value.items():
            if name in schema["properties"]:
                found += problems(item, schema["properties"][name], root, f"{at}.{name}")
            elif schema["additionalProperties"] is False:
                found.append(f"{at}.{name}: unknown")
    known = {"$ref", "anyOf", "type", "enum", *BOUNDS, "minLength", "minItems", "items"}
    assert set(schema) <= known | NOTES | {"properties", "additionalProperties"}, schema
    return found


def check(text: str) -> list[str]:
    schema = json_schema()
    return problems(yaml.safe_load(text), schema, schema)


def test_the_command_prints_it(capsys):
    assert cli.main(["settings", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()


def test_a_resolved_settings_file_is_accepted():
    argv = ["--model_name_or_path=m", "--train_file=a.json,b.json", "--lr=3e-6", "--max_steps=9"]
    assert check(load_settings(argv).to_yaml()) == []


@pytest.mark.parametrize(
    "text",
    [
        "optim: {lr: 0.1}",  # a part of the settings: flags give the rest
        "data: {train_file: a.json}",  # a list of one, as text
        "data: {train_file: [a.json, b.json]}",
        "optim: {max_steps: null}",
        "data: {validate: full}",  # by the name in files, not by the attribute
        "{}",
    ],
)
def test_a_good_file_is_accepted(text):
    assert check(text) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("optim: {lrr: 0.1}", "file.optim.lrr: unknown"),
        ("optimizer: {}", "file.optimizer: unknown"),
        ("data: {validate_rows: full}", "file.data.validate_rows: unknown"),
        ("data: {validate: half}", "file.data.validate: 'half' is not in ['lazy', 'full']"),
        ("optim: {lr: -1}", "file.optim.lr: -1 against minimum 0"),
        ("optim: {adam_beta1: 1}", "file.optim.adam_beta1: 1 against exclusiveMaximum 1"),
        ("optim: {warmup_ratio: 2}", "file.optim.warmup_ratio: 2 against maximum 1"),
        ("optim: {max_steps: 0}", "file.optim.max_steps: 0 against minimum 1"),
        ("optim: {max_steps: 1.5}", "file.optim.max_steps: 1.5 is no integer"),
        ("data: {shuffle: 1}", "file.data.shuffle: 1 is no boolean"),
        ("data: {train_file: []}", "file.data.train_file: too few"),
        ("run: {output_dir: ''}", "file.run.output_dir: too short"),
    ],
)
def test_a_wrong_file_is_refused(text, problem):
    assert check(text) == [problem]


def test_every_setting_is_in_it_with_its_meaning_and_every_section_is_closed():
    schema = json_schema()
    for part in (schema, *schema["$defs"].values()):
        assert part["additionalProperties"] is False
        assert "required" not in part
    for flag in FLAGS.values():
        section, _, key = flag.dotted.rpartition(".")
        tree = schema
        if section:
            reference = schema["properties"][section]["$ref"]
            tree = schema["$defs"][reference.rpartition("/")[2]]
        assert tree["properties"][key]["description"] == flag.meaning
