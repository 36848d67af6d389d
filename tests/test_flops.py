"""The work of a step, held against what PyTorch counts while it happens: every matrix product of
forward and backward, whatever is frozen, adapted or recomputed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.rows import picture
from tests.tiny_models import FAMILIES, renderer, scratch, tiny
from vireo import parallel as parallel_module
from vireo.data.conversation import Conversation, Image, ImageRef, Text, Turn
from vireo.data.ragged import Batch
from vireo.data.render import Renderer
from vireo.errors import InputError
from vireo.families.tiny import build
from vireo.models.build import ModelSpec, build_policy
from vireo.models.lora import Lora
from vireo.plan.flops import Flops, step_flops
from vireo.plan.trace import Shape, windows
from vireo.plan.watch import Load

GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
TILES = ("llava", "llava_next", "llava_onevision", "internvl")
TEXT = ("llama", "qwen3")
COUNTED = (*GRIDS, *TILES, *TEXT)
BASE = frozenset({"language", "embeddings", "head"})
FROZEN = {
    "nothing": frozenset[str](),
    "the tower": frozenset({"vision"}),
    "all but the projector": BASE | {"vision"},
    "all but the tower": BASE | {"projector"},
    "all but the embeddings": frozenset({"vision", "projector", "language", "head"}),
    "all but the language model": frozenset({"vision", "projector", "embeddings", "head"}),
}
ADAPTERS = {
    "of the language model": Lora(4, 8),
    "of queries": Lora(4, 8, targets=("q_proj",), closed=frozenset({"vision"})),
    "of all parts": Lora(2, 8, targets=("vision_tower", "language")),
}


@cache
def model(family: str) -> str:
    """A tiny checkpoint; of Qwen2.5-VL one that has windows of several sizes and full layers."""
    if family != "qwen2_5_vl":
        return tiny(family)
    vision = {"window_size": 112, "fullatt_block_indexes": [1], "depth": 3}
    return str(build(family, scratch() / "windows", size="test", vision=vision))


@cache
def batch(family: str) -> tuple[Batch, Load]:
    """Three rows, of which those of a family with a tower have pictures; the load that it is."""
    made = Renderer(model(family))
    sizes = [(140, 168), (56, 84), (280, 112)] if made.family.grid else [(56, 56)] * 3
    rows = []
    for i, size in enumerate(sizes):
        slot = (Image(0),) if made.family.has_vision else ()
        turns = (
            Turn("user", (*slot, Text("look " * 7 * i))),
            Turn("assistant", (Text("it is " * (3 + i)),)),
        )
        images = (ImageRef(picture(i, size)),) if slot else ()
        rows.append(made.example(Conversation(turns=turns, images=images)))
    batch = Batch.of(rows)
    inputs = batch.pack()
    grids = tuple(map(tuple, inputs["image_grid_thw"].tolist())) if made.family.grid else ()
    tiles = 0
    if family in TILES:
        tiles = math.prod(inputs["pixel_values"].shape[:-3])  # of equal pictures: none is padding
    load = Load(tuple(len(row) for row in rows), sum(r.supervised for r in rows), grids, tiles)
    return batch, load


@dataclass(frozen=True)
class Counted:
    """What PyTorch counts: forward by place, and all of the backward pass."""

    attention: int
    language: int  # with its attention
    head: int
    forward: int
    backward: int


def counted(family: str, **spec: Any) -> Counted:
    made = Renderer(model(family))
    parallel = parallel_module.start(shard=False)
    dummy = made.dummy() if made.family.has_vision else None
    given = ModelSpec(model(family), shard=False, **spec)
    policy, _ = build_policy(given, made.config, made.family, parallel, dummy)
    inputs = batch(family)[0].pack()
    with sdpa_kernel(SDPBackend.MATH):  # as matrix products, which are counted one by one
        with FlopCounterMode(display=False) as counter:
            loss = policy(inputs).sum()
        places = counter.get_flop_counts()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
    # Angles of positions are a matrix product too, of nothing that learns.
    angles = sum(sum(c.values()) for name, c in places.items() if name.endswith("rotary_emb"))
    language = f"Policy.hf.{made.family.parts['language'][0]}"
    attention = [c for name, c in places.items() if name.endswith(("attn", ".attention"))]
    return Counted(
        # Projections have no batch (bmm), scores and mixing one of heads.
        sum(n for count in attention for op, n in count.items() if "bmm" in str(op)),
        sum(places[language].values()) - angles,
        sum(places["Policy.hf.lm_head"].values()),
        sum(places["Global"].values()) - angles,
        counter.get_total_flops(),
    )


def whole(flops: dict[str, float]) -> float:
    """The sum, with causal attention as the square that it is half of, which is what runs here."""
    return sum(flops.values()) + flops["language attention"]


def agree(family: str, **spec: Any) -> Flops:
    """The counts are equal, save what runs again in the backward pass."""
    config = transformers.AutoConfig.from_pretrained(model(family))
    how = {name: spec[name] for name in ("frozen", "lora") if name in spec}
    flops = step_flops(config, batch(family)[1], **how)
    found = counted(family, **spec)
    there = flops.forward
    assert there["vision attention"] + 2 * there["language attention"] == found.attention
    assert there["language"] + 2 * there["language attention"] == found.language
    assert there["head"] == found.head
    assert whole(there) == found.forward
    again: float = found.head  # chunks of it always do
    if spec.get("recompute"):
        layers = Shape(config, **how).trace(batch(family)[1]).layers
        again += sum(layer.again for layer in layers if not layer.vision)
        again += there["language attention"]
    assert whole(flops.backward) == found.backward - again
    return flops


@pytest.mark.parametrize("family", COUNTED)
def test_of_every_part_that_trains(family: str) -> None:
    flops = agree(family)
    assert flops.forward["head"]
    assert flops.forward["language attention"]
    assert bool(flops.forward["vision attention"]) is (family not in TEXT)


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava", "internvl"])
def test_frozen_parts(family: str, frozen: str) -> None:
    agree(family, frozen=FROZEN[frozen])


@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_adapters(family: str, adapters: str) -> None:
    agree(family, lora=ADAPTERS[adapters])


def test_recomputed_layers_count_once() -> None:
    assert agree("qwen2_5_vl", recompute="full") == agree("qwen2_5_vl")


def test_a_frozen_part_behind_a_trained_one_passes_its_gradient_on() -> None:
    """The language model computes gradients of its inputs, none of its weights: half as much."""
    load = batch("qwen2_vl")[1]
    config = transformers.AutoConfig.from_pretrained(model("qwen2_vl"))
    free, held = (step_flops(config, load, frozen=frozen) for frozen in (frozenset(), BASE))
    assert held.forward == free.forward
    assert held.backward["language"] == held.forward["language"] == free.backward["language"] / 2
    assert held.backward["vision"] == free.backward["vision"]
    tower = step_flops(config, load, frozen=frozenset({"vision"}))
    assert tower.backward["vision"] == tower.backward["vision attention"] == 0


def test_only_supervised_positions_reach_the_head() -> None:
    config = transformers.AutoConfig.from_pretrained(model("llama"))
    few, many = (step_flops(config, Load((100,), n)) for n in (10, 50))
    assert many.forward["head"] == 5 * few.forward["head"]
    assert many.forward["language"] == few.forward["language"]


def test_causal_attention_is_half_a_square_and_a_window_less() -> None:
    """One layer, a head of 8, rows of 6 and 4 tokens: 2 products of 2 x 8 operations a pair."""
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "vocab_size": 9,
    }
    heads: dict[str, Any] = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    plain = transformers.LlamaConfig(**sizes, **heads)
    found = step_flops(plain, Load((6, 4), 1)).forward["language attention"]
    assert found == 2 * 2 * 8 * (36 + 16) / 2
    slides = transformers.MistralConfig(**sizes, **heads, sliding_window=4)
    found = step_flops(slides, Load((6, 4), 1)).forward["language attention"]
    assert found == 2 * 2 * 8 * ((36 - 4) + 16) / 2


def test_windows_are_smaller_at_the_edges() -> None:
    """112 pixels are 8 patches a side: of 12 x 20 there are 8 and 4 rows, 8, 8 and 4 columns."""
    config = transformers.AutoConfig.from_pretrained(model("qwen2_5_vl")).vision_config
    frame = [64, 64, 32, 32, 32, 16]
    assert windows((1, 12, 20), config) == frame
    assert windows((2, 12, 20), config) == frame * 2


def test_a_text_model_without_an_entry() -> None:
    """Mistral has none: its products are those of its weights, 2 operations for each and token."""
    config = transformers.MistralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, vocab_size=50, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    flops = step_flops(config, Load((30, 20), 7))
    weights = 3 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96)
    assert flops.forward["language"] == 2 * 50 * weights
    assert flops.forward["head"] == 2 * 7 * 64 * 50
    assert flops.backward["language"] == 2 * flops.forward["language"]


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(COUNTED)))
def test_a_family_that_is_not_counted_is_named(family: str) -> None:
    config = renderer(family).config
    with pytest.raises(InputError, match=rf"^{family}: .* not counted here"):
        step_flops(config, Load((10,), 5))


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (transformers.MixtralConfig(num_hidden_layers=1), "what model.layers.0.* computes"),
        (transformers.GPT2Config(n_layer=1), "the layers of this family"),
        (transformers.MambaConfig(num_hidden_layers=1), "the layers of this family"),
        (transformers.T5Config(), "the tower of this family"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_a_model_without_an_entry_that_is_not_counted(config: Any, what: str) -> None:
    with pytest.raises(InputError, match=rf"^{config.model_type}: {what}.* not counted here"):
        step_flops(config, Load((10,), 5))


def test_images_in_the_wrong_form() -> None:
    for family, load in (
        ("llava", Load((9,), 1, ((1, 4, 4),))),
        ("qwen2_vl", Load((9,), 1, (), 1)),
    ):
        config = transformers.AutoConfig.from_pretrained(model(family))
        with pytest.raises(InputError, match=f"{family}: images are counted in"):
            step_flops(config, load)
