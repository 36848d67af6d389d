"""Model folders: a local path as it is, a Hub name downloaded once."""

from __future__ import annotations

from pathlib import Path

from vireo.errors import InputError, first_line

_WANTED = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors", "*.py"]


def local_folder(name: str) -> str:
    """The folder that holds the model `name`. InputError: no such folder, no such Hub model."""
    if Path(name).is_dir():
        return name
    if Path(name).exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise InputError(f"no model folder at {name} (expected a folder with a config.json)")
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=_WANTED)
    except Exception as error:  # offline, unknown, gated: the hub's own words say which
        raise InputError(
            f"{name} is neither a folder here nor a model that could be downloaded: "
            f"{first_line(error)}"
        ) from error
