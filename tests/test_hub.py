"""Pushing to the Hub: everything arrives as it is, and what cannot work is said in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub_server import TOKEN, Hub
from tests.launch import ROOT, environment
from vireo.errors import InputError
from vireo.training.hub import check_repo_name

CHECK = "from vireo.training.hub import check_push; check_push('my-team/my-model')"
PUSH = "from vireo.training.hub import push; print(push('model', 'my-team/my-model'{}))"


@pytest.fixture
def hub():
    server = Hub()
    yield server
    server.close()


@pytest.fixture
def model(tmp_path) -> Path:
    """An exported folder, with weights that are no text."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 5000)
    (folder / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n\n# Model ü\n")
    return folder


@pytest.fixture
def run(tmp_path):
    """Runs code under `vireo`'s error handling, in a process that knows only the stand-in."""

    def _run(
        code: str, address: str, token: str | None = TOKEN, **more: str
    ) -> subprocess.CompletedProcess[str]:
        fixed = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1"}
        fixed |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        env = environment(**fixed)
        for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            env.pop(name, None)
        env |= more | ({"HF_TOKEN": token} if token else {})
        script = (
            f"import sys; from vireo.main import run_main\ndef code():\n    {code}\n"
            "sys.exit(run_main(code))"
        )
        command = [sys.executable, "-c", script]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    return _run


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_push_arrives_whole_and_a_second_one_leaves_no_old_weights(hub, run, model):
    done = run(PUSH.format(""), hub.address)
    assert (done.returncode, done.stdout) == (0, f"{hub.address}/my-team/my-model\n"), done.stderr
    assert hub.files["my-team/my-model"] == contents(model)
    assert hub.private["my-team/my-model"]
    assert any(asked.startswith("PUT /lfs/") for asked in hub.asked)  # the weights went by LFS

    hub.files["my-team/my-model"] |= {"NOTES.md": b"theirs", "adapter_config.json": b"{}"}
    os.replace(model / "model.safetensors", model / "model-00001-of-00001.safetensors")
    (model / "model.safetensors.index.json").write_text("{}")
    done = run(PUSH.format(""), hub.address)
    assert done.returncode == 0, done.stderr
    assert hub.files["my-team/my-model"] == contents(model) | {"NOTES.md": b"theirs"}


def test_a_public_repository(hub, run, model):
    assert run(PUSH.format(", private=False"), hub.address).returncode == 0
    assert hub.private == {"my-team/my-model": False}


def test_a_check_that_passes_makes_nothing(hub, run):
    done = run(CHECK, hub.address)
    assert (done.returncode, done.stderr) == (0, "")
    assert "GET /api/whoami-v2" in hub.asked
    assert hub.files == {}


@pytest.mark.parametrize(
    ("token", "more", "text"),
    [
        (None, {}, "there is no Hub token; run `hf auth login` or set HF_TOKEN"),
        ("hf_wrong", {}, "the Hub refused the token (401): run `hf auth login`"),
        (TOKEN, {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set; unset it"),
        (TOKEN, {"HF_ENDPOINT": "http://127.0.0.1:1"}, "ConnectError: "),
    ],
)
def test_a_run_that_could_not_be_pushed_does_not_start(hub, run, token, more, text):
    done = run(CHECK, hub.address, token, **more)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --push_to_hub my-team/my-model: ")
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("piece", "status", "text"),
    [
        ("/api/repos/create", 401, "the Hub refused the token (401)"),
        ("/api/repos/create", 403, "the token may not write there (403)"),
        ("/lfs/", 403, "the token may not write there (403)"),
        ("/commit/", 413, "the Hub answered 413: "),
    ],
)
def test_a_push_that_fails_says_why_and_how_to_try_again(hub, run, model, piece, status, text):
    hub.answers[piece] = status
    done = run(PUSH.format(""), hub.address)
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert last.startswith("error: model could not be pushed to my-team/my-model: ")
    assert text in last
    assert last.endswith("push it again with: hf upload my-team/my-model model")
    assert "Traceback" not in done.stderr
    assert len(contents(model)) == 3


def test_good_names_are_let_by():
    for name in ("a/b", "my-team/my_model-7B.v2"):
        check_repo_name(name)


@pytest.mark.parametrize(
    "name", ["model", "a/b/c", "a/", "/b", "a b/c", "a/-b", "a/b--c", "a/b.git"]
)
def test_a_malformed_name_is_one_line(name):
    with pytest.raises(InputError) as caught:
        check_repo_name(name)
    assert str(caught.value).startswith(f"--push_to_hub {name}: ")
    assert "\n" not in str(caught.value)
    assert str(ROOT) not in str(caught.value)
