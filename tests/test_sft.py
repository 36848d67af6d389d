"""The trainer end to end: the published command, resume, elastic resume, kills, damage, export."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.launch import torchrun, torchrun_command
from tests.rows import losses, write_rows
from vireo.errors import InputError
from vireo.families.tiny import build
from vireo.settings import load_settings
from vireo.trainers import registry
from vireo.training.checkpoint import checkpoints
from vireo.training.export import export

STEPS = 7  # two epochs of 13 rows at 4 a step: 4 + 4 + 4 + 1, then 4 + 4 + 4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    build("qwen2_vl", folder / "model", size="test")
    counts = [1, 0, 2, 1, 0, 0, 1, 3, 0, 1, 0, 1, 2]
    write_rows(folder / "data", counts, ((56, 56), (84, 56)))
    return folder


def flags(base: Path, output: str, *more: str) -> list[str]:
    return [
        "--trainer=fsdp_vlm",
        f"--vlm_model_name_or_path={base / 'model'}",
        f"--train_file={base / 'data' / 'rows.json'}",
        f"--output_dir={base / output}",
        "--freeze_vision=false",
        "--lr=1e-3",
        "--num_workers=0",
        f"--max_steps={STEPS}",
        "--global_batch_size=4",
        "--per_device_train_batch_size=2",
        "--fsdp_mp_dtype=fp32",
        *more,
    ]


def train(base: Path, output: str, *more: str) -> Path:
    settings = load_settings(flags(base, output, *more))
    registry.find(settings.trainer)(settings)
    return base / output


@pytest.fixture(scope="module")
def unbroken(base: Path) -> Path:
    """One rank, all steps, a checkpoint each."""
    return train(base, "unbroken", "--save_steps=1")


def stopped_at(unbroken: Path, step: int, new: Path) -> Path:
    """A run folder as the unbroken run left it when it was stopped after `step` steps."""
    (new / "checkpoints").mkdir(parents=True)
    for path in checkpoints(unbroken / "checkpoints")[:step]:
        (new / "checkpoints" / path.name).symlink_to(path)
    lines = (unbroken / "metrics.jsonl").read_text().splitlines(keepends=True)
    (new / "metrics.jsonl").write_text("".join(lines[: step + 1]) + '{"step": 4, "lo')
    return new


def test_the_loss_falls_and_every_step_is_recorded(unbroken: Path) -> None:
    found = losses(unbroken)
    assert len(found) == STEPS
    assert found[-1] < found[0]
    record = json.loads((unbroken / "metrics.jsonl").read_text().splitlines()[3])
    assert record["rows"] == 1  # the rest of the first epoch: no step crosses an epoch
    assert record["epoch"] == 1.0


def test_resume_on_one_rank_repeats_the_unbroken_run(base: Path, unbroken: Path) -> None:
    new = stopped_at(unbroken, 3, base / "resumed-1")
    train(base, new.name, "--resume=auto")
    assert losses(new) == pytest.approx(losses(unbroken), abs=1e-6)
    final = [load_state(path / f"checkpoints/step-{STEPS}") for path in (new, unbroken)]
    assert final[0].keys() == final[1].keys()
    for name, value in final[0].items():
        assert torch.allclose(value, final[1][name], atol=1e-6), name


def load_state(path: Path) -> dict[str, torch.Tensor]:
    out = path.parent.parent / f"export-{path.name}"
    if not out.exists():
        export(path, out)
    return load_file(out / "model.safetensors")


def test_an_unsharded_run_has_the_losses_of_a_sharded_one(base: Path, unbroken: Path) -> None:
    new = train(base, "unsharded", "--fsdp_enable=false", "--grad_ckpt")
    assert losses(new) == pytest.approx(losses(unbroken), abs=1e-5)


def test_padding_has_the_losses_of_packing(base: Path, unbroken: Path) -> None:
    new = train(base, "padded", "--packing=false")
    assert losses(new) == pytest.approx(losses(unbroken), abs=1e-5)


def test_a_token_budget_has_the_losses_of_a_number_of_rows(base: Path, unbroken: Path) -> None:
    arguments = [f for f in flags(base, "budget") if not f.startswith("--per_device")]
    settings = load_settings([*arguments, "--max_tokens_per_gpu=256"])
    registry.find(settings.trainer)(settings)
    assert losses(base / "budget") == pytest.approx(losses(unbroken), abs=1e-5)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_resume_on_another_number_of_ranks(base: Path, unbroken: Path, world: int) -> None:
    new = stopped_at(unbroken, 3, base / f"resumed-{world}")
    more = ["--resume=auto", "--save_steps=2"]
    torchrun(world, "-m", "vireo.train", *flags(base, new.name, *more))
    assert losses(new) == pytest.approx(losses(unbroken), abs=1e-5)
    back = base / f"back-{world}"  # and from the many ranks' checkpoint to one
    (back / "checkpoints").mkdir(parents=True)
    (back / "checkpoints" / "step-4").symlink_to(new / "checkpoints" / "step-4")
    train(base, back.name, "--resume=auto")
    assert losses(back) == pytest.approx(losses(unbroken)[4:], abs=1e-5)


def test_the_global_batch_of_the_checkpoint_wins(
    base: Path, unbroken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = stopped_at(unbroken, 3, base / "batch")
    arguments = [f for f in flags(base, "batch", "--resume=auto") if "global_batch" not in f]
    settings = load_settings([*arguments, "--grad_accum_steps=5"])
    registry.find(settings.trainer)(settings)
    assert "4 rows a step as in the checkpoint, not 10" in capsys.readouterr().out
    assert losses(new) == pytest.approx(losses(unbroken), abs=1e-6)


def test_a_full_checkpoint_resumes_and_exports_like_a_sharded_one(
    base: Path, unbroken: Path
) -> None:
    new = train(base, "full", "--fsdp_checkpoint=full", "--save_steps=4")
    first, last = (load_state(path / f"checkpoints/step-{STEPS}") for path in (new, unbroken))
    assert all(torch.equal(first[name], last[name]) for name in last)
    os.rename(new / "checkpoints" / f"step-{STEPS}", base / "moved")
    train(base, "full", "--fsdp_checkpoint=full", "--resume=auto")
    assert losses(new) == pytest.approx(losses(unbroken), abs=1e-6)


def test_an_earlier_run_is_never_written_over(base: Path, unbroken: Path) -> None:
    with pytest.raises(InputError, match="--resume auto"):
        train(base, unbroken.name)


def test_only_the_newest_checkpoints_are_kept(base: Path) -> None:
    new = train(base, "pruned", "--save_steps=1", "--keep_checkpoints=2")
    assert [p.name for p in checkpoints(new / "checkpoints")] == [
        f"step-{STEPS - 1}",
        f"step-{STEPS}",
    ]
    assert {p.name for p in (new / "checkpoints").iterdir()} == {
        f"step-{STEPS - 1}",
        f"step-{STEPS}",
    }


def test_the_final_checkpoint_is_saved_before_the_evaluation(base: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "data", [1])
    (tmp_path / "data" / "0.png").write_bytes(b"broken")
    with pytest.raises(InputError, match="r0"):
        train(base, "bad-eval", f"--eval_file={rows}")
    assert [p.name for p in checkpoints(base / "bad-eval" / "checkpoints")] == [f"step-{STEPS}"]


def test_a_finished_run_stays_as_it_is(base: Path) -> None:
    rows = base / "data" / "rows.json"
    more = [f"--eval_file={rows}", "--max_new_tokens=2", "--eval_samples=2"]
    new = train(base, "finished", *more)
    before = (new / "metrics.jsonl").read_text()
    train(base, "finished", *more, "--resume=auto")
    assert (new / "metrics.jsonl").read_text() == before


def test_resuming_from_an_older_checkpoint_is_refused(base: Path, unbroken: Path) -> None:
    new = stopped_at(unbroken, 3, base / "branch")
    with pytest.raises(InputError, match="step-3"):
        train(base, new.name, f"--resume={new / 'checkpoints' / 'step-2'}")
    train(
        base,
        new.name,
        f"--resume={unbroken / 'checkpoints' / 'step-2'}",
        f"--save_dir={base / 'b'}",
    )
    assert losses(new) == pytest.approx(losses(unbroken), abs=1e-6)


@pytest.mark.parametrize("change", ["--seed=7", "--shuffle=false", "--train_file={other}"])
def test_another_order_of_rows_is_refused_on_resume(
    change: str, base: Path, unbroken: Path, tmp_path: Path
) -> None:
    counts = [1, 0, 2, 1, 0, 0, 1, 3, 0, 1, 0, 1, 1]  # as many rows, another file
    other = write_rows(tmp_path / "data", counts)
    new = stopped_at(unbroken, 3, tmp_path / "run")
    with pytest.raises(InputError, match=r"step-3 was trained with"):
        train(base, str(new), "--resume=auto", change.replace("{other}", str(other)))


def test_optimizer_settings_of_the_resumed_run_hold(base: Path, unbroken: Path) -> None:
    new = stopped_at(unbroken, 3, base / "decay")
    train(base, new.name, "--resume=auto", "--weight_decay=0.5")
    assert losses(new)[4:] != pytest.approx(losses(unbroken)[4:], abs=1e-5)


def test_a_killed_save_or_prune_leaves_nothing_behind(base: Path, unbroken: Path) -> None:
    new = stopped_at(unbroken, 3, base / "leftovers")
    for name in (".writing-step-9", ".deleting-step-3"):
        (new / "checkpoints" / name / "state").mkdir(parents=True)
    train(base, new.name, "--resume=auto", "--save_steps=1", "--keep_checkpoints=1")
    assert [p.name for p in (new / "checkpoints").iterdir()] == [f"step-{STEPS}"]


def test_the_trained_chat_template_is_exported(base: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(base / "model", tmp_path / "model")
    own = (tmp_path / "model" / "chat_template.jinja").read_text()
    (tmp_path / "model" / "chat_template.json").write_text(json.dumps({"chat_template": own}))
    bad = {"temperature": 0.7, "repetition_penalty": 1.05}  # which transformers refuses to save
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(bad))
    more = [f"--vlm_model_name_or_path={tmp_path / 'model'}", "--chat_template=minicpm"]
    new = train(base, str(tmp_path / "run"), *more)
    out = export(new / "checkpoints" / f"step-{STEPS}", tmp_path / "out")
    from transformers import AutoProcessor

    found = AutoProcessor.from_pretrained(out).chat_template
    assert found != own
    assert "helpful assistant" not in found
    assert json.loads((out / "generation_config.json").read_text()) == bad


def test_the_models_own_config_is_exported_whatever_the_processors_folder_holds(
    base: Path, unbroken: Path, tmp_path: Path
) -> None:
    build("qwen2_5_vl", tmp_path / "processor", size="test")
    more = [f"--processor_name_or_path={tmp_path / 'processor'}"]
    new = train(base, str(tmp_path / "run"), *more)
    out = export(new / "checkpoints" / f"step-{STEPS}", tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "qwen2_vl"
    own = json.loads((base / "model" / "config.json").read_text())
    assert config["text_config"] == own["text_config"]


def test_resuming_into_another_model_is_bad_input(
    base: Path, unbroken: Path, tmp_path: Path
) -> None:
    model = build("qwen2_vl", tmp_path / "model", size="test", num_hidden_layers=3)
    new = stopped_at(unbroken, 3, tmp_path / "run")
    with pytest.raises(InputError, match="cannot be read into this model"):
        train(base, str(new), "--resume=auto", f"--vlm_model_name_or_path={model}")


def test_the_records_of_an_earlier_run_are_never_written_over(
    base: Path, unbroken: Path, tmp_path: Path
) -> None:
    before = (unbroken / "metrics.jsonl").read_text()
    with pytest.raises(InputError, match="holds an earlier run"):
        train(base, unbroken.name, f"--save_dir={tmp_path}")
    assert (unbroken / "metrics.jsonl").read_text() == before


def damage_shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def damage_flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [damage_shorten, damage_flip, Path.unlink])
@pytest.mark.parametrize("victim", ["state/*.distcp", "progress.json", "rng.pt"])
def test_a_damaged_checkpoint_is_an_error(
    base: Path, unbroken: Path, tmp_path: Path, damage, victim: str
) -> None:
    import shutil

    shutil.copytree(unbroken / "checkpoints" / "step-3", tmp_path / "checkpoints" / "step-3")
    damage(next((tmp_path / "checkpoints" / "step-3").glob(victim)))
    with pytest.raises(InputError, match="step-3"):
        train(base, str(tmp_path), "--resume=auto")
    with pytest.raises(InputError, match="step-3"):
        export(tmp_path / "checkpoints" / "step-3", tmp_path / "out")


def wait_for(condition, process: subprocess.Popen, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        assert process.poll() is None, "the run ended by itself"
        time.sleep(0.01)


def test_a_run_of_two_ranks_killed_in_the_middle_resumes(
    base: Path, unbroken: Path, running
) -> None:
    output = base / "killed"
    arguments = flags(base, "killed", "--save_steps=2")
    process = running(*torchrun_command(2, "-m", "vireo.train", *arguments))
    wait_for(lambda: len(checkpoints(output / "checkpoints")) > 0, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    torchrun(2, "-m", "vireo.train", *arguments, "--resume=auto")
    assert losses(output) == pytest.approx(losses(unbroken), abs=1e-5)


def test_a_kill_during_a_save_leaves_the_last_good_checkpoint(
    base: Path, unbroken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vireo.training import checkpoint

    new = stopped_at(unbroken, 3, base / "half-saved")

    def killed(*_: object, **__: object) -> dict:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_checksums", killed)  # state is written, the rename is not done
        with pytest.raises(KeyboardInterrupt):
            train(base, new.name, "--resume=auto", "--save_steps=1")
    assert [p.name for p in checkpoints(new / "checkpoints")] == ["step-1", "step-2", "step-3"]
    train(base, new.name, "--resume=auto", "--save_steps=1")
    assert losses(new) == pytest.approx(losses(unbroken), abs=1e-6)
    assert not list((new / "checkpoints").glob(".writing*"))


def test_the_published_starter_command_trains_saves_and_resumes(base: Path) -> None:
    output = base / "starter"
    command = [
        *["train.py", "--trainer", "fsdp_vlm"],
        *["--vlm_model_name_or_path", str(base / "model")],
        *["--processor_name_or_path", str(base / "model")],
        *["--train_file", str(base / "data" / "rows.json")],
        *["--eval_file", str(base / "data" / "rows.json")],
        *["--freeze_vision", "--freeze_mm_proj", "false", "--chat_template", "qwen"],
        *["--image_size", "56", "--image_strategy", "longest", "--pack_multi_image"],
        *["--per_device_train_batch_size", "1", "--grad_accum_steps", "2", "--lr", "1e-4"],
        *["--fsdp_enable", "true", "--fsdp_sharding", "full", "--fsdp_mp_dtype", "bf16"],
        *["--fsdp_auto_wrap_cls", "Qwen2DecoderLayer", "--grad_ckpt", "--clip_grad_norm", "1.0"],
        *["--fsdp_checkpoint", "sharded", "--save_dir", str(output / "saves")],
        *["--output_dir", str(output), "--max_steps", "2", "--eval_samples", "2"],
        *["--num-workers", "1", "--max-new-tokens", "2"],
    ]
    text = torchrun(2, *command)
    assert "Qwen2DecoderLayer is the older name of Qwen2VLDecoderLayer" in text
    assert [p.name for p in checkpoints(output / "saves")] == ["step-2"]
    assert "exact match" in text
    command[command.index("--max_steps") + 1] = "3"
    text = torchrun(2, *command, "--resume", "auto")
    assert "resumed from" in text
    assert len(losses(output)) == 3
    assert (output / "samples" / "step-3.jsonl").exists()
    exported = export(output / "saves" / "step-3", output / "export")
    assert "<|im_start|>" in (exported / "chat_template.jinja").read_text()


def test_an_evaluation_that_was_missed_is_made_up_for(base: Path, unbroken: Path) -> None:
    new = stopped_at(unbroken, STEPS, base / "no-evaluation")
    lines = (unbroken / "metrics.jsonl").read_text()
    (new / "metrics.jsonl").write_text(lines)
    more = [f"--eval_file={base / 'data' / 'rows.json'}", "--eval_samples=0", "--resume=auto"]
    train(base, new.name, *more)
    train(base, new.name, *more)
    records = [json.loads(line) for line in (new / "metrics.jsonl").open()]
    assert [r["step"] for r in records if "eval_loss" in r] == [STEPS]


def test_no_evaluation_is_made_up_without_rows(base: Path, tmp_path: Path) -> None:
    new = train(base, "no-eval-file", "--eval_steps=2")
    assert "eval" not in (new / "metrics.jsonl").read_text()
    assert "--eval_steps has no effect without --eval_file" in (new / "log.txt").read_text()
    rows = write_rows(tmp_path / "data", [1])
    (tmp_path / "data" / "0.png").write_bytes(b"broken")
    new = train(base, "all-refused", f"--eval_file={rows}", "--on_bad_row=skip")
    last = json.loads((new / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval_loss"] is None


def test_a_save_folder_that_cannot_be_is_refused_at_the_start(base: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for name in ("file", "file/deep"):
        with pytest.raises(InputError, match=r"--save_dir .*file is a file"):
            train(base, "no-saves", f"--save_dir={tmp_path / name}")
    assert not (base / "no-saves").exists()


def test_a_start_that_failed_does_not_take_the_folder(base: Path) -> None:
    with pytest.raises(InputError, match="no such linear module"):
        train(base, "second-try", "--lora_r=4", "--lora_target_modules=q_prj")
    train(base, "second-try", "--lora_r=4", "--lora_target_modules=q_proj", "--max_steps=1")
