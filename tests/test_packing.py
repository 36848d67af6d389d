"""Micro-batches: no row is lost or parted, and a packed row cannot tell that it has neighbours."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.tiny_models import assistant, noise, policy, renderer, row, user
from vireo.data.packing import by_rows, by_tokens, micro_batches, padding_share, share
from vireo.data.ragged import BASE_KEYS, IGNORE, Batch, Example
from vireo.errors import RowError
from vireo.families import FAMILIES

PACKED = [name for name in FAMILIES if FAMILIES[name].can_pack]
VISION = [name for name in PACKED if FAMILIES[name].has_vision]


# -- rows into micro-batches ---------------------------------------------------------------------


def examples_of(lengths: list[int]) -> list[Example]:
    return [
        Example({"input_ids": torch.full((n,), i)}, BASE_KEYS, where=f"row {i}")
        for i, n in enumerate(lengths)
    ]


def rows_in(batch: Batch) -> list[int]:
    rows = [int(one.fields["input_ids"][0]) for one in batch.examples()]
    assert batch.where == [f"row {i}" for i in rows]
    return rows


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=20), st.integers(20, 45))
def test_a_token_budget_holds_and_every_row_is_there_once(lengths, budget):
    batches = by_tokens(examples_of(lengths), budget)
    assert all(batch.tokens <= budget for batch in batches)
    assert sorted(i for batch in batches for i in rows_in(batch)) == list(range(len(lengths)))
    assert all(n == lengths[i] for b in batches for i, n in zip(rows_in(b), b.lengths))
    # No two micro-batches fit into one.
    assert all(a.tokens + b.tokens > budget for a in batches for b in batches if a is not b)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=20), st.integers(20, 45))
def test_a_token_budget_holds_with_the_padding_of_padded_rows(lengths, budget):
    batches = by_tokens(examples_of(lengths), budget, padded=True)
    assert all(len(batch) * max(batch.lengths) <= budget for batch in batches)
    assert sorted(i for batch in batches for i in rows_in(batch)) == list(range(len(lengths)))
    # The longest row of a micro-batch has no place in any before it.
    for i, batch in enumerate(batches):
        for earlier in batches[:i]:
            assert (len(earlier) + 1) * max(earlier.lengths) > budget
            assert min(earlier.lengths) >= max(batch.lengths)


def test_a_row_goes_where_it_leaves_least_room():
    batches = by_tokens(examples_of([6, 5, 4, 5]), budget=10)
    assert [rows_in(batch) for batch in batches] == [[0, 2], [1, 3]]
    # The first that fits 3 would be that of 6.
    batches = by_tokens(examples_of([6, 7, 3, 4]), budget=10)
    assert [rows_in(batch) for batch in batches] == [[1, 2], [0, 3]]


def test_long_rows_go_first_and_short_ones_fill_up():
    batches = by_tokens(examples_of([2, 5, 3, 4, 2]), budget=8)
    assert [rows_in(batch) for batch in batches] == [[1, 2], [3, 0, 4]]


def test_a_row_that_just_fits_is_taken():
    assert [rows_in(batch) for batch in by_tokens(examples_of([8]), budget=8)] == [[0]]


def test_a_row_over_the_token_budget_is_refused_by_name():
    for padded in (False, True):
        with pytest.raises(RowError, match=r"row 1: 9 tokens do not fit .* 8") as caught:
            by_tokens(examples_of([8, 9, 1]), budget=8, padded=padded)
        assert caught.value.reason == "too_long"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 12), st.integers(1, 5))
def test_micro_batches_by_rows_keep_the_order(count, rows):
    batches = by_rows(examples_of([1] * count), rows)
    assert [i for batch in batches for i in rows_in(batch)] == list(range(count))
    assert [len(batch) for batch in batches[:-1]] == [rows] * (len(batches) - 1)
    assert all(1 <= len(batch) <= rows for batch in batches)


def test_the_trainers_micro_batches_are_of_one_kind_where_kinds_cannot_mix():
    rows = examples_of([4, 4, 2, 2])
    for example, images in zip(rows, (1, 0, 1, 0)):
        example.images = images
    for sized in ({"rows": 3}, {"rows": 1, "budget": 6}):
        batches = micro_batches(rows, can_mix=False, **sized)
        assert [rows_in(batch) for batch in batches] == [[1, 3], [0, 2]]
    padded = micro_batches(rows, rows=1, budget=6, packing=False)
    assert [rows_in(batch) for batch in padded] == [[0], [1], [2, 3]]
    assert padding_share(micro_batches(rows, rows=4)) == 0.25


def test_ranks_take_micro_batches_in_turn():
    assert [share(i, chunk=2, world=3) for i in range(8)] == [0, 0, 1, 1, 2, 2, 0, 0]


# -- a packed row and the same row alone ---------------------------------------------------------

SCALE = 4  # weights for which a position out of place moves log-probabilities by 0.1
CLOSE = 1e-5  # float32 on a CPU
FAR = 1e-3


def rows_of(family: str) -> list[Example]:
    """Rows with 0, 1, 2 and 3 images of different sizes; one answer is a single token."""
    sizes = [[], [(56, 56)], [(84, 28), (56, 112)], [(28, 28), (140, 56), (56, 84)]]
    answers = ["Yes, it is.", "It is a cat on the table.", "7", "Three of these."]
    made, out = renderer(family), []
    for i, (shapes, answer) in enumerate(zip(sizes, answers)):
        shapes = shapes if made.family.has_vision else []
        images = [noise(w, h, seed=10 * i + k) for k, (w, h) in enumerate(shapes)]
        question = f"What is in the image? {'Really? ' * i}"
        turns = user(*range(len(images)), question), assistant(answer)
        out.append(made.example(row(*turns, images=images)))
    assert out[2].supervised <= 4  # the answer, a space round it in some, and the end of the turn
    return out


@torch.no_grad()
def logprobs(family: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return policy(family, SCALE)(inputs)


def alone(family: str, examples: list[Example]) -> torch.Tensor:
    return torch.cat([logprobs(family, Batch.of([one]).pack()) for one in examples])


def gap(family: str, inputs: dict[str, torch.Tensor]) -> float:
    """The largest difference from the rows' own log-probabilities."""
    wanted = alone(family, rows_of(family))
    return (logprobs(family, inputs) - wanted).abs().max().item()


@pytest.mark.parametrize("family", PACKED)
def test_packed_rows_get_the_log_probs_of_rows_alone(family):
    assert gap(family, Batch.of(rows_of(family)).pack()) < CLOSE


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("family", PACKED)
def test_padded_rows_get_the_log_probs_of_rows_alone(family, left):
    assert gap(family, Batch.of(rows_of(family)).pad(renderer(family).pad_id, left)) < CLOSE


@pytest.mark.parametrize("family", PACKED)
def test_the_order_of_packed_rows_does_not_matter(family):
    order = [3, 0, 2, 1]
    examples = rows_of(family)
    got = logprobs(family, Batch.of(examples).select(order).pack())
    assert (got - alone(family, [examples[i] for i in order])).abs().max() < CLOSE


@pytest.mark.parametrize("family", PACKED)
def test_text_rows_of_an_image_batch_stand_alone(family):
    """Keys of images that are gone must not matter to a part of a batch."""
    examples = rows_of(family)
    part = Batch.of(examples).select([0])
    assert (logprobs(family, part.pack()) - alone(family, examples[:1])).abs().max() < CLOSE


@pytest.mark.parametrize("family", PACKED)
def test_rows_leak_into_each_other_when_their_bounds_are_lost(family):
    """The fault that bounds avoid; seen here, so the tests above can fail."""
    inputs = Batch.of(rows_of(family)).pack()
    if FAMILIES[family].varlen:
        inputs["lengths"] = inputs["lengths"].sum(0, keepdim=True)
    else:  # transformers reads the bounds from positions, unless there is a mask
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    assert gap(family, inputs) > FAR


@pytest.mark.parametrize("family", [n for n in PACKED if not FAMILIES[n].varlen])
def test_rows_leak_into_each_other_when_positions_run_on(family):
    inputs = Batch.of(rows_of(family)).pack()
    inputs["positions"] = torch.arange(inputs["input_ids"].shape[1]).expand_as(inputs["positions"])
    assert gap(family, inputs) > FAR


@pytest.mark.parametrize("family", [n for n in VISION if FAMILIES[n].positions == "mrope"])
def test_text_positions_in_place_of_the_familys_own_are_seen(family):
    inputs = Batch.of(rows_of(family)).pack()
    inputs["positions"] = inputs["positions"][:1].expand(4, -1, -1)
    assert gap(family, inputs) > FAR


@pytest.mark.parametrize("family", VISION)
def test_images_of_another_row_are_seen(family):
    inputs = Batch.of(rows_of(family)).pack()
    inputs["pixel_values"] = inputs["pixel_values"].flip(FAMILIES[family].keys["pixel_values"].axis)
    assert gap(family, inputs) > FAR


# -- against the model's own forward -------------------------------------------------------------


def own_inputs(family: str, one: Example) -> dict[str, torch.Tensor]:
    """What plain transformers takes: no positions, the processor's keys, a mask."""
    keys = FAMILIES[family].keys
    inputs = {
        n: v[None] if keys[n].kind == "token" else v for n, v in one.fields.items() if n in keys
    }
    ids = one.fields["input_ids"][None]
    return {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("family", PACKED)
def test_the_loss_of_a_row_is_the_models_own(family):
    hf = policy(family, SCALE).hf
    for one in rows_of(family):
        with torch.no_grad():
            own = hf(**own_inputs(family, one), labels=one.fields["labels"][None]).loss
        ours = -logprobs(family, Batch.of([one]).pack()).mean()
        assert ours.item() == pytest.approx(own.item(), abs=1e-5)


@pytest.mark.parametrize("family", PACKED)
def test_log_probs_come_in_reading_order_of_the_labels(family):
    one = rows_of(family)[3]
    with torch.no_grad():
        logits = policy(family, SCALE).hf(**own_inputs(family, one)).logits[0]
    places = (one.fields["labels"] != IGNORE).nonzero()[:, 0]
    wanted = F.log_softmax(logits, -1)[places - 1, one.fields["labels"][places]]
    assert torch.allclose(logprobs(family, Batch.of([one]).pack()), wanted, atol=1e-5)
