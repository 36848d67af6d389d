"""Start ranks and commands as a person would, with a short time limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def environment(**extra: str) -> dict[str, str]:
    """One thread a process (more would fight over the cores) and no network."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    return {**os.environ, **fixed, "VIREO_TIMEOUT_S": "60", **extra}


def torchrun(world: int, *command: str, timeout: float = 240, **env: str) -> str:
    """Output of `torchrun --nproc_per_node=world command`; AssertionError if it fails."""
    done = subprocess.run(
        torchrun_command(world, *command),
        env=environment(**env),
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def torchrun_command(world: int, *command: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc_per_node={world}", *command]


def vireo(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """The `vireo` command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "vireo", *arguments],
        env=environment(),
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=timeout,
    )
