"""Export a checkpoint to a folder that plain `from_pretrained` loads with equal logits."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from vireo.errors import InputError
from vireo.families import family_of
from vireo.models.build import empty_policy, init_buffers
from vireo.training.checkpoint import read_state, verify

# Small files of a model folder: the model's own, and those of its processor.
MODEL_FILES = ("config.json", "generation_config.json")
PROCESSOR_FILES = (
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
    if (path / "checkpoints").is_dir():
        raise InputError(
            f"{path} is a run folder; export one of its checkpoints: checkpoints/step-N"
        )
    progress = verify(path)
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
    read_state(path, state, alone=True)
    # A fresh, unsharded instance of the original class writes the names of the published layout;
    # tied tensors are dropped by it, and the config's type is set here because a cast does not.
    hf = policy.hf.to(kind)
    set_dtype(hf.config, kind)
    aside = out.with_name(f".writing-{out.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    hf.save_pretrained(aside)
    for file in side_files(path / "hf", path / "hf"):
        if file.name != "config.json":  # the one just written names the type of the weights
            shutil.copy2(file, aside / file.name)
    if out.exists():
        out.rmdir()
    os.replace(aside, out)
    _note_image_settings(progress["settings"]["data"])
    return out


def _note_image_settings(data: dict[str, Any]) -> None:
    """Say which sizes the exported processor does not know of."""
    used = [f"--{name} {data[name]}" for name in ("image_size",) if data[name] is not None]
    used += ["--image_strategy pad_square"] if data["image_strategy"] == "pad_square" else []
    if used:
        print(f"note: trained with {' '.join(used)}: give the same to vireo eval, and show the")
        print("      model pictures of that size elsewhere; its processor does not know of them")


def set_dtype(config: Any, dtype: torch.dtype) -> None:
    """The type of a config and of every sub-config that names one."""
    for part in [config, *(getattr(config, name) for name in getattr(config, "sub_configs", {}))]:
        if getattr(part, "dtype", None) is not None or part is config:
            part.dtype = dtype


def side_files(model: Path, processor: Path) -> list[Path]:
    """The model's configs from its folder; tokenizer, image sizes and template from the other."""
    found = [p for pattern in MODEL_FILES for p in model.glob(pattern)]
    found += [p for pattern in PROCESSOR_FILES for p in processor.glob(pattern)]
    return sorted({p for p in found if p.is_file()})


def copy_side_files(model: Path, processor: Path, out: Path) -> None:
    """Copy the side files of a model and of its processor into `out`."""
    for file in side_files(model, processor):
        shutil.copy2(file, out / file.name)
