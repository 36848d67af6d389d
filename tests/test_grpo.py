"""The RL loop end to end: exact ratios, resume, ranks, filters, staleness, replay, adapters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.launch import environment, torchrun, vireo
from tests.rl import curve, evaluations, flags, records, rollouts, train, write_prompts
from tests.tiny_models import tiny
from vireo import demo_rl
from vireo.data.conversation import Conversation, Text, Turn
from vireo.errors import InputError, RowError
from vireo.rl.figures import rollout_figures
from vireo.rl.learn import drops_out
from vireo.rollout.engine import EngineError
from vireo.rollout.sample import Sample
from vireo.trainers import grpo
from vireo.trainers.generation import Generation, eval_files
from vireo.training.checkpoint import checkpoints
from vireo.training.export import export

VLM, TEXT = "qwen2_5_vl", "qwen3"
MIXED = [1, 0, 2, 1, 0, 1, 1]  # pictures of each prompt


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts"), MIXED)


@pytest.fixture(scope="module")
def text_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("text"), [0] * 7)


@pytest.fixture(scope="module")
def unbroken(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps, two updates on each, a checkpoint after each."""
    return train(tiny(VLM), prompts, tmp_path_factory.mktemp("unbroken") / "run", *LONG)


LONG = ("--num_rollout=5", "--num_steps_per_rollout=2", "--save_steps=1")


@pytest.mark.parametrize("family", [VLM, TEXT, "gemma3", "mllama"])
def test_engine_and_trainer_agree_and_the_first_update_has_ratios_of_one(
    family: str, prompts: Path, text_prompts: Path, tmp_path: Path
) -> None:
    rows = text_prompts if family == TEXT else prompts
    # Checked steps: in others the ratios are of a forward and itself.
    more = ("--per_device_train_batch_size=5", "--check_steps=1")
    run = train(tiny(family), rows, tmp_path / "run", *more)
    made = records(run)
    assert [record["step"] for record in made] == [1, 2, 3]
    for record in made:
        assert record["mismatch/token_mult_prob_error"] - 1 <= 2e-5
        assert [record[f"probs_ratio/{n}"] for n in ("min", "mean", "max")] == [1.0, 1.0, 1.0]
        assert record["groups/mixed"] == 1
        assert record["grad_norm"] > 0
        assert record["entropy"] > 1
    assert made[0]["reward"] != made[1]["reward"]
    kinds = {name.split("/")[1] for name in made[0] if name.count("/") == 2}
    assert kinds == ({"text"} if family == TEXT else {"text", "image_first"})


@pytest.mark.parametrize("more", [[], ["--use_kl_loss"], ["--entropy_coef=0.01"]])
def test_one_update_needs_no_pass_for_the_log_probs_before_it(
    prompts: Path, tmp_path: Path, more: list[str]
) -> None:
    """A checked step computes them by themselves; every number is the same, bit for bit."""
    runs = [
        train(tiny(VLM), prompts, tmp_path / name, f"--check_steps={every}", *more)
        for name, every in (("apart", 1), ("at once", 0))
    ]
    for apart, once in zip(*map(records, runs)):
        assert "seconds/logprobs" in apart
        assert "seconds/logprobs" not in once
        for name, value in once.items():
            # Rows meet in the engine by chance, so its own log-probs may differ in a last bit.
            if name.startswith("mismatch"):
                assert apart[name] == pytest.approx(value, abs=1e-5)
            elif not name.startswith(("seconds", "tokens_per_s", "generated_", "memory", "buffer")):
                assert apart[name] == value, name
        assert once["entropy"] > 1
    for step in (1, 2, 3):
        one, other = ([s.metadata["trainer_logprobs"] for s in rollouts(r, step)] for r in runs)
        assert one == other


def test_dropout_is_noticed() -> None:
    def found(*modules: torch.nn.Module) -> bool:
        return drops_out(torch.nn.Sequential(*modules))

    plain, hidden = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    hidden.attention_dropout = 0.1  # type: ignore[assignment]
    assert not found(plain, torch.nn.Dropout(0.0))
    assert found(plain, torch.nn.Dropout(0.1))
    assert found(hidden)


def test_the_run_folder_has_each_step_with_its_samples(unbroken: Path) -> None:
    for step in range(1, 6):
        samples = rollouts(unbroken, step)
        assert len(samples) == 12
        assert [s.index for s in samples] == [0, 1, 2, 3] * 3
        for sample in samples:
            n = len(sample.response_ids)
            more = sample.metadata
            assert len(more["pieces"]) == len(more["trainer_logprobs"]) == n
            assert torch.tensor(more["trainer_logprobs"]) == pytest.approx(
                torch.tensor(sample.logprobs), abs=1e-4
            )
            assert isinstance(more["advantage"], float)
            assert sample.spans == [(str(step - 1), n)]
    groups = [s.group for step in range(1, 6) for s in rollouts(unbroken, step)]
    assert Counter(groups) == {f"{i:08d}": 4 for i in range(15)}
    last = records(unbroken)[-1]
    assert last["probs_ratio/max"] > 1  # of the second update
    for phase in ("generate", "prepare", "logprobs", "update", "weights"):
        assert last[f"seconds/{phase}"] > 0
    assert last["epoch"] == pytest.approx(15 / 7)


# -- going on -------------------------------------------------------------------------------------


class Killed(BaseException):
    """As a kill: nothing that catches errors sees it."""


PHASES = {
    "generation": (Generation, "collect"),
    "updates": (grpo.Grpo, "_learn"),
    "weights": (Generation, "sync"),
    "record": (grpo.Grpo, "_log"),
    "save": (grpo.Grpo, "_save"),
}


@pytest.mark.parametrize(
    ("phase", "before"),
    [
        pytest.param(phase, before, marks=[pytest.mark.slow] * (before != (phase == "record")))
        for phase in PHASES
        for before in (False, True)
    ],
)
def test_a_run_killed_in_any_phase_goes_on_as_the_unbroken_one(
    phase: str,
    before: bool,
    unbroken: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, name = PHASES[phase]
    whole, calls = getattr(owner, name), 0

    def dies(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3 and before:
            raise Killed
        result = whole(self, *args)
        if calls == 3:
            raise Killed
        return result

    monkeypatch.setattr(owner, name, dies)
    with pytest.raises(Killed):
        train(tiny(VLM), prompts, tmp_path / "run", *LONG)
    monkeypatch.undo()
    train(tiny(VLM), prompts, tmp_path / "run", *LONG, "--resume=auto")
    assert curve(tmp_path / "run") == curve(unbroken)
    for step in range(1, 6):
        ours, theirs = rollouts(tmp_path / "run", step), rollouts(unbroken, step)
        assert [s.group for s in ours] == [s.group for s in theirs]
        assert [s.response_ids for s in ours] == [s.response_ids for s in theirs]


@pytest.mark.slow
def test_a_killed_process_goes_on_as_the_unbroken_one(
    unbroken: Path, prompts: Path, tmp_path: Path, running: Any
) -> None:
    words = flags(tiny(VLM), prompts, tmp_path / "run", *LONG)
    process = running(sys.executable, "-m", "vireo.train", *words)
    saves, ends = tmp_path / "run" / "checkpoints", time.monotonic() + 120
    while not checkpoints(saves) and time.monotonic() < ends:
        time.sleep(0.02)
    assert checkpoints(saves)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    train(tiny(VLM), prompts, tmp_path / "run", *LONG, "--resume=auto")
    assert curve(tmp_path / "run") == curve(unbroken)


def test_partial_groups_and_those_left_over_survive_a_kill(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = (
        "--over_sampling_batch_size=5",
        "--partial_rollout",
        "--save_steps=1",
        "--num_rollout=4",
    )
    whole, calls = grpo.Grpo._log, 0

    def dies(self: Any, *args: Any) -> None:
        nonlocal calls
        calls += 1
        whole(self, *args)
        if calls == 3:
            raise Killed

    monkeypatch.setattr(grpo.Grpo, "_log", dies)
    with pytest.raises(Killed):
        train(tiny(VLM), prompts, tmp_path / "run", *more)
    monkeypatch.undo()
    train(tiny(VLM), prompts, tmp_path / "run", *more, "--resume=auto")
    seen = Counter(s.group for step in range(1, 5) for s in rollouts(tmp_path / "run", step))
    assert set(seen.values()) == {4}  # whole
    saved = checkpoints(tmp_path / "run" / "checkpoints")[-1]
    kept = json.loads((saved / "buffer.json").read_text())
    left = [work["group"] for place in ("waiting", "partial", "again") for work in kept[place]]
    numbers = sorted(int(group.partition(".")[0]) for group in [*seen, *left])
    assert numbers == list(range(kept["position"]))  # each prompt once


def test_a_signal_ends_it_in_the_middle_of_a_generation_with_a_checkpoint(
    prompts: Path, tmp_path: Path
) -> None:
    words = flags(tiny(VLM), prompts, tmp_path / "run", "--num_rollout=100000")
    process = subprocess.Popen([sys.executable, "-m", "vireo.train", *words], env=environment())
    metrics, ends = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") > 1):
        assert time.monotonic() < ends
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    done = checkpoints(tmp_path / "run" / "checkpoints")[-1]
    assert done.name == f"step-{records(tmp_path / 'run')[-1]['step']}"
    steps = int(done.name[5:])
    train(tiny(VLM), prompts, tmp_path / "run", f"--num_rollout={steps + 1}", "--resume=auto")
    groups = Counter(s.group for n in range(1, steps + 2) for s in rollouts(tmp_path / "run", n))
    assert groups == {f"{i:08d}": 4 for i in range(3 * steps + 3)}


# -- other ways to the same ----------------------------------------------------------------------


def test_two_ranks_learn_what_one_learns(unbroken: Path, prompts: Path, tmp_path: Path) -> None:
    words = flags(tiny(VLM), prompts, tmp_path / "run", *LONG, "--save_steps=0", "--num_rollout=2")
    torchrun(2, "-m", "vireo.train", *words)
    for ours, theirs in zip(curve(tmp_path / "run"), curve(unbroken)[:2], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4, abs=1e-5)


@pytest.mark.parametrize(
    "shape",
    [
        ("--per_device_train_batch_size=1",),
        ("--per_device_train_batch_size=12",),
        ("--per_device_train_batch_size=4", "--packing=false"),
        ("--per_device_train_batch_size=none", "--max_tokens_per_gpu=160"),
        ("--fsdp_enable=false",),
        ("--grad_ckpt=full",),
    ],
    ids=lambda words: " ".join(words),
)
def test_micro_batches_and_packing_do_not_change_what_is_learned(
    shape: tuple[str, ...], unbroken: Path, prompts: Path, tmp_path: Path
) -> None:
    more = ("--num_steps_per_rollout=2", "--num_rollout=1", *shape)
    run = train(tiny(VLM), prompts, tmp_path / "run", *more)
    got, wanted = records(run)[0], records(unbroken)[0]
    for name in ("loss", "grad_norm", "entropy", "reward"):
        assert got[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-6)


def test_a_recorded_rollout_trains_to_the_same_losses(
    unbroken: Path, prompts: Path, tmp_path: Path
) -> None:
    # No engine is opened for it: this one is not installed.
    again = (*LONG, f"--debug_train_only={unbroken}", "--engine=vllm")
    run = train(tiny(VLM), prompts, tmp_path / "run", *again)
    assert curve(run) == curve(unbroken)
    with pytest.raises(InputError, match=r"--debug_train_only .*step-6\.jsonl.*--num_rollout"):
        train(tiny(VLM), prompts, tmp_path / "more", *again, "--num_rollout=6")


def test_what_no_reward_could_score_is_counted() -> None:
    row = Conversation((Turn("user", (Text("?"),)),))
    group = [Sample("0", i, row, prompt_ids=[1], response_ids=[2], reward=0.0) for i in range(4)]
    group[2].metadata["unscored"] = "math: no result after 5 s"
    assert rollout_figures([group])["unscored"] == 0.25


def test_rollouts_alone_train_nothing(unbroken: Path, prompts: Path, tmp_path: Path) -> None:
    run = train(tiny(VLM), prompts, tmp_path / "run", "--debug_rollout_only")
    first = records(run)[0]
    assert first["reward"] == records(unbroken)[0]["reward"]
    assert "loss" not in first
    assert not checkpoints(run / "checkpoints")
    assert all(s.spans[0][0] == "0" for step in (1, 2, 3) for s in rollouts(run, step))


# -- settings of the loop -------------------------------------------------------------------------


def test_one_step_ahead_trains_on_tokens_that_are_one_update_old(
    prompts: Path, tmp_path: Path
) -> None:
    run = train(tiny(VLM), prompts, tmp_path / "run", "--max_staleness=1", "--num_rollout=5")
    made = records(run)
    assert [r["step"] for r in made] == [1, 2, 3, 4, 5]
    assert all(r["buffer/staleness"] <= 1 for r in made)
    assert max(r["mismatch/mean_abs"] for r in made) > 1e-3  # older weights sampled
    assert all("tis/mean" in r for r in made)
    for step in range(1, 6):
        for sample in rollouts(run, step):
            assert {int(version) for version, _ in sample.spans} <= {step - 1, step - 2}


def test_adapters_learn_and_their_base_is_the_reference(prompts: Path, tmp_path: Path) -> None:
    more = ("--lora_r=4", "--use_kl_loss", "--kl_loss_coef=0.1", "--num_steps_per_rollout=2")
    run = train(tiny(VLM), prompts, tmp_path / "run", *more)
    made = records(run)
    assert made[0]["kl"] > 0  # of the second update
    assert all(r["mismatch/token_mult_prob_error"] - 1 <= 2e-5 for r in made)
    first = rollouts(run, 1)[0].metadata
    assert first["reference_logprobs"] == first["trainer_logprobs"]  # adapters begin with nothing
    later = rollouts(run, 3)[0].metadata
    assert later["reference_logprobs"] != later["trainer_logprobs"]


@pytest.mark.parametrize("offload", ["true", "false"])
def test_a_reference_of_its_own_stays_what_it_was(
    offload: str, prompts: Path, tmp_path: Path
) -> None:
    run = train(tiny(VLM), prompts, tmp_path / "run", "--kl_coef=0.5", f"--ref_offload={offload}")
    first, later = rollouts(run, 1)[0].metadata, rollouts(run, 3)[0].metadata
    assert first["reference_logprobs"] == first["trainer_logprobs"]
    assert later["reference_logprobs"] != later["trainer_logprobs"]
    other = train(
        tiny(VLM), prompts, tmp_path / "other", "--use_kl_loss", f"--ref_load={tiny(VLM)}"
    )
    assert records(other)[0]["kl"] == 0
    assert records(other)[2]["kl"] > 0


def test_prompts_of_one_text_and_other_pictures_are_groups_of_their_own(tmp_path: Path) -> None:
    rows = write_prompts(tmp_path / "rows", [1, 1, 1], same_text=True)
    run = train(tiny(VLM), rows, tmp_path / "run", "--num_rollout=1")
    samples = rollouts(run, 1)
    groups: dict[str, list[Any]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    assert sorted(map(len, groups.values())) == [4, 4, 4]
    assert len({tuple(s.prompt_ids) for s in samples}) == 1
    names = [{s.conversation.images[0].value for s in group} for group in groups.values()]
    assert all(len(one) == 1 for one in names)
    assert len(set().union(*names)) == 3
    for group in groups.values():
        assert sum(s.metadata["advantage"] for s in group) == pytest.approx(0, abs=1e-4)


def test_held_out_prompts_are_asked_before_and_after(prompts: Path, tmp_path: Path) -> None:
    more = (f"--eval_prompt_data=first,{prompts},second,{prompts}", "--n_samples_per_eval_prompt=2")
    run = train(tiny(VLM), prompts, tmp_path / "run", *more, "--eval_interval=2")
    made = evaluations(run)
    assert [r["step"] for r in made] == [0, 2, 3]
    assert made[0]["eval_samples"] == 28
    assert made[0]["eval_reward/first"] == made[0]["eval_reward/second"]  # the same seeds
    assert made[0]["eval_reward"] != made[1]["eval_reward"]


def test_names_of_held_out_files() -> None:
    assert eval_files(None) == {}
    assert eval_files(["aime", "a/b.jsonl", "c.parquet"]) == {"aime": "a/b.jsonl", "c": "c.parquet"}
    with pytest.raises(InputError, match="aime has no file"):
        eval_files(["a.jsonl", "aime"])
    with pytest.raises(InputError, match="two files are called a"):
        eval_files(["x/a.jsonl", "y/a.jsonl"])


# -- what goes wrong ------------------------------------------------------------------------------


def test_a_step_without_any_advantage_moves_nothing(prompts: Path, tmp_path: Path) -> None:
    run = train(
        tiny(VLM), prompts, tmp_path / "run", "--reward=tests.rl:none", "--weight_decay=0.1"
    )
    for record in records(run):
        assert record["skipped_updates"] == 1
        assert record["groups/all_wrong"] == 1
        assert "loss" not in record
    out = export(checkpoints(run / "checkpoints")[-1], tmp_path / "out", dtype="fp32")
    before, after = (load_file(Path(f) / "model.safetensors") for f in (tiny(VLM), out))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_groups_that_are_all_filtered_out_stop_the_run(prompts: Path, tmp_path: Path) -> None:
    more = ("--reward=tests.rl:none", "--dynamic_sampling_filter=mixed_rewards")
    with pytest.raises(EngineError, match=r"dropped \d+ groups in a row.*all wrong"):
        train(tiny(VLM), prompts, tmp_path / "run", *more)


def test_a_prompt_that_is_too_long_is_an_error_or_left_out(tmp_path: Path) -> None:
    rows = write_prompts(tmp_path / "rows", [0, 0, 0, 3, 0, 0])
    with pytest.raises(RowError, match=r"prompts\.jsonl row 3.*at most 40.*--max_prompt_len"):
        train(tiny(VLM), rows, tmp_path / "one", "--max_prompt_len=40", "--num_rollout=4")
    more = ("--max_prompt_len=40", "--num_rollout=4", "--on_bad_row=skip")
    run = train(tiny(VLM), rows, tmp_path / "two", *more)
    assert records(run)[-1]["refused_prompts"] == 2  # once an epoch
    assert all(not s.conversation.images for step in (1, 2, 3, 4) for s in rollouts(run, step))
    assert "skipped" in (run / "log.txt").read_text()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (("--n_samples_per_prompt=1",), "compares the responses"),
        (("--num_steps_per_rollout=5",), "12 samples of a rollout cannot be dealt"),
        (("--global_batch_size=5",), "must make up the 12 samples"),
        (("--rollout_max_response_len=9999",), "leaves no room for a prompt"),
        (("--eval_file=x.json",), "reads --prompt_data and --eval_prompt_data"),
        (("--reward=exact_mach",), "did you mean exact_match"),
        (("--dynamic_sampling_filter=mixd",), "unknown filter 'mixd'"),
    ],
)
def test_a_wrong_setting_is_one_line(
    more: tuple[str, ...], text: str, prompts: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=text):
        train(tiny(VLM), prompts, tmp_path / "run", *more)


def test_the_published_flags(prompts: Path, tmp_path: Path) -> None:
    words = [
        *("--hf-checkpoint", tiny(VLM), "--prompt-data", str(prompts), "--input-key", "messages"),
        *("--apply-chat-template", "--rm-type", "tests.rl:even", "--num-rollout", "2"),
        *("--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--rollout-temperature", "1"),
        *("--rollout-max-response-len", "5", "--rollout-top-p", "1", "--global-batch-size", "8"),
        *("--num-steps-per-rollout", "1", "--use-dynamic-batch-size"),
        *("--max-tokens-per-gpu", "600", "--advantage-estimator", "grpo", "--eps-clip", "0.2"),
        *(
            "--eps-clip-high",
            "0.28",
            "--eps-clip-c",
            "3",
            "--use-kl-loss",
            "--kl-loss-coef",
            "0.01",
        ),
        *("--kl-loss-type", "low_var_kl", "--entropy-coef", "0.01", "--use-tis", "--tis-clip", "2"),
        *("--over-sampling-batch-size", "3", "--partial-rollout", "--eval-interval", "1"),
        *("--dynamic-sampling-filter", "mixed_rewards", "--n-samples-per-eval-prompt", "1"),
        *("--eval-prompt-data", "all", str(prompts), "--ref-load", tiny(VLM)),
        *("--save", str(tmp_path / "saves"), "--load", str(tmp_path / "saves")),
        *("--save-interval", "1", "--output_dir", str(tmp_path / "run"), "--lr", "1e-3"),
    ]
    done = vireo("train", *words)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in checkpoints(tmp_path / "saves")] == ["step-1", "step-2"]
    assert {"tis/mean", "kl", "entropy", "clip/dual"} <= records(tmp_path / "run")[0].keys()


@pytest.mark.slow
def test_the_demo_learns_from_rewards(tmp_path: Path) -> None:
    found = demo_rl.run(str(tmp_path / "demo"), num_rollout=60)
    assert 0.2 <= found["reward_before"] <= 0.45
    assert found["reward_after"] >= 1.3 * found["reward_before"]
    assert (tmp_path / "demo" / "export" / "model.safetensors").exists()
