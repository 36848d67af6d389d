"""The `vireo` command, `vireo.train` and the registry: right call, right exit code, fast start."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.launch import environment
from vireo import __version__, cli, train, train_async
from vireo.errors import InputError, RowError, VireoError
from vireo.main import run_main
from vireo.trainers import registry

ROOT = Path(__file__).parents[1]
MODEL = ["--model_name_or_path", "m"]


@pytest.fixture
def module(monkeypatch):
    """Puts a module with one function in place of a real one; returns the calls it gets."""

    def _module(name: str, function: str, result: object = None) -> list[tuple[tuple, dict]]:
        calls: list[tuple[tuple, dict]] = []

        def fake(*args, **kwargs):
            calls.append((args, kwargs))
            return result

        stand_in = types.ModuleType(name)
        setattr(stand_in, function, fake)
        monkeypatch.setitem(sys.modules, name, stand_in)
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            monkeypatch.setattr(sys.modules[parent], child, stand_in, raising=False)
        return calls

    return _module


@pytest.fixture
def trainer(monkeypatch):
    """Registers a trainer `toy` that keeps the settings it gets, or raises what it is told to."""
    stand_in: Any = types.ModuleType("toy_trainer")
    seen: list = []

    def run(settings):
        if isinstance(stand_in.error, BaseException):
            raise stand_in.error
        seen.append(settings)

    stand_in.run, stand_in.seen, stand_in.error = run, seen, None
    monkeypatch.setitem(sys.modules, "toy_trainer", stand_in)
    monkeypatch.setitem(registry.BUILT_IN, "toy", "toy_trainer:run")
    return stand_in


# The start


def test_help_is_fast_because_it_imports_nothing_heavy():
    code = (
        "import sys; from vireo.cli import main; assert main(['--help']) == 0\n"
        "assert not {'torch', 'transformers', 'numpy', 'pydantic', 'yaml'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for command in cli.COMMANDS:
        assert f"\n  {command} " in done.stdout


def test_python_dash_m_and_the_root_files_are_the_same_commands():
    for command in (["-m", "vireo", "train"], ["-m", "vireo.train"], ["train.py"]):
        done = subprocess.run(
            [sys.executable, *command, "--sed", "1"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 2
        assert done.stderr == "error: unknown flag --sed; did you mean --seed?\n"


def test_version_and_no_command(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"vireo {__version__}\n"
    assert cli.main([]) == 2
    assert "usage: vireo" in capsys.readouterr().out


# Commands


def test_tiny(module, capsys):
    calls = module("vireo.families.tiny", "build")
    assert cli.main(["tiny", "qwen2_5_vl", "out"]) == 0
    assert cli.main(["tiny", "qwen2_5_vl", "out", "--seed=3"]) == 0
    assert calls == [(("qwen2_5_vl", "out"), {}), (("qwen2_5_vl", "out"), {"seed": 3})]
    assert capsys.readouterr().out == "wrote out\nwrote out\n"


def test_data(module):
    calls = module("vireo.data.synthetic", "write_shapes")
    assert cli.main(["data", "shapes", "out", "--rows", "5", "--seed", "1"]) == 0
    assert calls == [(("out",), {"rows": 5, "seed": 1})]
    calls = module("vireo.data.synthetic", "write_digits")
    assert cli.main(["data", "digits", "out"]) == 0
    assert calls == [(("out",), {})]


@pytest.mark.parametrize(
    "command",
    [
        ["tiny", "qwen3", "{file}"],
        ["data", "shapes", "{file}", "--rows", "20"],
        ["train", "--vlm_model_name_or_path=m", "--output_dir={file}/deep"],
    ],
)
def test_a_path_that_is_a_file_is_one_line_and_bad_input(command, tmp_path, capsys):
    file = tmp_path / "taken"
    file.write_text("mine")
    if command[0] == "train":
        from vireo.families.tiny import build

        model = build("qwen3", tmp_path / "model", size="test")
        rows = tmp_path / "rows.jsonl"
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        rows.write_text(json.dumps({"messages": turns}))
        command = [command[0], "--trainer=fsdp", f"--train_file={rows}", *command[2:]]
        command.append(f"--vlm_model_name_or_path={model}")
    capsys.readouterr()  # what building the model said
    assert cli.main([word.replace("{file}", str(file)) for word in command]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert str(file) in error[0]
    assert file.read_text() == "mine"


def test_a_reader_that_leaves_early_gets_no_traceback():
    command = f"{sys.executable} -m vireo settings | head -n 1"
    done = subprocess.run(
        ["bash", "-c", command], env=environment(), cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.startswith("flag")
    assert done.stderr == ""


def test_export(module):
    calls = module("vireo.training.export", "export")
    assert cli.main(["export", "ckpt", "out", "--dtype", "bf16"]) == 0
    assert calls == [(("ckpt", "out"), {"dtype": "bf16"})]


def test_eval_prints_the_measures(module, capsys):
    calls = module("vireo.evaluation", "evaluate_files", {"accuracy": 0.5})
    assert cli.main(["eval", "--model", "m", "--eval-file", "f", "--limit=2"]) == 0
    ((_, given),) = calls
    assert [given[name] for name in ("model", "eval_file", "limit")] == ["m", "f", 2]
    assert json.loads(capsys.readouterr().out) == {"accuracy": 0.5}


def test_demo(module):
    calls = module("vireo.demo", "run")
    assert cli.main(["demo", "--max-steps", "3"]) == 0
    assert calls == [((), {"max_steps": 3})]


def test_demo_by_rewards(module):
    calls = module("vireo.demo_rl", "run")
    assert cli.main(["demo", "--rl", "--max-steps", "3", "--seed=1", "--output_dir=o"]) == 0
    assert calls == [((), {"num_rollout": 3, "seed": 1, "output_dir": "o"})]


def test_settings_prints_the_table(capsys):
    assert cli.main(["settings", "--trainer", "fsdp_vlm"]) == 0
    assert "--per_device_train_batch_size" in capsys.readouterr().out


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:  # argparse's way of ending
        raise SystemExit(cli.main([command, "--help"]))
    assert stop.value.code == 0
    assert f"usage: vireo {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["trian"], "unknown command 'trian'; did you mean train?"),
        (["qqqq"], "unknown command 'qqqq'; there are train, "),
        (["tiny", "a", "b", "--sed", "1"], "vireo tiny: unknown flag --sed; did you mean --seed?"),
        (["tiny", "a", "b", "--see", "1"], "unknown flag --see; did you mean --seed?"),
        (["tiny", "a"], "vireo tiny: the following arguments are required: out"),
        (["tiny", "a", "b", "--seed", "x"], "invalid int value: 'x'"),
        (["export", "a", "b", "--dtype", "fp8"], "invalid choice: 'fp8'"),
        (["data", "digits", "o", "--rows", "1"], "--rows is for shapes"),
        (["settings", "--trainer", "fsdp_vl"], "unknown trainer 'fsdp_vl'; did you mean fsdp_vlm?"),
        (["train", "--lr", "x", *MODEL], "--lr: found 'x'"),
    ],
)
def test_a_wrong_command_is_one_line_and_exit_code_2(argv, text, capsys):
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert text in err


@pytest.mark.parametrize(
    "argv",
    [
        ["--debug", "tiny", "a"],
        ["tiny", "--debug", "a"],
        ["--debug", "train", "--lr", "1"],
        ["train", "--debug", "--lr", "1"],
        ["train", *MODEL, "--debug", "true", "--trainer", "x"],
    ],
)
def test_debug_anywhere_shows_the_traceback(argv, capsys):
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "\nerror: " in err


# Running a trainer


def test_train_runs_the_trainer_of_the_settings(trainer):
    assert cli.main(["train", *MODEL, "--trainer", "toy", "--lr", "0.5"]) == 0
    assert train.main([*MODEL, "--trainer", "toy"]) == 0
    assert [settings.optim.lr for settings in trainer.seen] == [0.5, 1e-5]


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (VireoError("no step\nwas done"), 1, "error: no step was done\n"),
        (InputError("bad"), 2, "error: bad\n"),
        (RowError("missing_image", "no file", "a.json:3"), 2, "error: a.json:3: no file [missing"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_become_exit_codes(trainer, error, code, text, capsys):
    trainer.error = error
    assert train.main([*MODEL, "--trainer", "toy"]) == code
    assert capsys.readouterr().err.startswith(text)


def test_a_file_can_ask_for_tracebacks(trainer, tmp_path, capsys):
    trainer.error = InputError("bad")
    (tmp_path / "run.yaml").write_text("debug: true\ntrainer: toy\n")
    assert train.main([*MODEL, "--config", str(tmp_path / "run.yaml")]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_defect_keeps_its_traceback(trainer):
    trainer.error = ZeroDivisionError("defect")
    with pytest.raises(ZeroDivisionError):
        train.main([*MODEL, "--trainer", "toy"])
    with pytest.raises(SystemExit):
        run_main(lambda: sys.exit(3))


def test_train_async_is_for_trainers_with_a_rollout(trainer, capsys):
    assert train_async.main([*MODEL, "--trainer", "toy"]) == 2
    assert "the trainer toy has no rollout" in capsys.readouterr().err
    assert trainer.seen == []
    trainer.run.has_rollout = True
    assert train_async.main([*MODEL, "--trainer", "toy"]) == 0
    assert len(trainer.seen) == 1


def test_another_package_adds_a_trainer_by_entry_point(trainer, monkeypatch):
    entry = registry.EntryPoint("theirs", "toy_trainer:run", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    assert registry.find("theirs") is trainer.run
    with pytest.raises(
        InputError, match=r"did you mean theirs\? Trainers: fsdp, fsdp_vlm, grpo, theirs, toy"
    ):
        registry.find("their")
