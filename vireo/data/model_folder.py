"""What the data path reads of a model folder: its config, its family, its processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoProcessor, AutoTokenizer

from vireo.errors import InputError, first_line
from vireo.families import Family, family_of


def load_config(path: str) -> tuple[Any, Family]:
    """The model's config and family entry; InputError if `path` holds no model Vireo knows."""
    if (Path(path) / "adapter_config.json").exists():
        raise InputError(f"{path} is an adapter: name its base here, and it with --lora_adapter")
    if (Path(path) / "manifest.json").exists():
        raise InputError(f"{path} is a checkpoint of a run: turn it into a model by vireo export")
    try:
        config = AutoConfig.from_pretrained(path)
        return config, family_of(config)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path} is no model that can be loaded: {first_line(error)}") from error
    except LookupError as error:
        raise InputError(f"{path}: {error}") from error


def load_processor(family: Family, path: str) -> Any:
    """The processor (or, for a text family, the tokenizer) of a model folder, a copy of its own."""
    loader = AutoProcessor if family.has_vision else AutoTokenizer
    try:
        return loader.from_pretrained(path)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InputError(f"{path}: its processor cannot be loaded: {first_line(error)}") from error
