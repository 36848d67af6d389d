"""Variable-length attention is the stock attention of each row by itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention as sdpa

from tests.tiny_models import assistant, noise, renderer, row, tiny, user
from vireo.data.ragged import TRAINER_KEYS, Batch
from vireo.families import FAMILIES
from vireo.families.tiny import build
from vireo.models.attention import NAME, Bounds, attend, packed_rows
from vireo.models.build import empty_policy
from vireo.models.policy import Policy

LENGTHS = [5, 1, 9, 3]


def heads(tokens: int, count: int, seed: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(1, count, tokens, 8, generator=chance)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_each_row_attends_to_itself_alone(causal: bool, window: int | None) -> None:
    """Four queries share two keys; rows of 5, 1, 9 and 3 tokens, against each row by itself."""
    tokens = sum(LENGTHS)
    q, k, v = heads(tokens, 4, 1), heads(tokens, 2, 2), heads(tokens, 2, 3)
    bounds = Bounds(LENGTHS, torch.device("cpu"))
    module = SimpleNamespace(is_causal=causal)
    found, _ = attend(module, q, k, v, bounds, 0.3, sliding_window=window)
    start = 0
    for length in LENGTHS:
        span = slice(start, start + length)
        place = torch.arange(length)
        seen = torch.ones(length, length, dtype=torch.bool)
        if causal:
            seen &= place[:, None] >= place
        if window:
            seen &= (place[:, None] - place).abs() < window
        mine = [x[:, :, span] for x in (q, k, v)]
        wanted = sdpa(*mine, attn_mask=seen, scale=0.3, enable_gqa=True).transpose(1, 2)
        assert (found[:, span] - wanted).abs().max() < 1e-6
        start += length


def test_a_tower_gives_its_own_bounds() -> None:
    q, k, v = (heads(6, 2, seed) for seed in (1, 2, 3))
    cu = torch.tensor([0, 2, 6])
    module = SimpleNamespace(is_causal=False)
    found, _ = attend(module, q, k, v, None, 0.3, cu_seq_lens_q=cu)
    for a, b in ((0, 2), (2, 6)):
        wanted = sdpa(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], scale=0.3).transpose(1, 2)
        assert (found[:, a:b] - wanted).abs().max() < 1e-6


VARLEN = [name for name, family in FAMILIES.items() if family.varlen]


@pytest.mark.parametrize("family", VARLEN)
def test_a_model_computes_what_stock_attention_computes(family: str) -> None:
    """Outputs and gradients of packed rows, against the same model before it is touched."""
    made = renderer(family)
    answer = assistant("A red box.")
    rows = [row(user("What?"), answer), row(user("Hello."), assistant("Yes."))]
    if made.family.has_vision:
        pictures = [noise(60, 60, seed=1)], [noise(90, 56, seed=2), noise(56, 56, seed=3)]
        rows += [row(user(*range(len(some)), "See?"), answer, images=some) for some in pictures]
    inputs = Batch.of([made.example(one) for one in rows]).pack()
    auto = getattr(transformers, FAMILIES[family].auto_class)
    stock = auto.from_pretrained(tiny(family))
    ours = Policy(auto.from_pretrained(tiny(family)), FAMILIES[family], None)
    positions = inputs["positions"]
    given = {n: v for n, v in inputs.items() if n not in TRAINER_KEYS}
    if FAMILIES[family].positions == "1d":
        positions = positions[0]
    wanted = stock.model(**given, position_ids=positions, use_cache=False).last_hidden_state
    with packed_rows(inputs["lengths"].tolist(), torch.device("cpu")):
        found = ours.hf.model(**given, position_ids=positions, use_cache=False).last_hidden_state
    assert (found - wanted).abs().max() < 2e-5 * wanted.abs().max()
    found.square().sum().backward()
    wanted.square().sum().backward()
    largest = max(float(p.grad.abs().max()) for p in stock.parameters() if p.grad is not None)
    for (name, one), other in zip(ours.hf.named_parameters(), stock.parameters()):
        if other.grad is not None:
            scale = max(float(other.grad.abs().max()), 0.01 * largest)
            assert (one.grad - other.grad).abs().max() < 1e-3 * scale, name
    # Outside of a packed forward it is stock attention with masks, as in generation.
    padded = {n: v[:1, :20] for n, v in given.items() if n == "input_ids"}
    mask = torch.ones_like(padded["input_ids"])
    mask[:, :4] = 0
    wanted = stock.model(**padded, attention_mask=mask).last_hidden_state
    found = ours.hf.model(**padded, attention_mask=mask).last_hidden_state
    assert torch.equal(found, wanted)


def test_a_tower_with_windows_computes_what_its_loop_computes(tmp_path: Path) -> None:
    """Windows of 2 x 2 merged patches in the first layer, all patches in the second."""
    changes = {"depth": 2, "fullatt_block_indexes": [1], "window_size": 56}
    folder = build("qwen2_5_vl", tmp_path, size="test", vision=changes)
    made = renderer("qwen2_5_vl")
    pictures = [noise(140, 84, seed=1), noise(56, 200, seed=2)]
    example = made.example(row(user(0, 1, "See?"), assistant("Yes."), images=pictures))
    given = {n: example.fields[n] for n in ("pixel_values", "image_grid_thw")}
    auto = transformers.AutoModelForImageTextToText
    stock = auto.from_pretrained(folder).model.visual
    ours = Policy(auto.from_pretrained(folder), FAMILIES["qwen2_5_vl"], None).hf.model.visual
    pixels, grid = given["pixel_values"], given["image_grid_thw"]
    assert ours.config._attn_implementation == NAME
    wanted, found = (t(pixels, grid_thw=grid).last_hidden_state for t in (stock, ours))
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("family", VARLEN)
def test_parts_use_what_their_entry_says(family: str) -> None:
    hf = empty_policy(renderer(family).config, FAMILIES[family]).hf
    assert hf.config.get_text_config()._attn_implementation == NAME
    if FAMILIES[family].has_vision:
        tower = hf.config.vision_config._attn_implementation
        assert (tower == NAME) == ("vision" in FAMILIES[family].varlen)
    assert NAME not in str(hf.config.to_dict())  # an exported config does not ask for it


def test_a_model_with_attention_dropout_keeps_its_own() -> None:
    """The kernel has no dropout."""
    config = transformers.AutoConfig.from_pretrained(tiny("llama"))
    config.attention_dropout = 0.1
    hf = empty_policy(config, FAMILIES["llama"]).hf
    assert hf.config._attn_implementation == "sdpa"
