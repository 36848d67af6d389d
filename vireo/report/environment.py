"""What a run ran on: versions, machine, GPUs. The run folder keeps it; `vireo env` prints it."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import vireo

PACKAGES = (
    "torch",
    "torchvision",
    "transformers",
    "peft",
    "tokenizers",
    "huggingface_hub",
    "safetensors",
    "datasets",
    "pyarrow",
    "pillow",
    "numpy",
    "pydantic",
    "ray",
    "sglang",
    "vllm",
    "tensorboard",
    "wandb",
    "trackio",
)
# Variables that change how a run behaves. Their values go into public bug reports, so a name whose
# value could be a secret, an address, or a person's folder stays out, whatever use it might be.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_NVLS_ENABLE",
    "NCCL_SOCKET_IFNAME",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "OMP_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
    "HF_HUB_OFFLINE",
    "WANDB_MODE",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "VIREO_TIMEOUT_S",
)


def environment() -> dict[str, Any]:
    """Versions and machine as plain data; never raises. None: not installed, or not known.

    Memory is in GB (10^9 bytes). `torch_error` says why torch cannot be imported, else None.
    """
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "vireo": vireo.__version__,
        "git": _git_commit(Path(vireo.__file__).parent.parent),
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),  # those that this process may use
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        **_torch(),
        "packages": {name: _version(name) for name in PACKAGES},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def as_markdown(found: dict[str, Any]) -> str:
    """The dict of `environment` as a Markdown list, to paste into a bug report."""
    gpus = [f"{gpu['name']}, {gpu['memory_gb']} GB" for gpu in found["gpus"]]
    lines = [
        ("vireo", f"{found['vireo']}, git {found['git'] or 'none'}"),
        ("Python", found["python"]),
        ("OS", found["os"]),
        ("CPU", f"{found['cpus']} CPUs, {found['memory_gb']} GB of memory"),
        *[(f"GPU {i}", gpu) for i, gpu in enumerate(gpus)],
        *([] if gpus else [("GPU", "none")]),
        *[(name, found[key] or "none") for name, key in _CUDA],
        *([("torch cannot be imported", found["torch_error"])] if found["torch_error"] else []),
        *[(name, version or "not installed") for name, version in found["packages"].items()],
        *found["variables"].items(),
    ]
    return "### Environment\n\n" + "\n".join(f"- {name}: {value}" for name, value in lines) + "\n"


_CUDA = (("GPU driver", "driver"), ("CUDA of torch", "cuda"), ("NCCL of torch", "nccl"))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> dict[str, Any]:
    """What torch says of CUDA, NCCL and the GPUs; without torch, what the driver says."""
    gpus, driver = _nvidia_smi()
    found = {"gpus": gpus, "driver": driver, "cuda": None, "nccl": None, "torch_error": None}
    try:
        import torch
    except Exception as error:  # a broken library of it raises OSError, a bad mix RuntimeError
        return found | {"torch_error": f"{type(error).__name__}: {_first_line(str(error))}"}
    found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        # Those that this process may use, where nvidia-smi lists every one of the machine.
        seen = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        found["gpus"] = [
            {"name": g.name, "memory_gb": round(g.total_memory / 1e9, 1)} for g in seen
        ]
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _nvidia_smi() -> tuple[list[dict[str, Any]], str | None]:
    """Every GPU of the machine, and the driver's version."""
    query = "--query-gpu=name,memory.total,driver_version"
    out = _output(["nvidia-smi", query, "--format=csv,noheader,nounits"]) or ""
    rows = [[cell.strip() for cell in line.split(",")] for line in out.splitlines()]
    rows = [row for row in rows if len(row) == 3 and row[1].isdigit()]  # not an error's text
    gpus = [{"name": row[0], "memory_gb": round(int(row[1]) * 2**20 / 1e9, 1)} for row in rows]
    return gpus, rows[0][2] if rows else None


def _git_commit(root: Path) -> str | None:
    """Commit of the checkout that Vireo runs from; None if it was installed from a package."""
    if not (root / ".git").exists():
        return None
    commit = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    if commit is None:
        return None
    changed = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return f"{commit} with local changes" if changed else commit


def _output(command: Sequence[str]) -> str | None:
    """What a command prints; None if it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "no reason given")
