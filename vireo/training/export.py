"""Export a checkpoint to a folder that plain `from_pretrained` loads with equal logits.

Of a run with adapters: the adapters alone, as PEFT reads them, or merged into their base.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vireo.aside import written_aside
from vireo.data.model_folder import load_config
from vireo.errors import InputError
from vireo.families import family_of
from vireo.hub import local_folder
from vireo.models.build import empty_policy, give_memory, whole_model
from vireo.models.layout import save_as_published
from vireo.models.load import fingerprint
from vireo.models.lora import (
    ADAPTER_WEIGHTS,
    BASE_MARK,
    Lora,
    merge_adapters,
    peft_config,
    published_name,
    short_names,
)
from vireo.training.card import image_note, model_card, results_at
from vireo.training.checkpoint import model_tensors, read_state, verify

SHARD_SIZE = "5GB"
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


def export(
    checkpoint: str | Path,
    out: str | Path,
    dtype: str = "auto",
    *,
    merge_lora: bool = False,
    base: str | None = None,
    max_shard_size: str = SHARD_SIZE,
    repo: str | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Write `out`: weights under their published names, config, processor, template, card.

    dtype: bf16, fp32, or auto: the type that the trained model's own config names (of adapters
        alone: float32, as they were trained).
    merge_lora: whole weights, base plus adapters, in place of the adapters alone.
    base: the folder or Hub name of the base, where it has moved since the run.
    max_shard_size: largest weight file, as in `save_pretrained`; more than one get an index.
    repo: Hub name that the folder is meant for, for its card.
    trust_remote_code: run the code that the checkpoint brings along, where its model needs it.
    """
    path, out = Path(checkpoint), Path(out)
    if (path / "checkpoints").is_dir():
        raise InputError(
            f"{path} is a run folder; export one of its checkpoints: checkpoints/step-N"
        )
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?\s*[KMGT]i?B", max_shard_size, re.IGNORECASE):
        raise InputError(f"--max_shard_size {max_shard_size}: expected a size such as 5GB or 500MB")
    if path.resolve() in out.resolve().parents:
        raise InputError(f"{out} is inside the checkpoint; export into a folder of its own")
    progress = verify(path)
    adapters = progress.get("adapters")
    if merge_lora and adapters is None:
        raise InputError(f"--merge_lora: {path} has no adapters; export it without")
    if repo is not None and repo == progress["settings"]["model"]["vlm_model_name_or_path"]:
        raise InputError(f"--push_to_hub {repo} is the model that was trained: name another one")
    if base is not None and not merge_lora:
        raise InputError("--base is for --merge_lora alone; leave it out")
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty; export into a new folder")
    config, _ = load_config(str(path / "hf"), trust_remote_code)
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(dtype)
    adapters_alone = adapters is not None and not merge_lora
    if adapters_alone:

        def write(folder: Path) -> None:
            _write_adapters(path, folder, config, adapters, kind or torch.float32)
    else:
        kind = kind or config.dtype or torch.float32
        hf = _merged(path, config, adapters, base) if merge_lora else _whole(path, config)

        def write(folder: Path) -> None:
            # A fresh, unsharded instance of the original class writes the names of the published
            # layout; tied tensors are dropped by it, and the config's type is set here because a
            # cast does not.
            hf.to(kind)
            set_dtype(hf.config, kind)
            save_as_published(hf)
            hf.save_pretrained(folder, max_shard_size=max_shard_size)

    small = [] if adapters_alone else ["generation_config.json"]
    small += [file.name for file in side_files(None, path / "hf")]
    card = model_card(
        progress,
        family_of(config),
        merged=merge_lora,
        results=results_at(_metrics_of(path, progress), progress["step"]),
        repo=repo,
    )
    _write_aside(out, path / "hf", write, small, card)
    if note := image_note(progress["settings"]["data"], family_of(config)):
        print(f"note: {note}")
    return out


def _metrics_of(path: Path, progress: dict[str, Any]) -> Path:
    """The records of the run that made a checkpoint, where it stands or has moved to with it."""
    beside = path.resolve().parent
    moved = beside.parent if beside.name == "checkpoints" else Path(progress["run_folder"])
    return moved / "metrics.jsonl"


def _write_aside(
    out: Path, hf: Path, write: Callable[[Path], None], small: list[str], card: str
) -> None:
    """Weights, small files of `hf` and card in a folder beside `out`, renamed when complete."""
    with written_aside(out) as aside:
        write(aside)
        for name in small:  # not config.json: the one just written names the type of the weights
            if (hf / name).exists():
                shutil.copy2(hf / name, aside / name)
        (aside / "README.md").write_text(card)


def _whole(path: Path, config: Any) -> Any:
    """The trained model, unsharded, with master weights."""
    policy = empty_policy(config, family_of(config))
    give_memory(policy, policy.hf, "cpu")
    state = {"model": policy.state_dict()}
    read_state(path, state, alone=True)
    return policy.hf


def _merged(path: Path, config: Any, adapters: Any, base: str | None) -> Any:
    """Base plus adapters; the base is read again, so its weights are as exact as its files."""
    folder = local_folder(base or adapters["base"])
    if fingerprint(folder) != adapters["fingerprint"]:
        raise InputError(
            f"{folder} is not the model that {path} was trained on: its weight files differ; "
            "name the right one with --base"
        )
    hf = whole_model(config, family_of(config), folder)
    merge_adapters(hf, _read_adapters(path), adapters["alpha"] / adapters["r"])
    return hf


def _read_adapters(path: Path) -> dict[str, Tensor]:
    """Adapter weights of a checkpoint by their names in the model."""
    found = {name: torch.empty(meta.size) for name, meta in model_tensors(path).items()}
    read_state(path, {"model": found}, alone=True)
    return {name.removeprefix("hf."): value for name, value in found.items()}


def _write_adapters(
    path: Path, folder: Path, config: Any, adapters: Any, kind: torch.dtype
) -> None:
    weights = {published_name(n): v.to(kind).contiguous() for n, v in _read_adapters(path).items()}
    about = {"format": "pt", BASE_MARK: str(adapters["fingerprint"])}
    save_file(weights, folder / ADAPTER_WEIGHTS, metadata=about)
    hf = empty_policy(config, family_of(config)).hf
    lora = Lora(adapters["r"], adapters["alpha"], adapters["dropout"])
    written = peft_config(lora, short_names(hf, adapters["modules"]))
    written.base_model_name_or_path = adapters["base"]
    written.inference_mode = True
    written.save_pretrained(folder)


def set_dtype(config: Any, dtype: torch.dtype) -> None:
    """The type of a config and of every sub-config that names one."""
    for part in [config, *(getattr(config, name) for name in getattr(config, "sub_configs", {}))]:
        if getattr(part, "dtype", None) is not None or part is config:
            part.dtype = dtype


def side_files(model: Path | None, processor: Path) -> list[Path]:
    """The model's configs from its folder; tokenizer, image sizes and template from the other; and
    the code that a model brings along (its own, where the processor's folder has it too)."""
    found = [p for pattern in PROCESSOR_FILES for p in processor.glob(pattern)]
    if model is None or "auto_map" in json.loads((model / "config.json").read_text()):
        found += [p for folder in (processor, model) if folder for p in folder.glob("*.py")]
    found += [p for pattern in MODEL_FILES for p in model.glob(pattern)] if model else []
    return sorted({p.name: p for p in found if p.is_file()}.values())


def copy_side_files(model: Path, processor: Path, out: Path) -> None:
    """Copy the side files of a model and of its processor into `out`."""
    for file in side_files(model, processor):
        shutil.copy2(file, out / file.name)
