"""Runs that Ray places: what is planned, what is started, and that nothing is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch import ROOT, environment
from tests.rl import flags, records, train, write_prompts
from tests.rows import losses, write_rows
from tests.tiny_models import tiny
from vireo.cluster.host import Host
from vireo.cluster.plan import Node, check_room, plan_of
from vireo.cluster.run import run as place
from vireo.errors import InputError
from vireo.settings import load_settings

GRPO = "--trainer grpo --model_name_or_path m --prompt_data p.jsonl --reward exact_match"


def planned(more: str):
    return plan_of(load_settings([*GRPO.split(), *more.split()]))


# -- the plan ------------------------------------------------------------------------------------


def test_published_apart() -> None:
    plan = planned("--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4")
    assert (plan.trainers, plan.engines, plan.per_engine) == (4, 4, 1)
    assert plan.bundles == [4, 1, 1, 1, 1]
    assert [plan.place_of(i) for i in range(4)] == [(1, 0), (2, 0), (3, 0), (4, 0)]
    assert plan.notes == ()


def test_published_colocated() -> None:
    plan = planned("--actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 2")
    assert (plan.trainers, plan.engines, plan.bundles) == (8, 4, [8])
    assert [plan.place_of(i) for i in range(4)] == [(0, 0), (0, 2), (0, 4), (0, 6)]


def test_colocated_on_two_machines() -> None:
    plan = planned("--actor-num-nodes 2 --actor-num-gpus-per-node 2 --colocate")
    assert [plan.place_of(i) for i in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_colocate_says_that_rollout_num_gpus_is_ignored() -> None:
    plan = planned("--actor-num-gpus-per-node 2 --colocate --rollout-num-gpus 7")
    assert plan.engines == 2
    assert "--rollout_num_gpus has no effect with --colocate" in plan.notes[0]


@pytest.mark.parametrize(
    "more",
    ["--engine embedded", "--engine sglang --sglang_url http://h:1", "--vllm_url http://h:1"],
)
def test_no_engine_is_started_where_none_is_needed(more: str) -> None:
    assert planned(f"--actor-num-gpus-per-node 2 {more}").bundles == [2]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", "does not divide the 3"),
        ("--colocate --rollout-num-gpus-per-engine 3", "does not divide the 2"),
        ("--engine embedded --rollout-num-gpus 2", "--engine embedded is none of them"),
        ("--vllm_url http://h:1 --rollout-num-gpus 2", "servers are given by URL"),
    ],
)
def test_numbers_that_do_not_go_together(more: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        planned(f"--actor-num-gpus-per-node 2 {more}")


def test_a_cluster_too_small_says_what_is_there_and_what_is_asked() -> None:
    plan = planned("--actor-num-gpus-per-node 4 --rollout-num-gpus 4")
    check_room(plan, [Node("a", 8)])
    check_room(plan, [Node("a", 4), Node("b", 4)])
    with pytest.raises(InputError) as caught:
        check_room(plan, [Node("a", 3), Node("b", 5)][:1])
    says = str(caught.value)
    assert "4 GPU(s) of trainers (1 x 4) and 4 of engines (4 x 1)" in says
    assert "a: 3" in says
    # Trainers of one machine do not fit across two, though the sum would do.
    with pytest.raises(InputError, match="too small"):
        check_room(plan, [Node("a", 3), Node("b", 3), Node("c", 3)])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--trainer fsdp_vlm --train_file t.json --colocate", "--colocate is for --trainer grpo"),
        ("--trainer fsdp_vlm --train_file t.json --rollout-num-gpus 2", "is for --trainer grpo"),
        ("--actor-num-nodes 2", "needs --actor_num_gpus_per_node"),
    ],
)
def test_settings_that_are_refused(more: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        load_settings(["--model_name_or_path", "m", *more.split()])


def test_placement_alone_means_grpo_and_by_ray() -> None:
    settings = load_settings(["--model_name_or_path", "m", "--rollout-num-gpus", "2", "--colocate"])
    assert settings.trainer == "grpo"
    assert not settings.cluster.by_ray
    settings = load_settings(["--model_name_or_path", "m", "--actor-num-gpus-per-node", "2"])
    assert settings.trainer == "fsdp_vlm"
    assert settings.cluster.by_ray
    full = load_settings(
        ["--model_name_or_path", "m", "--fsdp-full-params", "--train-backend", "fsdp"]
    )
    assert full.fsdp.checkpoint == "full"


# -- the processes of a machine ------------------------------------------------------------------


@pytest.fixture
def host():
    made = Host(["5", "7"], "127.0.0.1")
    yield made
    made.close()


def until(true, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "not within the time limit"
        time.sleep(0.05)


def python(code: str) -> list[str]:
    return ["python", "-u", "-c", code]


def test_a_child_sees_its_gpus_and_is_heard(host: Host) -> None:
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['A'], 'the key k1')"
    host.start("one", python(code), {"A": "b"}, gpus=(1, 1), secrets=("k1",))
    host.start("all", python(code), {"A": "c"})
    until(lambda: all(code is not None for code, _ in _codes(host)))
    assert host.last_words("one") == "7 b the key ***"
    assert host.last_words("all") == "5,7 c the key k1"


def _codes(host: Host):
    return list(host.look().values())


def test_what_was_said_is_told_once(host: Host) -> None:
    host.start("one", python("print('hello'); import time; time.sleep(60)"), {})
    heard = []
    until(lambda: heard.append(host.look()["one"]) or heard[-1][1])
    assert heard[-1] == (None, "hello\n")
    assert host.look()["one"] == (None, "")


def test_a_child_has_its_grace_which_a_second_word_ends(host: Host) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, lambda *_: print('not yet'));"
        "print('up')\nwhile True: time.sleep(0.1)"
    )
    host.start("deaf", python(deaf), {}, grace=1000)
    until(lambda: "up" in host.last_words("deaf"))
    host.tell_to_stop("deaf")
    until(lambda: "not yet" in host.last_words("deaf"))
    assert host.look()["deaf"][0] is None
    host.tell_to_stop("deaf")
    until(lambda: host.look()["deaf"][0] is not None)
    assert host.look()["deaf"][0] == 128 + signal.SIGKILL


def test_a_file_for_a_child_is_this_users_alone(host: Host) -> None:
    path = host.keep("settings.yaml", "a: 1\n")
    assert Path(path).read_text() == "a: 1\n"
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_children_end_with_a_host_that_is_killed_and_with_a_watch_that_is(tmp_path: Path) -> None:
    """Ray kills the children of a worker that it ends: the process that watches, here."""
    code = (
        "import sys, time; from vireo.cluster.host import Host; h = Host([], '127.0.0.1');"
        "h.start('c', ['python', '-u', '-c', 'import os, time; print(os.getpid());"
        " time.sleep(600)'], {});\n"
        "while not h.last_words('c'): time.sleep(0.05)\n"
        "print(h.children['c'].process.pid, h.last_words('c'), flush=True); time.sleep(600)"
    )
    for whom in ("host", "watch"):
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(),
        )
        assert process.stdout is not None
        watch, child = map(int, process.stdout.readline().split())
        os.kill(process.pid if whom == "host" else watch, signal.SIGKILL)
        until(lambda child=child: not _lives(child))
        process.kill()
        process.wait()
        process.stdout.close()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# -- whole runs ----------------------------------------------------------------------------------


def by_ray(model: str, prompts: Path, output: Path, *more: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("ray")
    words = flags(model, prompts, output, "--num_rollout=2", *more)
    return subprocess.run(
        [sys.executable, "-m", "vireo.train", *words],
        cwd=ROOT,
        env=environment() | {"RAY_ADDRESS": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_one_trainer_beside_one_engine_is_the_single_process_run(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "data", [0, 1, 2, 0, 1, 0])
    model = tiny("qwen2_5_vl")
    more = ("--actor_num_gpus_per_node=1", "--engine=serve")
    done = by_ray(model, prompts, tmp_path / "ray", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 engine(s) answer: http://127.0.0.1:" in done.stdout
    train(model, prompts, tmp_path / "alone", "--num_rollout=2")
    for one, other in zip(records(tmp_path / "ray"), records(tmp_path / "alone"), strict=True):
        assert one["reward"] == other["reward"]
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
        assert one["mismatch/token_mult_prob_error"] - 1 <= 2e-5


WAYS = [
    ("qwen2_5_vl", "--weight_sync=group"),
    ("qwen3", "--weight_sync=disk"),
    ("qwen2_5_vl", "--colocate"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "way"), WAYS)
def test_two_trainers_and_two_engines(family: str, way: str, tmp_path: Path) -> None:
    vision = family != "qwen3"
    prompts = write_prompts(tmp_path / "data", [0, vision, 2 * vision, 0, vision, 0])
    more = ("--actor_num_gpus_per_node=2", "--engine=serve", "--rollout_batch_size=4", way)
    done = by_ray(tiny(family), prompts, tmp_path / "ray", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 engine(s) answer" in done.stdout
    train(tiny(family), prompts, tmp_path / "alone", "--num_rollout=2", "--rollout_batch_size=4")
    for one, other in zip(records(tmp_path / "ray"), records(tmp_path / "alone"), strict=True):
        assert one["reward"] == pytest.approx(other["reward"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_fine_tuning_through_ray_is_that_of_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    data = write_rows(tmp_path / "data", [1, 0, 2, 1, 0, 0, 1, 3])
    words = f"""--trainer fsdp_vlm --vlm_model_name_or_path {tiny("qwen2_5_vl")}
        --train_file {data} --max_steps 3 --per_device_train_batch_size 2 --report_to none
        --freeze_vision false --lr 1e-3 --check_steps 0""".split()
    starts = {
        "ray": ["-m", "vireo.train", "--launcher=ray", "--actor_num_gpus_per_node=2"],
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"],
    }
    for name, start in starts.items():
        more = ["-m", "vireo.train"] if name == "torchrun" else []
        done = subprocess.run(
            [sys.executable, *start, *more, *words, "--output_dir", str(tmp_path / name)],
            cwd=ROOT,
            env=environment() | {"RAY_ADDRESS": ""},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path / "ray") == losses(tmp_path / "torchrun")


def test_a_wrong_reward_is_said_before_anything_starts(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "data", [0])
    more = ("--actor_num_gpus_per_node=1", "--engine=serve", "--reward=last_intger")
    words = flags(tiny("qwen2_5_vl"), prompts, tmp_path / "run", *more)
    pytest.importorskip("ray")
    with pytest.raises(InputError, match="did you mean last_integer"):
        place(load_settings(words))


@pytest.mark.slow
def test_an_engine_that_never_answers_ends_the_run_in_time(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "data", [0, 1])
    more = ("--actor_num_gpus_per_node=1", "--engine=serve", "--engine_start_timeout=0.1")
    done = by_ray(tiny("qwen2_5_vl"), prompts, tmp_path / "ray", *more)
    assert done.returncode == 1
    assert "engine 0 does not answer after --engine_start_timeout 0.1 s" in done.stderr


def test_a_wrong_address_is_said_at_once(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "data", [0])
    more = ("--actor_num_gpus_per_node=1", "--engine=serve", "--ray_address=127.0.0.1:1")
    done = by_ray(tiny("qwen2_5_vl"), prompts, tmp_path / "ray", *more)
    assert done.returncode == 2
    assert "no Ray cluster answers at 127.0.0.1:1" in done.stderr


def test_the_published_colocated_script_is_there() -> None:
    script = ROOT / "tests/test_qwen3-0.6B_fsdp_colocated_2xGPU.sh"
    done = subprocess.run(
        [str(script), "--actor-num-gpus-per-node", "many"],
        env=environment() | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "--actor-num-gpus-per-node" in done.stderr.replace("_", "-")
