"""`vireo env` and environment.json: one dict, with or without torch, and no secrets in it."""

from __future__ import annotations

import json
import sys

import pytest

from vireo import __version__, cli
from vireo.report import environment as module
from vireo.report.environment import PACKAGES, as_markdown, environment


@pytest.fixture
def no_torch(monkeypatch):
    """Importing torch fails, as it does where a library of it is missing."""
    monkeypatch.setitem(sys.modules, "torch", None)


def test_json_and_markdown_say_the_same(no_torch, capsys):
    assert cli.main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["vireo"] == __version__
    assert found["python"] == sys.version.split()[0]
    assert set(found["packages"]) == set(PACKAGES)
    assert found["cpus"] > 0
    assert found["memory_gb"] > 0
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("### Environment\n\n- vireo: ")
    assert f"- pydantic: {found['packages']['pydantic']}\n" in text


def test_a_torch_that_cannot_be_imported_is_said_and_the_rest_is_there(no_torch):
    found = environment()
    assert found["torch_error"].startswith("ModuleNotFoundError: ")
    assert found["packages"]["torch"]  # installed, and broken all the same
    assert "- torch cannot be imported: ModuleNotFoundError" in as_markdown(found)


def test_what_torch_says_of_the_machine():
    import torch

    found = environment()
    assert found["torch_error"] is None
    assert found["cuda"] == torch.version.cuda
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert "cannot be imported" not in as_markdown(found)


def test_a_missing_package_is_said(no_torch, monkeypatch):
    monkeypatch.setattr(module, "PACKAGES", ("numpy", "no-such-package"))
    assert "- no-such-package: not installed\n" in as_markdown(environment())


def test_gpus_and_driver_as_nvidia_smi_lists_them(no_torch, monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\necho 'NVIDIA H200, 143771, 570.10'\necho 'NVIDIA H200, 143771, 570.10'\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = environment()
    assert found["gpus"] == [{"name": "NVIDIA H200", "memory_gb": 150.8}] * 2
    assert found["driver"] == "570.10"
    assert "- GPU 1: NVIDIA H200, 150.8 GB\n- GPU driver: 570.10\n" in as_markdown(found)


def test_an_nvidia_smi_that_finds_no_driver_is_no_gpu(no_torch, monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = environment()
    assert (found["gpus"], found["driver"]) == ([], None)
    assert "- GPU: none\n" in as_markdown(found)


def test_only_listed_variables_are_shown(no_torch, monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_ENDPOINT", "HF_HOME"):
        monkeypatch.setenv(name, "only-for-me")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    found = environment()
    assert found["variables"]["NCCL_DEBUG"] == "INFO"
    assert "only-for-me" not in json.dumps(found) + as_markdown(found)


def test_the_git_commit_of_a_checkout_and_none_elsewhere(tmp_path):
    assert module._git_commit(tmp_path) is None
    (tmp_path / ".git").mkdir()  # a broken one
    assert module._git_commit(tmp_path) is None
