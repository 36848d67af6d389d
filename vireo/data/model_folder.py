"""What the data path reads of a model folder: its config, its family, its processor."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoProcessor, AutoTokenizer
from transformers.utils import HF_MODULES_CACHE

from vireo.errors import InputError, first_line
from vireo.families import Family, family_of, get_family


def load_config(path: str, trust_remote_code: bool = False) -> tuple[Any, Family]:
    """The model's config and family entry; InputError if `path` holds no model Vireo knows, or one
    that needs code of its own without `trust_remote_code`."""
    if (Path(path) / "adapter_config.json").exists():
        raise InputError(
            f"{path} is an adapter: name its base here (vireo train takes it by --lora_adapter)"
        )
    if (Path(path) / "manifest.json").exists():
        raise InputError(f"{path} is a checkpoint of a run: turn it into a model by vireo export")
    if files := _own_code(path):
        if not trust_remote_code:
            raise InputError(
                f"{path}: this model brings its own code ({files}), which is run with "
                "--trust_remote_code only: read the code first"
            )
        with running_code(path):
            config = AutoConfig.from_pretrained(path, trust_remote_code=True)
            return config, family_of(config)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        return config, family_of(config)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path} is no model that can be loaded: {first_line(error)}") from error
    except LookupError as error:
        raise InputError(f"{path}: {error}") from error


def load_processor(family: Family, path: str, trust_remote_code: bool = False) -> Any:
    """The processor (or, for a text family, the tokenizer) of a model folder, a copy of its own."""
    loader = AutoProcessor if family.has_vision else AutoTokenizer
    if family.remote and trust_remote_code:
        with running_code(path):
            return loader.from_pretrained(path, trust_remote_code=True)
    try:
        return loader.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InputError(f"{path}: its processor cannot be loaded: {first_line(error)}") from error


def _own_code(path: str) -> str:
    """The files of code that the model in `path` needs; empty if transformers has its class."""
    try:
        fields = json.loads((Path(path) / "config.json").read_text())
        if not get_family(fields["model_type"]).remote:
            return ""
    except (OSError, ValueError, TypeError, LookupError):  # said by whoever loads it
        return ""
    named = {f"{ref.rpartition('.')[0]}.py" for ref in fields.get("auto_map", {}).values()}
    return ", ".join(sorted({*named, *(file.name for file in Path(path).glob("*.py"))}))


@contextmanager
def running_code(path: str) -> Iterator[None]:
    """Where the code of the model in `path` is imported: by one process after the other, because
    transformers copies it into a folder that all of them share. InputError: it fails."""
    cache = Path(HF_MODULES_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        except Exception as error:  # a program of its own, written for some transformers
            raise InputError(
                f"{path}: its own code fails with transformers {transformers.__version__}: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error
