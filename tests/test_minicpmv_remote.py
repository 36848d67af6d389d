"""MiniCPM-V 4.0 and 4.5, whose code is a part of the checkpoint, on a stand-in for it.

Not run on the real checkpoint: tests/minicpmv_stand_in.py says what the stand-in is.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModel

from tests import minicpmv_stand_in
from tests.launch import torchrun
from tests.minicpmv_stand_in import QUERIES, as_published
from tests.ranks.cases import examples_of, furthest, gradients
from tests.ranks.minicpmv import FROZEN, answers, compute, engine_for
from tests.rows import losses, write_rows
from tests.tiny_models import CAT, assistant, marked, noise, row, runs, tiny, user
from vireo import parallel as parallel_module
from vireo.cli import main
from vireo.data import model_folder
from vireo.data.conversation import read_rows
from vireo.data.nested import nest
from vireo.data.ragged import IGNORE, Batch, Example
from vireo.data.render import Renderer
from vireo.errors import InputError
from vireo.evaluation import answer_rows
from vireo.models.build import empty_policy, whole_model
from vireo.models.names import named_parameters
from vireo.models.policy import Policy
from vireo.settings import load_settings
from vireo.trainers import registry
from vireo.training.checkpoint import checkpoints
from vireo.training.export import export

torch.set_num_threads(1)
COUNTS = [1, 0, 2, 0, 3, 1]  # pictures of each row
SIZES = ((100, 60), (40, 30), (56, 140))  # 3, 1 and 4 slices
FILES = (
    "configuration_minicpm.py, image_processing_minicpmv.py, modeling_minicpmv.py, "
    "processing_minicpmv.py"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("minicpmv")
    minicpmv_stand_in.build(base / "model")
    write_rows(base / "data", COUNTS, SIZES)
    return base


@pytest.fixture(scope="module")
def made(base: Path) -> Renderer:
    return Renderer(str(base / "model"), trust_remote_code=True)


@pytest.fixture(scope="module")
def examples(base: Path, made: Renderer) -> list[Example]:
    return examples_of(made, base / "data" / "rows.json")


@pytest.fixture(scope="module")
def policy(base: Path, made: Renderer) -> Policy:
    hf = whole_model(made.config, made.family, str(base / "model"))
    return Policy(hf, made.family, made.dummy()).eval()


def padded(made: Renderer, examples: list[Example]) -> dict[str, torch.Tensor]:
    return Batch.of(examples).pad(made.pad_id)


# -- whose code is run ---------------------------------------------------------------------------


@pytest.fixture
def spied(base: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the model, each file of whose code leaves a trace where it is run; the trace."""
    trace = tmp_path / "trace"
    shutil.copytree(base / "model", tmp_path / "spied")
    for file in (tmp_path / "spied").glob("*.py"):
        file.write_text(file.read_text() + f"\nopen({str(trace)!r}, 'a').write(__name__)\n")
    return tmp_path / "spied", trace


@pytest.mark.parametrize("command", ["train", "preview", "doctor", "eval"])
def test_code_of_a_model_is_not_run_unasked(
    base: Path,
    spied: tuple[Path, Path],
    tmp_path: Path,
    command: str,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def asked(*_: Any) -> str:
        raise AssertionError("asked on the terminal")

    monkeypatch.setattr("builtins.input", asked)
    model, trace = spied
    rows = base / "data" / "rows.json"
    arguments = [f"--vlm_model_name_or_path={model}", f"--train_file={rows}"]
    if command == "eval":
        arguments = [f"--model={model}", f"--eval_file={rows}", "--limit=1", "--max_new_tokens=1"]
    if command == "train":
        arguments += [f"--output_dir={tmp_path / 'run'}", "--max_steps=1", "--report_to=none"]
    assert main([command, *arguments]) == 2
    said = capsys.readouterr().err
    assert f"this model brings its own code ({FILES})" in said
    assert "is run with --trust_remote_code only: read the code first" in said
    assert not trace.exists()
    assert main([command, *arguments, "--trust_remote_code"]) == 0
    assert trace.exists()


def test_code_of_a_checkpoint_is_not_run_unasked_by_an_export(
    base: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = str(checkpoints(trained / "checkpoints")[-1])
    assert main(["export", path, str(tmp_path / "out")]) == 2
    assert f"this model brings its own code ({FILES})" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["export", path, str(tmp_path / "out"), "--trust_remote_code"]) == 0


def test_code_in_another_place_is_named_as_it_is(spied: tuple[Path, Path]) -> None:
    model, _ = spied
    config = json.loads((model / "config.json").read_text())
    config["auto_map"]["AutoModel"] = "someone/else--modeling_other.Model"
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"processing_minicpmv\.py, someone/else--modeling_other"):
        Renderer(str(model))


def test_code_that_fails_is_named_with_the_version_of_transformers(
    spied: tuple[Path, Path],
) -> None:
    model, _ = spied
    (model / "configuration_minicpm.py").write_text("from transformers import WasThereOnce\n")
    what = f"its own code fails with transformers {transformers.__version__}: ImportError: cannot"
    with pytest.raises(InputError, match=what):
        Renderer(str(model), trust_remote_code=True)


def test_a_model_that_transformers_has_runs_no_code_of_its_folder(
    tmp_path: Path, spied: tuple[Path, Path]
) -> None:
    code, trace = spied
    shutil.copytree(tiny("qwen2_vl"), tmp_path / "model")
    shutil.copy(code / "configuration_minicpm.py", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_minicpm.MiniCPMVConfig"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    made = Renderer(str(tmp_path / "model"), trust_remote_code=True)
    assert made.family.name == "qwen2_vl"
    assert not trace.exists()


def test_there_is_no_tiny_one(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["tiny", "minicpmv", str(tmp_path / "tiny")]) == 2
    assert "minicpmv has no tiny checkpoint: its code is" in capsys.readouterr().err
    assert not (tmp_path / "tiny").exists()


# -- rows ----------------------------------------------------------------------------------------


def test_the_golden_string_carries_loss_on_answers_alone(made: Renderer) -> None:
    slice_ = "<unk>" * QUERIES
    example = made.example(row(*CAT, images=[noise(100, 60)]))
    assert marked(made, example) == (
        f"<|im_start|>user\n<image_id>0</image_id><image>{slice_}</image>"
        f"<slice>{slice_}</slice><slice>{slice_}</slice>\nWhat is it?<|im_end|>\n"
        "<|im_start|>assistant\n«A cat.<|im_end|>»\n"
        "<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\n«Yes.<|im_end|>»\n"
    )
    assert runs(made, example) == ["A cat.<|im_end|>", "Yes.<|im_end|>"]


@pytest.mark.parametrize("typed", ["(<image>./</image>)", "<unk>", "<slice><unk></slice>"])
def test_typed_control_tokens_stay_text(made: Renderer, typed: str) -> None:
    turns = user(0, f"what is {typed}?"), assistant(f"it is {typed}.")
    example = made.example(row(*turns, images=[noise(40, 30)]))
    assert f"\nwhat is {typed}?<|im_end|>" in marked(made, example)
    assert runs(made, example) == [f"it is {typed}.<|im_end|>"]
    unk = made.tokenizer.convert_tokens_to_ids("<unk>")
    assert int((example.fields["input_ids"] == unk).sum()) == QUERIES
    nested = nest(padded(made, [example]))
    (start, end), *rest = nested["image_bound"][0].tolist()
    assert not rest
    assert example.fields["input_ids"][start:end].tolist() == [unk] * QUERIES


@pytest.mark.parametrize("left", [False, True])
def test_flat_and_nested_again_is_what_the_processor_makes(
    base: Path, made: Renderer, examples: list[Example], left: bool
) -> None:
    """Of all rows at once: with 0 to 3 pictures, padded on either side (it pads on the left)."""
    rows = read_rows(base / "data" / "rows.json")
    texts = [made.template.render(row.turns) for row in rows]
    processor = model_folder.load_processor(made.family, made.model_path, True)
    theirs = processor(texts, images=[made.pictures(row) for row in rows], return_tensors="pt")
    ours = nest(Batch.of(examples).pad(0, left=left))
    assert [len(row) for row in ours["pixel_values"]] == [3, 0, 1 + 4, 0, 3 + 1 + 4, 3]
    padding = (theirs["attention_mask"] == 0).sum(dim=1)
    for i in range(len(rows)):
        for mine, its in zip(ours["pixel_values"][i], theirs["pixel_values"][i], strict=True):
            assert torch.equal(mine, its)
        assert ours["tgt_sizes"][i].tolist() == [size.tolist() for size in theirs["tgt_sizes"][i]]
        bound = theirs["image_bound"][i] - (0 if left else padding[i])
        assert torch.equal(ours["image_bound"][i], bound)
        if left:
            assert torch.equal(ours["input_ids"][i], theirs["input_ids"][i].long())


def test_slices_without_their_places_are_an_error(made: Renderer, examples: list[Example]) -> None:
    inputs = padded(made, [examples[0]])
    with pytest.raises(ValueError, match="3 slices, and 2 places"):
        nest(inputs | {"image_bound": inputs["image_bound"].clamp(max=2)})


# -- the model -----------------------------------------------------------------------------------


def off_by_one(data: dict[str, Any]) -> None:
    data["image_bound"][0] = data["image_bound"][0] + 1


def pixels_dropped(data: dict[str, Any]) -> None:
    data["pixel_values"][0][0] = data["pixel_values"][0][0][..., :-14]


def slice_dropped(data: dict[str, Any]) -> None:
    del data["pixel_values"][0][0]


def sizes_of_another_row(data: dict[str, Any]) -> None:
    sizes = data["tgt_sizes"]
    sizes[0], sizes[1] = sizes[1], sizes[0]


def nothing_is_seen(data: dict[str, Any]) -> None:
    data["pixel_values"][0], data["tgt_sizes"][0] = [], data["tgt_sizes"][0][:0]
    data["image_bound"][0] = data["image_bound"][0][:0]


@pytest.mark.parametrize(
    "harm", [off_by_one, pixels_dropped, slice_dropped, sizes_of_another_row, nothing_is_seen]
)
def test_the_stand_in_refuses_what_does_not_fit_together(
    made: Renderer, policy: Policy, harm: Any
) -> None:
    """What the other tests rely on."""
    rows = [row(*CAT, images=[noise(*size)]) for size in ((40, 30), (56, 56))]
    data = nest(padded(made, [made.example(one) for one in rows]))
    data["position_ids"] = data["positions"][0]
    policy.hf(data)
    harm(data)
    with pytest.raises(ValueError, match="row 0: "):
        policy.hf(data)


def test_the_policy_computes_what_the_models_own_forward_does(
    made: Renderer, policy: Policy, examples: list[Example]
) -> None:
    inputs = padded(made, examples)
    data = nest(inputs) | {"position_ids": inputs["positions"][0]}
    with torch.no_grad():
        logits = policy.hf(data, attention_mask=inputs["attention_mask"], use_cache=False).logits
        found = policy(inputs)
    labels = inputs["labels"][:, 1:]
    every = logits[:, :-1].log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(found, every[labels != IGNORE], atol=1e-6, rtol=0)


def test_rows_padded_beside_others_have_the_values_they_have_alone(
    made: Renderer, policy: Policy, examples: list[Example]
) -> None:
    with torch.no_grad():
        together = policy(padded(made, examples))
        alone = torch.cat([policy(padded(made, [example])) for example in examples])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_gradients_do_not_depend_on_micro_batches(base: Path) -> None:
    engine, made = engine_for(base, parallel_module.start(shard=False))
    rows = examples_of(made, base / "data" / "rows.json")
    reference = gradients(engine, [Batch.of([row]) for row in rows])
    assert all(float(grad.abs().max()) > 0 for grad in reference.values())
    parameters = {name for name, _ in engine.policy.hf.named_parameters()}
    assert reference.keys() == parameters
    assert furthest(gradients(engine, [Batch.of(rows)]), reference) < 1e-5
    texts = [row for row in rows if not row.images]  # the blank picture is in the graph, as zeros
    found = gradients(engine, [Batch.of(texts)])
    seen = [grad for name, grad in found.items() if name.startswith(("vpm.", "resampler."))]
    assert len(seen) > 20
    assert not any(grad.any() for grad in seen)


def test_pictures_reach_the_language_model(made: Renderer, policy: Policy) -> None:
    def logprobs(*pictures: Any) -> torch.Tensor:
        turns = user(0, "and", 1, "differ?"), assistant("Yes.")
        with torch.no_grad():
            return policy(padded(made, [made.example(row(*turns, images=pictures))]))

    one, other, black = noise(100, 60, 1), noise(100, 60, 2), noise(100, 60, 1)
    black.value.paste((127, 127, 127), (0, 0, 100, 60))
    right = logprobs(one, other)
    assert torch.equal(logprobs(one, other), right)
    for wrong in ((other, one), (black, other), (one, black)):
        assert float((logprobs(*wrong) - right).abs().max()) > 1e-3


def test_answers_are_what_the_models_own_forward_says_next(
    base: Path, made: Renderer, policy: Policy
) -> None:
    rows = list(read_rows(base / "data" / "rows.json"))
    found = answer_rows(policy.generate, made, rows, torch.device("cpu"), max_new_tokens=4)
    stops = {made.tokenizer.eos_token_id, made.pad_id}
    for row_, answer in zip(rows, found):
        prompt, _ = made.prompt(row_)
        inputs = padded(made, [prompt])
        said: list[int] = []
        for _ in range(4):
            data = nest(inputs)
            data["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([said]).long()], dim=1)
            data["position_ids"] = torch.arange(data["input_ids"].shape[1])[None]
            with torch.no_grad():
                logits = policy.hf(data, use_cache=False).logits[0, -1]
            logits[sorted(made.image_ids)] = -torch.inf
            said.append(int(logits.argmax()))
            if said[-1] in stops:
                break
        text = made.tokenizer.decode(said, skip_special_tokens=True)
        assert answer["answer"] == text.strip()


def test_code_as_it_was_published_computes_the_same(
    base: Path, tmp_path: Path, made: Renderer, policy: Policy, examples: list[Example]
) -> None:
    """Its maintainers recommend transformers 4.51: plain `from_pretrained` of 5 fails on it."""
    folder = as_published(base / "model", tmp_path / "model")
    with pytest.raises(AttributeError, match="all_tied_weights_keys"):
        AutoModel.from_pretrained(folder, trust_remote_code=True)
    old = Renderer(str(folder), trust_remote_code=True)
    hf = whole_model(old.config, old.family, str(folder))
    assert not hasattr(hf, "all_tied_weights_keys")
    with torch.no_grad():
        found = Policy(hf, old.family, old.dummy()).eval()(padded(made, examples))
        assert torch.equal(found, policy(padded(made, examples)))


def test_every_adapter_of_the_projector_is_reached(base: Path) -> None:
    parallel = parallel_module.start(shard=False)
    lora = ("--lora_r=4", "--lora_target_modules=language,mm_proj")
    engine, made = engine_for(base, parallel, more=lora)
    rows = examples_of(made, base / "data" / "rows.json")
    found = gradients(engine, [Batch.of(rows)])
    trained = {n for n, p in named_parameters(engine.policy.hf) if p.requires_grad}
    assert found.keys() == trained
    assert any(name.startswith("resampler.kv_proj.") for name in trained)
    # A, behind which B is zero, has no gradient yet.
    assert all(grad.any() for name, grad in found.items() if ".lora_B." in name)


def test_no_weight_has_memory_before_it_is_loaded(made: Renderer) -> None:
    hf = empty_policy(made.config, made.family).hf
    assert all(parameter.is_meta for parameter in hf.parameters())
    assert not any(buffer.is_meta for buffer in hf.buffers())


# -- a run ---------------------------------------------------------------------------------------


def train(base: Path, out: str, *more: str) -> Path:
    rows = base / "data" / "rows.json"
    settings = load_settings(
        [
            *("--trainer=fsdp_vlm", "--trust_remote_code", "--report_to=none"),
            *(f"--vlm_model_name_or_path={base / 'model'}", f"--output_dir={base / out}"),
            *(f"--train_file={rows}", f"--eval_file={rows}", "--eval_samples=3"),
            *("--freeze_vision=false", "--lr=1e-3", "--lr_scheduler=constant", "--num_workers=1"),
            *("--global_batch_size=4", "--per_device_train_batch_size=2", "--max_new_tokens=2"),
            *("--fsdp_mp_dtype=fp32", "--grad_ckpt=full", *more),
        ]
    )
    assert registry.find(settings.trainer)(settings) == 0
    return base / out


@pytest.fixture(scope="module")
def trained(base: Path) -> Path:
    """Three steps, two of them before the run was stopped and gone on with."""
    train(base, "run", "--max_steps=2")
    return train(base, "run", "--max_steps=3", "--resume=auto")


def test_a_resumed_run_has_the_losses_of_an_unbroken_one(base: Path, trained: Path) -> None:
    whole = losses(train(base, "unbroken", "--max_steps=3"))
    assert len(whole) == 3
    assert losses(trained) == whole


def test_an_export_is_loaded_by_transformers_alone_with_equal_logits(
    base: Path,
    trained: Path,
    made: Renderer,
    policy: Policy,
    examples: list[Example],
    tmp_path: Path,
) -> None:
    path = checkpoints(trained / "checkpoints")[-1]
    out = export(path, tmp_path / "out", trust_remote_code=True)
    assert sorted(file.name for file in out.glob("*.py")) == FILES.split(", ")
    model, info = AutoModel.from_pretrained(out, trust_remote_code=True, output_loading_info=True)
    assert not any(info.values())
    engine, _ = engine_for(base, parallel_module.start(shard=False), start_from=path)
    inputs = padded(made, examples)
    data = nest(inputs) | {"position_ids": inputs["positions"][0]}
    with torch.no_grad():
        logits, before, after = (
            one.eval()(data, attention_mask=inputs["attention_mask"], use_cache=False).logits
            for one in (model, policy.hf, engine.policy.hf)
        )
    torch.testing.assert_close(logits, after, atol=1e-6, rtol=0)
    assert float((logits - before).abs().max()) > 0.01
    processor = transformers.AutoProcessor.from_pretrained(out, trust_remote_code=True)
    assert type(processor).__name__ == "MiniCPMVProcessor"
    card = (out / "README.md").read_text()
    assert card.count(", trust_remote_code=True)") == 2


def test_text_on_one_rank_and_pictures_on_the_other_are_one_rank(base: Path) -> None:
    alone = parallel_module.start(shard=False)
    reference = {
        name: compute(base, alone, frozen, lambda rows: [rows])[0]
        for name, frozen in FROZEN.items()
    }
    torch.save(reference, base / "reference.pt")
    torchrun(2, "-m", "tests.ranks.minicpmv", str(base), timeout=120)
    found = json.loads((base / "found.json").read_text())
    assert found.pop("answers") == answers(base, alone)
    assert len(found) == 4
    assert {case: value for case, value in found.items() if value >= 1e-5} == {}
