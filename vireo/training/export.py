"""Export a checkpoint to a folder that plain `from_pretrained` loads with equal logits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoConfig, GenerationConfig

from vireo.errors import InputError
from vireo.families import family_of
from vireo.models.build import empty_policy, init_buffers
from vireo.training.checkpoint import expected_alone, verify

# Small files of a model folder that an export takes over as they are.
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
)


def export(checkpoint: str | Path, out: str | Path, dtype: str = "auto") -> Path:
    """Write `out`: weights under their published names, config, processor, tokenizer, template.

    `dtype`: bf16, fp32, or auto (the type that the trained model's own config names).
    """
    path, out = Path(checkpoint), Path(out)
    verify(path)
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty; export into a new folder")
    config = AutoConfig.from_pretrained(path / "hf")
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(dtype) or config.dtype
    kind = kind or torch.float32
    policy = empty_policy(config, family_of(config))
    policy.to_empty(device="cpu")
    policy.hf.tie_weights()
    init_buffers(policy.hf)
    state = {"model": policy.state_dict()}
    with expected_alone():
        dcp.load(state, checkpoint_id=path / "state", no_dist=True)
    # A fresh, unsharded instance of the original class writes the names of the published layout;
    # tied tensors are dropped by it, and the config's type is set here because a cast does not.
    hf = policy.hf.to(kind)
    set_dtype(hf.config, kind)
    out.mkdir(parents=True, exist_ok=True)
    if hf.generation_config is not None and (path / "hf" / "generation_config.json").exists():
        hf.generation_config = GenerationConfig.from_pretrained(path / "hf")
    hf.save_pretrained(out)
    for file in side_files(path / "hf"):
        if not (out / file.name).exists():
            shutil.copy2(file, out / file.name)
    return out


def set_dtype(config: Any, dtype: torch.dtype) -> None:
    """The type of a config and of every sub-config that names one."""
    for part in [config, *(getattr(config, name) for name in getattr(config, "sub_configs", {}))]:
        if getattr(part, "dtype", None) is not None or part is config:
            part.dtype = dtype


def side_files(folder: Path) -> list[Path]:
    """Config, tokenizer, processor and template files of a model folder."""
    return sorted({p for pattern in SIDE_FILES for p in folder.glob(pattern) if p.is_file()})


def copy_side_files(sources: list[Path], out: Path) -> None:
    """Copy the side files of `sources` (later ones win) into `out`."""
    for folder in sources:
        for file in side_files(folder):
            shutil.copy2(file, out / file.name)
