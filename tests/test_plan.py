"""What a plan foretells, held against runs that were measured, and what it refuses."""

from __future__ import annotations

import re
import weakref
from functools import cache
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import shapes
from tests.tiny_models import tiny
from vireo import cli
from vireo.errors import InputError
from vireo.families import tiny as builders
from vireo.families.tiny.sizes import TEXT, VISION
from vireo.models.heads import token_logprobs
from vireo.plan.flops import step_flops
from vireo.plan.gpus import GPUS
from vireo.plan.memory import LOGIT, fullest, recomputed, states
from vireo.plan.predict import Plan, Rows, predict
from vireo.plan.trace import Shape
from vireo.plan.watch import Load
from vireo.settings import load_settings

ROWS = Rows(tokens=425, images=1, image_size=448, supervised=137)
LOAD = Load((425,) * 16, 16 * 137, ((1, 32, 32),) * 16)
# benchmarks/RESULTS.md, "attention without masks, one H200": flags of `benchmarks/sft_step.py`,
# peak memory in GB, seconds of a step, one for each run. Its rows have 425 tokens, 256 of them of
# a picture and 137 with loss.
USUAL = ["--max_tokens_per_gpu=8192", "--global_batch_size=16"]
LARGER = ["--max_tokens_per_gpu=16384", "--global_batch_size=64"]
MEASURED: dict[str, tuple[list[str], float, list[float]]] = {
    "everything": ([*USUAL, "--freeze_vision=false"], 117.1, [0.88, 0.92]),
    "full recomputation": ([*USUAL, "--grad_ckpt"], 55.3, [0.66, 0.71, 0.73, 0.87]),
    "every second layer": ([*USUAL, "--grad_ckpt=every-2"], 63.2, [0.68]),
    "auto recomputes none": ([*USUAL, "--grad_ckpt=auto"], 82.4, [0.58, 0.62]),
    "auto recomputes some": ([*LARGER, "--grad_ckpt=auto"], 110.9, [2.20]),
    "adapters": ([*USUAL, "--lora_r=16"], 43.9, [0.66]),
    "the projector": ([*USUAL, "--freeze_language"], 43.9, [0.53]),
}


@cache
def config() -> Any:
    """The config that benchmarks/shapes.py writes weights of."""
    sizes: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builders, "build", lambda _family, _folder, **given: sizes.update(given))
        patch.setattr(shapes, "fill_vocabulary", lambda *_: None)
        shapes.write_3b(Path("nowhere"))
    text = {name: value for name, value in sizes.items() if name not in ("dtype", "vision")}
    make = import_module("vireo.families.tiny.qwen2_5_vl").make
    made, _ = make(TEXT["demo"], text, VISION["demo"], sizes["vision"])
    for part in (made, made.get_text_config()):
        part.tie_word_embeddings = True
    return made


@cache
def planned(*flags: str, gpus: int = 1, rows: Rows = ROWS, gpu: str = "h200") -> Plan:
    settings = load_settings(["--vlm_model_name_or_path=m", *flags])
    return predict(config(), settings, GPUS[gpu], gpus, rows)


@pytest.mark.parametrize("name", MEASURED)
def test_runs_on_one_h200(name: str) -> None:
    flags, peak, seconds = MEASURED[name]
    found = planned(*flags)
    assert found.memory.total / 1e9 == pytest.approx(peak, rel=0.1)
    assert found.seconds == pytest.approx(median(seconds), rel=0.2)


def test_auto_decides_as_it_did() -> None:
    """It recomputed none of 36 layers, and 8 in the larger run, on a card that has more memory
    than its data sheet says."""
    assert planned(*MEASURED["auto recomputes none"][0]).again == 0
    assert 6 <= planned(*MEASURED["auto recomputes some"][0]).again <= 10


def test_a_layer_keeps_what_the_trainer_counted() -> None:
    """0.997 GiB at 8,192 tokens, by models.recompute on the GPU."""
    layers = Shape(config(), frozenset({"vision"})).trace(Load((8192,), 1)).layers
    kept = max(layer.kept for layer in layers) / 2**30
    assert kept == pytest.approx(0.997, rel=0.003)


def test_sixteen_bytes_of_a_trained_weight_shared_out() -> None:
    found = planned(*USUAL, "--freeze_vision=false", gpus=4)
    held = found.memory.weights + found.memory.moments
    assert held == 12 * 3_754_622_976 / 4
    of_four = states(Shape(config()).trace(LOAD), 4, lora=False)
    assert of_four.gradients * 4 == of_four.summed == 4 * 3_754_622_976


def test_hybrid_sharding_shares_within_its_group() -> None:
    flags = [*USUAL, "--freeze_vision=false"]
    group = planned(*flags, "--fsdp_sharding=hybrid", "--fsdp_shard_size=2", gpus=8)
    assert group.memory.weights == planned(*flags, gpus=2).memory.weights


def test_gradients_are_whole_while_micro_batches_add_up() -> None:
    one, two = (
        planned("--per_device_train_batch_size=4", f"--grad_accum_steps={steps}", gpus=8)
        for steps in (1, 2)
    )
    assert one.memory.gradients <= 4 * one.trained / 8
    assert two.memory.gradients == 4 * two.trained
    assert two.flops.total == 2 * one.flops.total


def test_the_fullest_moment_is_with_the_tower_where_only_that_keeps_much() -> None:
    """Recomputed decoder layers keep their inputs: a tower's activations beside gradients of the
    language model are more than both beside logits."""
    shape = Shape(config())
    trace = shape.trace(LOAD)
    held = states(trace, 1, lora=False)
    full = fullest(trace, 1, held, 36, 1)
    tower = sum(layer.kept for layer in trace.layers if layer.vision)
    assert full.activations == tower + trace.kept["vision"] + trace.kept["projector"]
    language = trace.trained - sum(layer.trained for layer in trace.layers if layer.vision)
    assert full.gradients == 4 * language
    assert recomputed(trace, "every-5", 1, 0, held) == 8


class Living(TorchDispatchMode):
    """The most bytes that were alive at once, of tensors made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def gone(self, place: int, size: int) -> None:
        self.known.remove(place)
        self.now -= size


def test_a_logit_takes_twenty_bytes_at_the_fullest() -> None:
    """A chunk of the head, forward and backward; its hidden states are next to nothing."""
    words, positions = 5000, 200
    head = torch.nn.Linear(8, words, bias=False, dtype=torch.bfloat16)
    hidden = torch.randn(positions, 8, dtype=torch.bfloat16, requires_grad=True)
    with Living() as living:
        token_logprobs(hidden, head, torch.zeros(positions, dtype=torch.long)).sum().backward()
    assert living.most == pytest.approx(LOGIT * words * positions, rel=0.02)


def test_adapters_keep_the_base_in_bfloat16() -> None:
    found = planned(*USUAL, "--lora_r=16")
    assert found.memory.weights == 2 * (found.weights - found.trained) + 4 * found.trained
    assert found.trained == 29_933_568  # 16 x (inputs + outputs) of 7 modules in 36 layers


def test_the_work_is_that_of_the_rows() -> None:
    frozen = frozenset({"vision"})
    assert planned(*USUAL).flops == step_flops(config(), LOAD, frozen=frozen)
    assert planned(*USUAL, "--grad_ckpt").flops == planned(*USUAL).flops
    assert planned(*USUAL, "--grad_ckpt").repeated > planned(*USUAL).repeated


def test_a_slower_gpu_takes_longer_and_a_smaller_one_is_full() -> None:
    flags = [*USUAL, "--freeze_vision=false"]
    assert planned(*flags, gpu="a100").seconds > planned(*flags, gpu="h100").seconds
    assert planned(*flags, gpu="a100").fits == "does not fit"
    assert planned(*flags, gpu="h200").fits == "fits"


def test_tokens_of_images_are_found_out() -> None:
    assert planned(*USUAL).image_tokens == 256
    rows = Rows(tokens=1000, images=2, image_size=560)
    found = planned(*USUAL, rows=rows)
    assert (found.image_tokens, found.supervised) == (800, 199)
    assert found.micro_batches == 2  # of 8 rows
    settings = load_settings(["--vlm_model_name_or_path=m"])
    llava = transformers.AutoConfig.from_pretrained(tiny("llava"))
    side = llava.vision_config.image_size // llava.vision_config.patch_size
    found = predict(llava, settings, GPUS["h200"], 1, Rows(2000, images=2, tiles=3))
    assert found.image_tokens == 6 * side**2


@pytest.mark.parametrize(
    ("rows", "flags", "said"),
    [
        (Rows(256, images=1), [], "a row has 256 tokens .* 256 of them of images"),
        (Rows(300, supervised=300), [], "300 cannot carry loss; raise --max_length"),
        (Rows(9000), USUAL, "--max_tokens_per_gpu 8192 has no room for a row of 9000 tokens"),
        (Rows(400, images=1, tiles=2), [], "qwen2_5_vl: images have grids of patches, not tiles"),
        (ROWS, ["--fsdp_enable=false"], "a plan is of sharded runs"),
        (ROWS, ["--freeze_mm_proj", "--freeze_language"], "every part of the model is frozen"),
    ],
)
def test_what_cannot_be_planned(rows: Rows, flags: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        planned(*flags, rows=rows)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config().save_pretrained(tmp_path)  # a config is all that it reads
    flags = ["--max_length", "425", "--supervised", "137", *USUAL, "--grad_ckpt"]
    assert cli.main(["plan", "--model", str(tmp_path), "--gpus", "1", *flags]) == 0
    said = capsys.readouterr().out
    plan = planned(*USUAL, "--grad_ckpt")
    assert "3,754,622,976 parameters, 3,122,647,296 trained, on 1 x h200" in said
    assert "36 of 36 decoder layers recomputed" in said
    assert re.search(rf"together +{plan.memory.total / 1e9:.1f}  of 141: fits\n", said)
    assert f"a step: {plan.seconds:.2f} s" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gpu", "h20"], "--gpu h20: no such GPU; did you mean h200?"),
        (["--images", "-1"], "--images: found -1, expected 0 or more"),
        (["--images", "1"], "qwen3: a text model has no images; leave --images out"),
        (["--max_tokens_per_gpu", "64"], "--max_tokens_per_gpu needs --global_batch_size"),
        (["--max_len", "5"], "unknown flag --max_len; did you mean --max_length?"),
    ],
)
def test_wrong_flags(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--model", tiny("qwen3"), "--max_length", "64", *flags]
    assert cli.main(argv) == 2
    assert said in capsys.readouterr().err
