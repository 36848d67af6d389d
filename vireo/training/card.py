"""The README.md of an exported folder: what it is, how it was trained, how to load it.

Everything in it is read off the checkpoint. What is not known there (licence, languages, uses,
limits) is not written: only its author can.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

import yaml

import vireo
from vireo.families import Family

_PARTS = {  # setting, and what it leaves as it was
    "freeze_vision": "vision tower",
    "freeze_mm_proj": "projector",
    "freeze_language": "language model",
    "freeze_embeddings": "token embeddings and output head",
}
_RATES = {
    "vision_lr": "vision tower",
    "mm_proj_lr": "projector",
    "embeddings_lr": "token embeddings and output head",
}
_RESULTS = {
    "loss": "training loss of the last logged step",
    "reward": "mean reward of the last logged rollout",
    "eval_loss": "loss on held-out rows",
    "eval_reward": "mean reward on held-out prompts",
    "eval_exact_match": "share of sampled held-out rows answered exactly",
}


def model_card(
    progress: dict[str, Any],
    family: Family,
    *,
    merged: bool = False,
    results: dict[str, float] | None = None,
    repo: str | None = None,
) -> str:
    """The card as Markdown with YAML front matter.

    progress: a checkpoint's progress.json. Its `base_model` is the base's Hub name; without one,
        the front matter names no base, because a local path means nothing to others.
    merged: the folder holds whole weights although adapters were trained.
    results: final measures by the names of metrics.jsonl (`results_at` reads them).
    repo: Hub name of the folder, for the loading code; without one, the code loads from here.
    """
    adapters = progress.get("adapters")
    alone = adapters is not None and not merged
    base = progress.get("base_model")
    start = PurePath(progress["settings"]["model"]["vlm_model_name_or_path"]).name
    kind = "vision-language" if family.has_vision else "language"
    what = "LoRA adapters for it, trained" if alone else "Fine-tuned"
    lines = [
        _front_matter(family, base, alone, adapters is not None, progress["settings"]["trainer"]),
        f"# {start}, {'adapters' if alone else 'fine-tuned'}",
        f"Base: `{_plain(base or start)}`, a {kind} model ({family.name}). {what} with Vireo.",
        "## Training",
        _bullets(_training(progress, family)),
    ]
    if results:
        lines += ["## Results", _bullets(_results(results, progress["settings"]["data"]))]
    lines += ["## Use", _usage(family, repo, base if alone else None, alone)]
    if note := image_note(progress["settings"]["data"], family):
        lines.append(note)
    lines.append(f"Exported with {_versions(alone)}.")
    return "\n\n".join(lines) + "\n"


def results_at(metrics: Path, step: int) -> dict[str, float]:
    """The last training loss up to `step` and the evaluation at it, from a run's metrics.jsonl.

    Empty where there is no such file: a checkpoint can stand without its run folder.
    """
    found: dict[str, float] = {}
    if not metrics.exists():
        return found
    for line in metrics.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the line that a kill cut short
        held_out = any(name.startswith("eval_") for name in record)
        if record["step"] <= step if not held_out else record["step"] == step:
            known = {name: record[name] for name in _RESULTS if record.get(name) is not None}
            found |= known
    return found


def _front_matter(family: Family, base: str | None, alone: bool, lora: bool, trainer: str) -> str:
    head: dict[str, Any] = {"base_model": base} if base else {}
    head["library_name"] = "peft" if alone else "transformers"
    head["pipeline_tag"] = "image-text-to-text" if family.has_vision else "text-generation"
    kind = "grpo" if trainer == "grpo" else "sft"
    head["tags"] = ["vireo", kind, *(["lora"] if lora else []), family.name]
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---"


def _training(progress: dict[str, Any], family: Family) -> list[tuple[str, str]]:
    settings, adapters = progress["settings"], progress.get("adapters")
    data, optim, model = settings["data"], settings["optim"], dict(settings["model"])
    if model.get("freeze_embeddings") is None:
        model["freeze_embeddings"] = model.get("freeze_language", False)
    own = set() if family.has_vision else {"freeze_vision", "freeze_mm_proj"}
    frozen = [part for name, part in _PARTS.items() if model.get(name) and name not in own]
    rates = [
        f"{optim[name]:g} ({part})"
        for name, part in _RATES.items()
        if optim.get(name) is not None and part not in frozen
    ]
    lines = [("trainer", settings["trainer"]), *_seen(progress)]
    lines += [
        ("highest learning rate", ", ".join([f"{optim['lr']:g}", *rates])),
        ("schedule", f"{optim['lr_scheduler']}, warm-up {optim['warmup_ratio']:g} of all steps"),
        ("weight decay", f"{optim['weight_decay']:g}"),
        ("seed", str(settings["run"]["seed"])),
    ]
    if adapters is not None:
        names = sorted({name.split(".")[-1] for name in adapters["modules"]})
        shape = f"rank {adapters['r']}, alpha {adapters['alpha']}, dropout {adapters['dropout']:g}"
        where = f"on {len(adapters['modules'])} linear modules ({', '.join(names)})"
        lines.append(("adapters", f"LoRA, {shape}, {where}; the base was frozen"))
    elif frozen:
        lines.append(("frozen", ", ".join(frozen)))
    if data.get("max_length"):
        lines.append(("longest row", f"{data['max_length']:,} tokens"))
    if progress["skipped"]:
        lines.append(("refused rows", f"{len(progress['skipped']):,}, left out"))
    return lines


def _seen(progress: dict[str, Any]) -> list[tuple[str, str]]:
    """What it was trained on."""
    settings, step, position = progress["settings"], progress["step"], progress["position"]
    data = settings["data"]
    rows = "streamed" if data.get("streaming") else f"{progress['rows']:,} rows an epoch"
    if settings["trainer"] != "grpo":
        return [
            ("data", f"{_files(data['train_file'])}, {rows}"),
            ("steps", f"{step:,}, which saw {position:,} rows"),
            ("rows a step", f"{progress['global_batch']:,}"),
        ]
    rollout, names = settings["rollout"], settings["rewards"]["reward"]
    return [
        ("prompts", f"{_files(settings['prompts']['prompt_data'])}, {rows}"),
        ("rollouts", f"{step:,}, of {position:,} prompts"),
        ("responses to a prompt", str(rollout["n_samples_per_prompt"])),
        ("rewards", ", ".join(f"`{_plain(name)}`" for name in names)),
        ("advantages", settings["algo"]["advantage_estimator"]),
        ("samples an update", f"{progress['global_batch']:,}"),
    ]


def _results(results: dict[str, float], data: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [(text, f"{results[name]:.4g}") for name, text in _RESULTS.items() if name in results]
    if data.get("eval_file") and any(name.startswith("eval_") for name in results):
        lines.append(("held-out rows", _files(data["eval_file"])))
    return lines


def _usage(family: Family, repo: str | None, base: str | None, alone: bool) -> str:
    """Six lines at most that load the folder, and run as they are."""
    reader = "AutoProcessor" if family.has_vision else "AutoTokenizer"
    name = "processor" if family.has_vision else "tokenizer"
    here, load = json.dumps(repo or "."), f"{family.auto_class}.from_pretrained"
    trust = ", trust_remote_code=True" if family.remote else ""
    lines = [f"from transformers import {family.auto_class}, {reader}", ""]
    if alone:
        origin = json.dumps(base or "path/to/base")
        lines[:0] = ["from peft import PeftModel"]
        lines += [f'base = {load}({origin}, dtype="auto"{trust})']
        lines += [f"model = PeftModel.from_pretrained(base, {here})"]
    else:
        lines += [f'model = {load}({here}, dtype="auto"{trust})']
    lines += [f"{name} = {reader}.from_pretrained({here}{trust})"]
    return "\n".join(["```python", *lines, "```"])


def image_note(data: dict[str, Any], family: Family) -> str:
    """Sizes that the run used and the exported processor does not know of."""
    used = []
    if family.has_vision and data.get("image_size") is not None:
        used.append(f"--image_size {data['image_size']}")
    if family.has_vision and data.get("image_strategy") == "pad_square":
        used.append("--image_strategy pad_square")
    if not used:
        return ""
    return (
        f"Images: trained with `{' '.join(used)}`. The processor in this folder does not know of "
        "that: give the same to `vireo eval`, and show the model pictures of that size elsewhere."
    )


def _versions(alone: bool) -> str:
    names = ["torch", "transformers", *(["peft"] if alone else [])]
    return ", ".join(["vireo " + vireo.__version__, *(f"{n} {metadata.version(n)}" for n in names)])


def _files(given: str | list[str] | None) -> str:
    """Data files by name only: the folders they lay in are nobody else's business."""
    paths = [given] if isinstance(given, str) else given or []
    return ", ".join(f"`{_plain(PurePath(path).name)}`" for path in paths)


def _plain(text: str) -> str:
    return text.replace("`", "'").replace("\n", " ")


def _bullets(lines: list[tuple[str, str]]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in lines)
