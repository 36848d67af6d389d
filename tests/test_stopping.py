"""Signals end a run with a checkpoint; a save that cannot be written leaves the last one."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch import torchrun_command
from tests.rows import losses, write_rows
from vireo.errors import VireoError
from vireo.families.tiny import build
from vireo.settings import load_settings
from vireo.trainers import registry
from vireo.training import checkpoint
from vireo.training.checkpoint import checkpoints

STEPS = 400  # more than a run that is told to stop ever gets to


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopping")
    build("qwen2_vl", folder / "model", size="test")
    write_rows(folder / "data", [1, 0, 2, 1])
    return folder


def flags(base: Path, output: str, *more: str) -> list[str]:
    return [
        f"--vlm_model_name_or_path={base / 'model'}",
        f"--train_file={base / 'data' / 'rows.json'}",
        f"--output_dir={base / output}",
        "--global_batch_size=4",
        "--per_device_train_batch_size=2",
        "--report_to=none",
        "--lr_scheduler=constant",
        "--warmup_ratio=0",
        *more,
    ]


def train(base: Path, output: str, *more: str) -> int:
    settings = load_settings(flags(base, output, *more))
    return registry.find(settings.trainer)(settings)


def wait_for_step(folder: Path, process: subprocess.Popen) -> None:
    end = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or len(losses(folder)) < 3:
        assert time.monotonic() < end, "waited in vain"
        assert process.poll() is None, "the run ended by itself"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_saves_and_ends(base, running, number) -> None:
    """As a terminal's Ctrl-C or a scheduler does: the loader's processes have it too."""
    output = f"one-{number.name}"
    arguments = flags(base, output, f"--max_steps={STEPS}", "--num_workers=2")
    process = running(sys.executable, "-m", "vireo.train", *arguments)
    wait_for_step(base / output, process)
    os.killpg(process.pid, number)
    assert process.wait(60) == 128 + number
    done = len(losses(base / output))
    assert done < STEPS
    assert [p.name for p in checkpoints(base / output / "checkpoints")] == [f"step-{done}"]
    assert "go on with --resume auto" in (base / output / "log.txt").read_text()

    more = (f"--max_steps={done + 2}", "--num_workers=0")
    assert train(base, output, *more, "--resume=auto") == 0
    assert train(base, f"whole-{number.name}", *more) == 0
    whole = losses(base / f"whole-{number.name}")
    assert losses(base / output) == pytest.approx(whole, abs=1e-6)


def test_a_signal_to_one_rank_stops_all_at_the_same_step(base, running) -> None:
    arguments = flags(base, "two", f"--max_steps={STEPS}", "--num_workers=1")
    process = running(*torchrun_command(2, "-m", "vireo.train", *arguments))
    wait_for_step(base / "two", process)
    ranks = [int(pid) for pid in children(process.pid)]
    os.kill(ranks[-1], signal.SIGTERM)
    process.wait(60)
    done = len(losses(base / "two"))
    assert [p.name for p in checkpoints(base / "two" / "checkpoints")] == [f"step-{done}"]


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_a_full_disk_is_an_error_that_leaves_the_last_checkpoint(base: Path) -> None:
    """The kernel refuses to let a file grow, as it does on a full disk."""
    assert train(base, "full-disk", "--max_steps=1", "--num_workers=0") == 0
    last = base / "full-disk" / "checkpoints" / "step-1"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(VireoError, match=r"step-2 cannot be written: .*step-1 is the last"):
            train(base, "full-disk", "--max_steps=2", "--num_workers=0", "--resume=auto")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert [p.name for p in last.parent.iterdir()] == ["step-1"]
    checkpoint.verify(last)
    assert train(base, "full-disk", "--max_steps=2", "--num_workers=0", "--resume=auto") == 0


@pytest.mark.parametrize("part", ["rng.pt", "progress.json", "manifest.json", "hf"])
def test_every_part_of_a_save_may_fail(base: Path, part: str, monkeypatch) -> None:
    import errno

    def full(*arguments: object, **_: object) -> None:
        if any(str(a).endswith(part) for a in arguments):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return kept(*arguments)

    where, name = {
        "rng.pt": (checkpoint.torch, "save"),
        "hf": (registry.find("fsdp_vlm").__globals__["sft"].Sft, "_write_hf"),
    }.get(part, (checkpoint, "_write_json"))
    kept = getattr(where, name)
    monkeypatch.setattr(where, name, full)
    with pytest.raises(VireoError, match="No space left on device"):
        train(base, f"full-{part}", "--max_steps=1", "--num_workers=0")
    assert list((base / f"full-{part}" / "checkpoints").iterdir()) == []
