"""What a person sees while training: one line a step, and a progress bar on a terminal."""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch


def memory_gb(device: torch.device) -> float:
    """Peak memory in GB: of the GPU's allocator, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def used_gb(device: torch.device) -> float:
    """GB in use on a GPU, by every process; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 1e9


def others_gb(device: torch.device) -> float:
    """Of `used_gb`, what this process's allocator has not got: other processes, CUDA's own."""
    if device.type != "cuda":
        return 0.0
    return used_gb(device) - torch.cuda.memory_reserved(device) / 1e9


def step_line(record: dict[str, Any], steps: int) -> str:
    if record["loss"] is None:
        return f"step {record['step']}/{steps}  no row of this step could be used"
    return (
        f"step {record['step']}/{steps}  loss {record['loss']:.4f}  lr {record['lr']:.2e}  "
        f"grad {record['grad_norm']:.3f}  {record['tokens_per_s']:,.0f} tok/s  "
        f"{record['images_per_s']:,.1f} img/s  {record['memory_gb']:.2f} GB"
    )


def rollout_line(record: dict[str, Any], steps: int) -> str:
    """A step of RL."""
    parts = [
        f"step {record['step']}/{steps}  reward {record['reward']:.4f}",
        f"mixed {record['groups/mixed']:.2f}",
        f"length {record['response_length/mean']:.1f}",
    ]
    if "loss" in record:
        parts += [f"loss {record['loss']:.4f}", f"grad {record['grad_norm']:.3f}"]
    elif record.get("skipped_updates"):
        parts.append("no update: no advantage")
    if "mismatch/token_mult_prob_error" in record:
        parts.append(f"mult error {record['mismatch/token_mult_prob_error'] - 1:.1e}")
    parts += [f"{record['tokens_per_s']:,.0f} tok/s", f"{record['memory_gb']:.2f} GB"]
    return "  ".join(parts)


def progress_bar(total: int, done: int, active: bool):
    """A tqdm bar on rank 0 of a terminal, else one that does nothing."""
    from tqdm import tqdm

    shown = active and sys.stderr.isatty()
    return tqdm(total=total, initial=done, disable=not shown, unit="step", dynamic_ncols=True)
