"""The examples: their flags are the trainer's, their dry runs run; the container is sound."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT, environment
from tests.rl import records
from vireo.settings import load_settings

PLACED = sorted(path for path in ROOT.glob("examples/*.sh") if "train" in path.read_text())
PLACED = [path for path in PLACED if path.name not in ("dry_run.sh", "vllm_cpu.sh")]
DOCKERFILE = ROOT / "docker/Dockerfile"


def run(path: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(path), *words], env=environment() | env, capture_output=True, text=True, timeout=300
    )


def test_there_are_the_published_sizes() -> None:
    names = " ".join(path.name for path in PLACED)
    for size in ("qwen3-0.6b", "qwen3-4b", "qwen3-30b-a3b", "qwen2.5-vl-3b", "qwen2.5-vl-7b"):
        assert size in names


@pytest.mark.parametrize("path", PLACED, ids=lambda path: path.name)
def test_flags_are_the_trainers(path: Path, tmp_path: Path) -> None:
    """What the script calls, given to the settings; a stand-in for Python shows it."""
    shown = tmp_path / "python"
    shown.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    shown.chmod(0o755)
    done = run(path, "--seed", "7", PYTHON=str(shown), OUT=str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    script, *words = json.loads(done.stdout)
    assert (ROOT / script).exists()
    settings = load_settings(["--trainer=grpo", *words])
    assert settings.cluster.by_ray
    assert settings.run.seed == 7
    assert settings.model.vlm_model_name_or_path.startswith("Qwen/")
    assert re.search(r"^# Cost: ", path.read_text(), re.M)


@pytest.mark.slow
@pytest.mark.parametrize("path", PLACED, ids=lambda path: path.name)
def test_dry_runs_run(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    env = {"DRY_RUN": "1", "OUT": str(tmp_path), "PYTHON": sys.executable, "RAY_ADDRESS": ""}
    done = run(path, "--report_to", "none", **env)
    assert done.returncode == 0, done.stdout + done.stderr
    found = records(tmp_path / "run")
    assert len(found) == 2
    assert all(-1 <= record["reward"] <= 1 for record in found)
    assert ("seconds/swap" in found[-1]) == ("--colocate" in path.read_text())


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.sh")), ids=lambda path: path.name)
def test_shell_scripts_parse(path: Path) -> None:
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    assert os.access(path, os.X_OK) or path.name == "dry_run.sh"


# -- the container --------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    lines = [li for li in DOCKERFILE.read_text().splitlines() if not li.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(li.split(" ", 1)[0], li.split(" ", 1)[1]) for li in joined.splitlines() if li]


def test_what_the_container_copies_is_there() -> None:
    copied = [shlex.split(rest)[:-1] for name, rest in instructions() if name == "COPY"]
    assert copied
    assert all((ROOT / source).exists() for sources in copied for source in sources)


def test_commands_of_the_container_parse() -> None:
    for name, rest in instructions():
        assert name in ("ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY")
        if name == "RUN":
            assert subprocess.run(["sh", "-n", "-c", rest], check=False).returncode == 0


def test_the_container_has_an_engine_that_fits_its_torch_and_the_client() -> None:
    from vireo.rollout.protocol import Version

    pins = dict(re.findall(r"(\w+)==([\d.]+)", DOCKERFILE.read_text()))
    assert pins["torch"] == "2.11.0"  # what SGLang up to 0.5.17 is built for
    assert pins["sglang"] == "0.5.17"
    assert Version.of(pins["sglang"], "SGLang")
    stages = {rest.split(" AS ")[1] for name, rest in instructions() if " AS " in rest}
    assert {"hopper", "blackwell"} <= stages
