"""What makes a step faster computes the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pil
from torch import nn

from tests.rows import write_rows
from tests.tiny_models import renderer, tiny
from vireo.data.conversation import Conversation, Image, ImageRef, Text, Turn
from vireo.data.patches import Patches
from vireo.data.ragged import Batch
from vireo.data.render import Renderer
from vireo.errors import RowError
from vireo.families.tiny import build
from vireo.models import aligned
from vireo.models.aligned import align_gated, gated
from vireo.models.build import ModelSpec, build_policy, whole_model
from vireo.parallel import alone
from vireo.settings import load_settings
from vireo.trainers import registry
from vireo.training.pinned import Pinned


class Mlp(nn.Module):
    def __init__(self, width: int, bias: bool):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(16, width, bias), nn.Linear(16, width, bias)
        self.down_proj, self.act_fn = nn.Linear(width, 16, bias), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [20, 27])
def test_a_wider_mlp_computes_the_same(width: int, bias: bool) -> None:
    mlp = Mlp(width, bias).double()
    x = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
    found = []
    for call in (mlp, lambda x: gated(mlp, x)):
        out = call(x)
        found.append([out, *torch.autograd.grad(out.square().sum(), [x, *mlp.parameters()])])
    for one, other in zip(*found):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def test_mlps_of_a_good_width_and_others_stay_as_they_are() -> None:
    odd, even = Mlp(20, True), Mlp(24, True)
    assert align_gated(nn.ModuleList([odd, even, nn.Linear(3, 3)])) == 1
    assert "forward" in vars(odd)
    assert "forward" not in vars(even)


def test_a_tower_of_an_awkward_width_is_found_and_keeps_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(build("qwen2_5_vl", tmp_path / "m", size="test", vision={"intermediate_size": 44}))
    made, used = Renderer(folder), []
    real = aligned.gated
    monkeypatch.setattr(aligned, "gated", lambda *given: used.append(1) or real(*given))
    spec = ModelSpec(folder, shard=False)
    policy, _ = build_policy(spec, made.config, made.family, alone(), made.dummy())
    batch = Batch.of([made.empty_with_image()]).pack()
    batch["labels"] = batch["input_ids"].clone()
    plain = policy(batch)
    for module in policy.modules():
        if "forward" in vars(module) and hasattr(module, "gate_proj"):
            module.forward = lambda x, module=module: aligned.gated(module, x)
    wide = policy(batch)
    assert used
    assert torch.allclose(plain, wide, atol=1e-5)
    names = set(whole_model(made.config, made.family, folder).state_dict())
    assert names == {n.removeprefix("hf.") for n in policy.state_dict()}


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_layers_compute_the_same(recompute: str) -> None:
    made = Renderer(tiny("qwen2_5_vl"))
    found = []
    for compiled in (False, True):
        spec = ModelSpec(tiny("qwen2_5_vl"), shard=False, recompute=recompute, compile=compiled)
        policy, _ = build_policy(spec, made.config, made.family, alone(), made.dummy())
        numbers = []
        for lengths in ((8, 12), (30,), (5, 6, 7)):  # one compilation for all
            batch = Batch.of([made.empty(n) for n in lengths]).pack()
            batch["labels"] = batch["input_ids"].clone()
            loss = -policy(batch).mean()
            loss.backward()
            norms = [float(p.grad.norm()) for p in policy.parameters() if p.grad is not None]
            numbers += [float(loss), *norms]
            policy.zero_grad()
        found.append(torch.tensor(numbers))
    assert torch.allclose(*found, rtol=1e-4, atol=1e-5)


def test_host_memory_has_the_size_asked_for() -> None:
    for size in (1, 4096, 5000):
        host = Pinned(size, cuda=False)
        assert (len(host.data), host.data.dtype) == (size, torch.uint8)
        host.close()


def test_a_profiled_run_leaves_a_trace_of_two_steps(tmp_path: Path) -> None:
    write_rows(tmp_path, [1, 0, 1, 0], ((56, 56),))
    trace = tmp_path / "run" / "profile" / "rank-0.trace.json"
    for name, steps, there in (("short", 4, False), ("run", 6, True)):
        chosen = load_settings(
            [
                f"--vlm_model_name_or_path={tiny('qwen2_5_vl')}",
                f"--train_file={tmp_path / 'rows.json'}",
                f"--output_dir={tmp_path / name}",
                f"--max_steps={steps}",
                "--per_device_train_batch_size=2",
                "--profile",
                "--fsdp_enable=false",
                "--report_to=none",
            ]
        )
        assert registry.find("fsdp_vlm")(chosen) == 0
        assert trace.exists() == there
    events = json.loads(trace.read_text())["traceEvents"]
    named = [event["name"] for event in events if "name" in event]
    assert sum(name.startswith("Optimizer.step#") for name in named) == 2
    assert {"ProfilerStep#3", "ProfilerStep#4"} <= set(named)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@given(
    sizes=st.lists(st.tuples(st.integers(9, 150), st.integers(9, 150)), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_pictures_are_the_processors_bit_for_bit(
    family: str, sizes: list[tuple[int, int]], seed: int
) -> None:
    made = renderer(family)
    assert made.patches is not None
    draw = np.random.default_rng(seed)
    pictures = [Pil.fromarray(draw.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in sizes]
    refs = tuple(map(ImageRef, pictures))
    question = (*(part for i in range(len(sizes)) for part in (Image(i), Text(f"{i}?"))),)
    turns = (Turn("user", question), Turn("assistant", (Text("It is a picture."),)))
    row = Conversation(turns, refs, where="drawn")
    ours = made.example(row)
    patches, made.patches = made.patches, None
    try:
        theirs = made.example(row)
    finally:
        made.patches = patches
    assert ours.fields.keys() == theirs.fields.keys()
    for name, value in theirs.fields.items():
        assert torch.equal(ours.fields[name], value), name


def test_a_processor_that_makes_other_numbers_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Patches.__call__

    def other(self: Patches, pictures: list[Pil.Image]) -> dict[str, torch.Tensor]:
        out = real(self, pictures)
        return out | {"pixel_values": out["pixel_values"] + 1e-6}

    monkeypatch.setattr(Patches, "__call__", other)
    assert Renderer(tiny("qwen2_5_vl")).patches is None
    assert Renderer(tiny("llava")).patches is None


def test_a_picture_that_the_processor_refuses_is_refused() -> None:
    thin = ImageRef(Pil.new("RGB", (2000, 4)))
    turns = (Turn("user", (Image(0),)), Turn("assistant", (Text("thin"),)))
    made = renderer("qwen2_5_vl")
    with pytest.raises(RowError, match=r"refuses its image.* 2000 x 4 pixels"):
        made.example(Conversation(turns, (thin,), where="thin"))
