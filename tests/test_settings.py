"""Settings: one strict tree, and errors that name the setting as the person wrote it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from vireo.errors import InputError
from vireo.settings import Settings, describe, load_settings
from vireo.settings.flags import BY_NAME, FLAGS, Flag
from vireo.settings.schema import RL_SECTIONS

ROOT = Path(__file__).parents[1]
MODEL = ["--vlm_model_name_or_path", "m"]
TOKENS = [*MODEL, "--max_tokens_per_gpu", "9"]
HYBRID = [*MODEL, "--fsdp_sharding=hybrid"]


def load(*argv: str) -> Settings:
    return load_settings([*MODEL, *argv])


def refused(*argv: str) -> str:
    with pytest.raises(InputError) as caught:
        load_settings(list(argv))
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a settings file into the working folder, so that error texts hold a short path."""
    monkeypatch.chdir(tmp_path)

    def _write(text: str, name: str = "run.yaml") -> str:
        Path(name).write_text(text, encoding="utf-8")
        return name

    return _write


def test_flag_names_are_frozen():
    golden = (ROOT / "tests/golden/flags.txt").read_text().split()
    assert sorted(BY_NAME) == golden, "published commands use these names: add, never rename"


def test_no_two_settings_share_a_name():
    assert len(BY_NAME) == sum(len({*flag.names, flag.dotted}) for flag in FLAGS.values())


def test_every_setting_has_a_meaning():
    assert [flag.dotted for flag in FLAGS.values() if not flag.meaning.endswith(".")] == []


def test_the_table_shows_every_setting_and_the_docs_show_the_table():
    table = describe("grpo")
    for flag in FLAGS.values():
        assert f"--{flag.names[0]} " in table
        assert f" {flag.dotted} " in table
        assert flag.meaning in table
    assert table in (ROOT / "docs/settings.md").read_text(), "paste `vireo settings` into it"


def test_the_table_of_a_trainer_without_rollouts_shows_nothing_of_them():
    table = describe("fsdp_vlm")
    for flag in FLAGS.values():
        shown = f" {flag.dotted} " in table
        assert shown == (flag.dotted.split(".")[0] not in RL_SECTIONS)


def test_settings_of_rollouts_mean_grpo_with_its_own_defaults(write):
    settings = load("--eps_clip", "0.3")
    assert (settings.trainer, settings.optim.lr, settings.optim.warmup_ratio) == ("grpo", 1e-6, 0)
    assert load("--eps_clip", "0.3", "--lr", "1e-4").optim.lr == 1e-4
    file = write("algo: {eps_clip: 0.3}\noptim: {lr: 0.5}\n")
    assert load("--config", file).optim.lr == 0.5
    assert load("--config", file).optim.lr_scheduler == "constant"
    text = refused("--model_name_or_path=m", "--trainer", "fsdp", "--eps-clip", "0.3")
    assert text == "--eps-clip is for --trainer grpo, found fsdp"


def test_ahead_is_another_default_of_trainers_with_rollouts():
    def staleness(*argv: str) -> int:
        argv = ("--model_name_or_path=m", *argv)
        return load_settings(list(argv), ahead=True).rollout.max_staleness

    assert staleness("--trainer=grpo") == 1
    assert staleness("--reward=exact_match") == 1
    assert staleness("--trainer=grpo", "--max_staleness=0") == 0
    assert staleness() == 0  # of the default trainer, which has none


def test_settings_of_a_server_pass_through(write):
    words = ("--engine", "sglang", "--sglang-log-level", "error", "--sglang_enable-x")
    engine = load(*words).engine
    assert engine.server_args == {"sglang-log-level": "error", "sglang-enable-x": ""}
    path = write(load(*words).to_yaml())
    assert load_settings(["--config", path]) == load(*words)
    text = refused("--model_name_or_path=m", "--engine=vllm", "--sglang-log-level", "error")
    assert text == "--sglang-log-level is for another engine than vllm"


def test_keys_of_engines_are_written_nowhere():
    settings = load("--engine=sglang", "--engine_api_key=secret-1", "--engine_admin_key=s")
    assert settings.engine.engine_api_key == "secret-1"
    assert "secret" not in settings.to_yaml()
    assert "secret" not in str(settings.model_dump(mode="json"))


def test_a_list_may_be_several_words():
    data = load("--eval-prompt-data", "aime", "a.jsonl", "--reward", "math").prompts
    assert data.eval_prompt_data == ["aime", "a.jsonl"]


def test_defaults():
    settings = load()
    assert settings.trainer == "fsdp_vlm"
    assert settings.optim.lr == 1e-5
    assert settings.data.validate_rows == "lazy"
    assert settings.fsdp.enable
    assert settings.fsdp.auto_wrap_cls is None


def test_two_settings_share_no_section():
    first, second = load(), load()
    first.optim.lr = 1.0
    assert second.optim.lr == 1e-5


@pytest.mark.parametrize(
    "argv",
    [
        ["--max_new_tokens", "9"],
        ["--max-new-tokens", "9"],
        ["--max_new-tokens=9"],
        ["--run.max_new_tokens", "9"],
        ["--run.max-new-tokens=9"],
        ["--max_new_tokens", "8", "--max-new-tokens", "9"],  # said again, as scripts do: replaced
    ],
)
def test_all_spellings_of_a_flag(argv):
    assert load(*argv).run.max_new_tokens == 9


@pytest.mark.parametrize("name", ["model_name_or_path", "model.vlm-model-name-or-path"])
def test_the_model_has_a_short_name_too(name):
    assert load_settings([f"--{name}", "m"]).model.vlm_model_name_or_path == "m"


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--streaming"], True),
        (["--streaming", "true"], True),
        (["--streaming=false"], False),
        (["--streaming", "--seed", "1"], True),
    ],
)
def test_booleans_are_bare_or_valued(argv, value):
    assert load(*argv).data.streaming is value


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--grad_ckpt"], "full"),
        (["--grad_ckpt", "true"], "full"),
        (["--grad_ckpt=false"], "none"),
        (["--grad_ckpt", "--seed", "1"], "full"),
        (["--grad_ckpt", "every-3"], "every-3"),
        (["--grad-ckpt=auto", "--max_tokens_per_gpu=9", "--global_batch_size=1"], "auto"),
    ],
)
def test_recomputation_is_a_switch_or_says_how_much(argv, value):
    assert load(*argv).fsdp.grad_ckpt == value


@pytest.mark.parametrize("value", ["every", "every-0", "some", "2"])
def test_recomputation_that_is_neither_is_refused(value):
    with pytest.raises(InputError, match=f"--grad_ckpt: found '{value}'"):
        load(f"--grad_ckpt={value}")


def test_lists_are_joined_by_commas():
    settings = load("--fsdp_auto_wrap_cls", "A, B", "--lora_target_modules=q_proj")
    assert settings.fsdp.auto_wrap_cls == ["A", "B"]
    assert settings.lora.target_modules == ["q_proj"]


def test_a_value_may_hold_an_equals_sign_or_start_with_a_dash():
    assert load("--output_dir", "a=b").run.output_dir == "a=b"
    assert load("--output_dir=a=b").run.output_dir == "a=b"
    assert load("--output_dir=--x").run.output_dir == "--x"
    assert refused(*MODEL, "--seed", "-1") == "--seed: found '-1', expected whole number >= 0"


def test_yaml_and_toml_with_sections_flat_names_and_dashes(write):
    yaml = (
        "lr: 1e-4\nbatch:\n  grad-accum-steps: 3\nfsdp.sharding: hybrid\ndata: {validate: full}\n"
    )
    toml = (
        'lr = 1e-4\nbatch.grad-accum-steps = 3\n"fsdp.sharding" = "hybrid"\n'
        '[data]\nvalidate = "full"\n'
    )
    first = load("--config", write(yaml))
    assert first == load("--config", write(toml, "run.toml"))
    assert first.optim.lr == 1e-4
    assert first.batch.grad_accum_steps == 3
    assert first.fsdp.sharding == "hybrid"
    assert first.data.validate_rows == "full"


def test_flags_beat_the_file_whatever_the_spelling_and_order(write):
    path = write("optim: {lr: 1, max_steps: 5}\nmodel: {vlm_model_name_or_path: from-file}\n")
    settings = load_settings(["--lr", "2", "--config", path, "--max_steps", "none"])
    assert settings.optim.lr == 2
    assert settings.optim.max_steps is None
    assert settings.model.vlm_model_name_or_path == "from-file"


def test_an_empty_file_and_an_empty_section_say_nothing(write):
    assert load("--config", write("")) == load()
    assert load("--config", write("optim:\n")) == load()


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "--vlm_model_name_or_path is missing: "),
        (["--lrr", "1"], "unknown flag --lrr; did you mean --lr?"),
        (["--optim.lrr=1"], "unknown flag --optim.lrr; did you mean --optim.lr?"),
        (["--max_step", "3"], "unknown flag --max_step; did you mean --max_steps?"),
        (["--model", "m"], "unknown flag --model; did you mean --model_name_or_path?"),
        (["--qqqqqqqq"], "unknown flag --qqqqqqqq; `vireo settings` lists them all"),
        (["lr", "1"], "unexpected 'lr': a flag starts with --"),
        (["-lr", "1"], "unexpected '-lr': a flag starts with --"),
        (["--lora_r", "4", "B"], "unexpected 'B': a flag starts with --"),
        (["--lr"], "--lr needs a value: number >= 0"),
        (["--lr", "--seed", "1"], "--lr needs a value: number >= 0"),
        (["--config"], "--config needs a value: a file"),
        (["--lr", "1", "--optim.lr", "1"], "--lr and --optim.lr are the same setting"),
        (["--model_name_or_path", "a", *MODEL], "are the same setting; leave one out"),
        (["--config", "a.yaml", "--config", "b.yaml"], "--config is given twice"),
        (["--config", "gone.yaml"], "--config gone.yaml: No such file"),
        (["--config", "run.json"], "expected a .yaml, .yml or .toml file"),
        ([*MODEL, "--lr", "x"], "--lr: found 'x', expected number >= 0"),
        ([*MODEL, "--lr", "nan"], "--lr: found 'nan', expected number >= 0"),
        ([*MODEL, "--optim.lr", "-1"], "--optim.lr: found '-1', expected number >= 0"),
        ([*MODEL, "--warmup-ratio=2"], "--warmup-ratio: found '2', expected number >= 0 and <= 1"),
        ([*MODEL, "--max_steps", "0"], "--max_steps: found '0', expected whole number >= 1"),
        ([*MODEL, "--max_steps", "1.5"], "--max_steps: found '1.5', expected whole number >= 1"),
        ([*MODEL, "--seed", "none"], "--seed: found 'none', expected whole number >= 0"),
        ([*MODEL, "--shuffle", "maybe"], "--shuffle: found 'maybe', expected true or false"),
        ([*MODEL, "--validate", "half"], "--validate: found 'half', expected lazy|full"),
        ([*MODEL, "--fsdp_auto_wrap_cls", "A,"], "--fsdp_auto_wrap_cls: found '', expected names"),
        ([*MODEL, "--train_file", ""], "--train_file: found '', expected names A,B"),
        ([*MODEL, "--eval_file", ""], "--eval_file: found '', expected text"),
        ([*MODEL, "--train_weights", "1,0"], "--train_weights: found '0', expected numbers A,B"),
        (
            [*MODEL, "--train_file=a,b", "--train_weights=1"],
            "--train_weights has 1 number for 2 files of --train_file",
        ),
        (
            [*TOKENS, "--batch.per-device-train-batch-size", "1"],
            "--batch.per-device-train-batch-size and --max_tokens_per_gpu exclude each other",
        ),
        (TOKENS, "--max_tokens_per_gpu needs --global_batch_size"),
        ([*HYBRID, "--fsdp_enable=false"], "--fsdp_sharding hybrid needs --fsdp_enable true"),
    ],
)
def test_a_wrong_flag_is_named_as_written(argv, text):
    assert text in refused(*argv)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim: {lrr: 1}", "unknown key optim.lrr (run.yaml); did you mean optim.lr?"),
        ("lrr: 1", "unknown key lrr (run.yaml); did you mean lr?"),
        ("config: other.yaml", "unknown key config (run.yaml)"),
        ("optim: {lr: x}", "optim.lr (run.yaml): found 'x', expected number >= 0"),
        ("optim: {lr: }", "optim.lr (run.yaml): found None, expected number >= 0"),
        ("optim: {max-steps: true}", "optim.max-steps (run.yaml): found True, expected whole"),
        ("run: {output_dir: 3}", "run.output_dir (run.yaml): found 3, expected text"),
        ("fsdp_auto_wrap_cls: [A, 3]", "fsdp_auto_wrap_cls (run.yaml): found 3, expected names"),
        ("optim: 3", "optim (run.yaml): found 3, expected a section of keys"),
        ("lr: 1\noptim: {lr: 1}", "lr (run.yaml) and optim.lr (run.yaml) are the same setting"),
        (
            "grad-ckpt: 1\ngrad_ckpt: 1",
            "grad-ckpt (run.yaml) and grad_ckpt (run.yaml) are the same",
        ),
        ("lr: 1\nlr: 2", "--config run.yaml, line 2, column 1: the key lr is given twice"),
        ("lr: [1", "--config run.yaml, line 1, column "),
        ("- lr", "--config run.yaml: expected `name: value` lines, found ['lr']"),
        ("max_tokens_per_gpu: 9", "max_tokens_per_gpu (run.yaml) needs --global_batch_size"),
        ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(write, text, message):
    assert message in refused(*MODEL, "--config", write(text))


def test_a_file_that_is_not_text_or_not_toml_is_refused(write, tmp_path):
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\xfa")
    assert "bad.yaml" in refused("--config", "bad.yaml")
    assert "--config bad.toml: " in refused("--config", write("lr = ", "bad.toml"))


def _values(flag: Flag) -> st.SearchStrategy[Any]:
    text = st.text(min_size=1, max_size=8)
    kind = flag.type.partition(" ")[0]
    if flag.is_bool:
        values: st.SearchStrategy[Any] = st.booleans()
    elif "|" in kind or kind in ("ray", "fsdp"):  # one choice among one
        values = st.sampled_from(kind.split("|"))
    else:
        values = {
            "whole": st.integers(1, 10**6),
            "number": st.floats(0, 1, exclude_min=True, exclude_max=True),
            "text": text | st.sampled_from(["none", "null", "true", "1e-5", "12", "2026-01-01"]),
            "names": st.lists(text, min_size=1, max_size=3),
            "numbers": st.lists(st.floats(0, 4, exclude_min=True), min_size=1, max_size=3),
        }[kind]
    return values | st.none() if flag.optional else values


@st.composite
def _trees(draw) -> dict[str, Any]:
    tree: dict[str, Any] = {"model": {"vlm_model_name_or_path": "m"}}
    for dotted in draw(st.sets(st.sampled_from(sorted(FLAGS)))):
        section, _, key = dotted.rpartition(".")
        values = tree.setdefault(section, {}) if section else tree
        values[key] = draw(_values(FLAGS[dotted]))
    batch, fsdp = tree.get("batch", {}), tree.get("fsdp", {})
    if batch.get("max_tokens_per_gpu"):
        batch |= {"per_device_train_batch_size": None, "global_batch_size": 4}
    if "use_dynamic_batch_size" in batch:
        batch["use_dynamic_batch_size"] = bool(batch.get("max_tokens_per_gpu"))
    if weights := tree.get("data", {}).get("train_weights"):
        tree["data"]["train_file"] = [f"f{i}" for i in range(len(weights))]
    if fsdp.get("sharding") == "hybrid":
        fsdp["enable"] = True
    cluster = tree.get("cluster", {})
    if set(tree) & set(RL_SECTIONS) or {"colocate", "rollout_num_gpus"} & set(cluster):
        tree["trainer"] = "grpo"
    if cluster.get("actor_num_nodes"):
        cluster["actor_num_gpus_per_node"] = 2
    rollout, algo = tree.get("rollout", {}), tree.get("algo", {})
    if rollout.get("over_sampling_batch_size"):
        rollout["rollout_batch_size"] = 1
    if rollout.get("partial_rollout"):
        rollout |= {"rollout_batch_size": 1, "over_sampling_batch_size": 2}
    if rollout.get("debug_rollout_only"):
        rollout["debug_train_only"] = None
    if algo.get("kl_loss_coef"):
        algo["use_kl_loss"] = True
    if "tis_clip_low" in algo:
        algo["tis_clip"] = 2 * algo["tis_clip_low"] + 1
    if algo.get("eps_clip_c"):
        algo["eps_clip_c"] += 1.5
    for name in ("engine_api_key", "engine_admin_key"):  # which are written nowhere
        tree.get("engine", {}).pop(name, None)
    return tree


@given(tree=_trees())
@hypothesis_settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_what_is_written_reads_back_equal(tmp_path, tree):
    settings = Settings.model_validate(tree)
    path = tmp_path / "resolved.yaml"
    path.write_text(settings.to_yaml(), encoding="utf-8")
    assert load_settings(["--config", str(path)]) == settings
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_settings_import_neither_torch_nor_transformers():
    code = (
        "import sys, vireo.settings, vireo.train, vireo.trainers.registry\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("flags", "engine"),
    [
        ("", "embedded"),
        ("--actor-num-gpus-per-node 2", "sglang"),
        ("--launcher ray", "sglang"),
        ("--actor-num-gpus-per-node 2 --sglang-mem-fraction-static 0.5", "sglang"),
        ("--actor-num-gpus-per-node 2 --vllm-max-model-len 512", "vllm"),
        ("--actor-num-gpus-per-node 2 --vllm_url http://127.0.0.1:1", "vllm"),
        ("--actor-num-gpus-per-node 2 --engine serve", "serve"),
    ],
)
def test_the_engine_of_a_run_that_ray_places_is_a_server(flags: str, engine: str) -> None:
    given = [
        "--trainer",
        "grpo",
        "--hf-checkpoint",
        "m",
        "--prompt-data",
        "p.jsonl",
        "--rm-type",
        "math",
    ]
    assert load_settings([*given, *flags.split()]).engine.engine == engine


def test_fine_tuning_that_ray_places_has_no_engine() -> None:
    given = ["--vlm_model_name_or_path=m", "--train_file=t.json", "--actor_num_gpus_per_node=2"]
    assert "engine" not in load_settings(given).engine.model_fields_set
