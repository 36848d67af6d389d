"""Bad input ends with one clear line, exit code 2, and a traceback only with --debug."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.launch import ROOT, environment, torchrun_command
from tests.launch import vireo as run_vireo
from tests.rows import write_rows
from vireo.families.tiny import build
from vireo.train import main


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Flags of a run that works."""
    base = tmp_path_factory.mktemp("bad-input")
    build("qwen2_vl", base / "model", size="test")
    build("qwen3", base / "text-model", size="test")
    rows = write_rows(base / "data", [1, 0, 2])
    return {
        "trainer": "fsdp_vlm",
        "vlm_model_name_or_path": str(base / "model"),
        "train_file": str(rows),
        "max_steps": "1",
        "num_workers": "0",
        "fsdp_enable": "false",
        "base": str(base),
    }


def attempt(good: dict[str, str], tmp_path: Path, **changes: str) -> list[str]:
    chosen = {k: v for k, v in (good | changes).items() if k != "base" and v}
    return [*(f"--{name}={value}" for name, value in chosen.items()), f"--output_dir={tmp_path}"]


CASES = {
    "unknown flag": ({"leraning_rate": "1"}, ["leraning_rate"]),
    "unknown flag, near one": ({"train_fil": "x"}, ["train_fil", "train_file"]),
    "missing file": ({"train_file": "no/such/rows.json"}, ["no/such/rows.json"]),
    "no training file": ({"train_file": ""}, ["--train_file"]),
    "missing model folder": ({"vlm_model_name_or_path": "/no/such/model"}, ["/no/such/model"]),
    "a model folder without a config": ({"vlm_model_name_or_path": "{base}/data"}, ["data"]),
    "a text model for the vision trainer": (
        {"vlm_model_name_or_path": "{base}/text-model"},
        ["qwen3", "--trainer fsdp"],
    ),
    "unknown trainer": ({"trainer": "fsdp_vml"}, ["fsdp_vml", "fsdp_vlm"]),
    "a limit shorter than an image": (
        {"max_length": "8"},
        ["'r", "the limit is 8", "--max_length"],
    ),
    "a limit above the model's": ({"max_length": "999999"}, ["999999", "4096"]),
    "a layer that is not there": (
        {"fsdp_auto_wrap_cls": "NoLayer"},
        ["NoLayer", "Qwen2VLDecoderLayer"],
    ),
    "a layer of the vision tower": (
        {"fsdp_auto_wrap_cls": "Qwen2VLVisionBlock"},
        ["vision tower", "Qwen2VLDecoderLayer"],
    ),
    "hybrid sharding on one rank": (
        {"fsdp_sharding": "hybrid", "fsdp_enable": "true"},
        ["hybrid", "--fsdp_shard_size"],
    ),
    "a checkpoint that is not there": ({"resume": "/no/such/step-3"}, ["/no/such/step-3"]),
    "a template of other control tokens": ({"chat_template": "llama32v"}, ["<|eot_id|>"]),
    "steps that do not add up": (
        {"global_batch_size": "5", "grad_accum_steps": "2"},
        ["--global_batch_size 5", "= 2"],
    ),
    "adapters of no module": (
        {"lora_r": "8", "lora_target_modules": "q_prj"},
        ["--lora_target_modules q_prj", "q_proj"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_clear_line_and_exit_code_2(
    case: str, good: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, wanted = CASES[case]
    filled = {k: v.replace("{base}", good["base"]) for k, v in changes.items()}
    assert main(attempt(good, tmp_path, **filled)) == 2
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, error
    assert "Traceback" not in error
    for words in wanted:
        assert words in lines[0]


def test_weights_that_cannot_be_read_are_bad_input(good, tmp_path: Path, capsys) -> None:
    shutil.copytree(good["vlm_model_name_or_path"], tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    changes = {"vlm_model_name_or_path": str(tmp_path / "model")}
    assert main(attempt(good, tmp_path / "run", **changes)) == 2
    error = capsys.readouterr().err
    assert "its weights cannot be read" in error
    assert "Traceback" not in error


def test_a_head_that_differs_from_its_tied_embedding_is_refused(
    good, tmp_path: Path, capsys
) -> None:
    shutil.copytree(good["vlm_model_name_or_path"], tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    embedding = next(v for name, v in weights.items() if "embed_tokens" in name)
    changes = {"vlm_model_name_or_path": str(tmp_path / "model")}
    for number, (head, code) in enumerate(((embedding.clone(), 0), (embedding + 1, 2))):
        save_file(weights | {"lm_head.weight": head}, file, metadata={"format": "pt"})
        assert main(attempt(good, tmp_path / f"run-{number}", **changes)) == code
    assert "tie_word_embeddings" in capsys.readouterr().err


def break_image(folder: Path, kind: str) -> Path:
    rows = write_rows(folder, [1, 1, 1])
    if kind == "missing":
        (folder / "1.png").unlink()
    else:
        (folder / "1.png").write_bytes((folder / "1.png").read_bytes()[:60])
    return rows


@pytest.mark.parametrize(("kind", "reason"), [("missing", "missing_image"), ("cut", "bad_image")])
@pytest.mark.parametrize("validate", ["lazy", "full"])
def test_a_bad_image_names_its_row(
    kind: str, reason: str, validate: str, good, tmp_path: Path, capsys
) -> None:
    rows = break_image(tmp_path / "data", kind)
    more = {"train_file": str(rows), "validate": validate, "max_steps": "3"}
    assert main(attempt(good, tmp_path / "run", **more)) == 2
    error = capsys.readouterr().err
    assert "'r1'" in error
    assert "1.png" in error
    assert reason in error


@pytest.mark.parametrize("validate", ["lazy", "full"])
def test_skipped_rows_are_counted_and_listed(validate: str, good, tmp_path: Path, capsys) -> None:
    rows = break_image(tmp_path / "data", "missing")
    more = {"train_file": str(rows), "validate": validate, "on_bad_row": "skip"}
    more |= {"max_steps": "", "num_epochs": "2"}
    assert main(attempt(good, tmp_path / "run", **more)) == 0
    records = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(r["rows"] for r in records) == 4  # two good rows, two epochs
    progress = tmp_path / "run" / "checkpoints" / "step-6" / "progress.json"
    assert "'r1'" in json.loads(progress.read_text())["skipped"][0]
    assert "skipped" in capsys.readouterr().out


def test_a_row_over_the_token_budget_is_refused_by_name(good, tmp_path: Path, capsys) -> None:
    more = {"max_tokens_per_gpu": "32", "global_batch_size": "3"}
    assert main(attempt(good, tmp_path / "run", **more)) == 2
    error = capsys.readouterr().err
    assert "(id 'r" in error
    assert "the limit is 32: raise --max_tokens_per_gpu" in error


def test_a_run_without_a_usable_row_is_no_success(good, tmp_path: Path, capsys) -> None:
    more = {"max_length": "10", "on_bad_row": "skip", "max_steps": "5"}
    assert main(attempt(good, tmp_path / "run", **more)) == 2
    error = capsys.readouterr().err
    assert "every row was refused" in error
    assert "too_long" in error
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_other_lora_settings_without_a_rank_are_said_to_do_nothing(
    good, tmp_path: Path, capsys
) -> None:
    assert main(attempt(good, tmp_path / "run", lora_r="0", lora_alpha="32")) == 0
    assert "the other lora settings have no effect" in capsys.readouterr().out


def test_a_bad_row_of_the_evaluation_file_is_refused_or_skipped(
    good, tmp_path: Path, capsys
) -> None:
    rows = break_image(tmp_path / "data", "missing")
    assert main(attempt(good, tmp_path / "one", eval_file=str(rows))) == 2
    assert "'r1'" in capsys.readouterr().err
    more = {"eval_file": str(rows), "on_bad_row": "skip", "max_new_tokens": "2"}
    assert main(attempt(good, tmp_path / "two", **more)) == 0
    assert capsys.readouterr().out.count("missing_image") == 1


def test_a_bad_row_on_one_rank_stops_every_rank(good, tmp_path: Path) -> None:
    rows = break_image(tmp_path / "data", "missing")
    more = {"train_file": str(rows), "fsdp_enable": "", "max_steps": "3"}
    done = subprocess.run(
        torchrun_command(2, "-m", "vireo.train", *attempt(good, tmp_path / "run", **more)),
        env=environment(VIREO_TIMEOUT_S="20"),
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode != 0
    # Both ranks write to one stream, so a line may begin with the end of another's.
    lines = [line for line in done.stderr.splitlines() if "error: " in line]
    assert any("'r1'" in line and "missing_image" in line for line in lines), done.stderr
    assert "imed out" not in done.stderr


def test_debug_shows_the_traceback(good, tmp_path: Path, capsys) -> None:
    assert main([*attempt(good, tmp_path, train_file="nowhere.json"), "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_the_command_itself_exits_with_2() -> None:
    done = run_vireo("train", "--trainer", "fsdp_vlm", "--no_such_flag", "1")
    assert done.returncode == 2
    assert "no_such_flag" in done.stderr
    assert "Traceback" not in done.stderr
