"""Ragged data: no kind of key is lost, mixed up or cut, whatever is done to a batch."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from vireo.data.ragged import BASE_KEYS, IGNORE, Batch, Example, Ragged
from vireo.families import Key

KEYS = {
    **BASE_KEYS,
    "type_ids": Key("token", fill=7),
    "per_head": Key("token", fill=-1.5),  # with leading dimensions [2, 3, T]
    "seen": Key("token", fill=3, dim=0),  # with later dimensions [T, images, 2]
    "pixels": Key("packed"),  # [patches, 4]
    "strips": Key("packed", dim=1),  # [2, width]
    "tiles": Key("padded", fill=9),  # [n, m]
}
# Keys that only a row with images has.
OF_IMAGES = ("type_ids", "per_head", "seen", "pixels", "strips")


def example(number: int, length: int, images: int = 0) -> Example:
    """A row whose every value tells the row's number: number * 1000 + place."""

    def values(*shape: int) -> torch.Tensor:
        return number * 1000 + torch.arange(torch.Size(shape).numel()).reshape(shape)

    fields = {
        "input_ids": values(length),
        "labels": values(length),
        "loss_weight": values(length).float(),
        "positions": values(4, length),
        "tiles": values(1 + number % 2, 1 + length % 3),
    }
    if images:
        fields |= {
            "type_ids": values(length),
            "per_head": values(2, 3, length).float(),
            "seen": values(length, images, 2),
            "pixels": values(3 * images, 4).float(),
            "strips": values(2, 5 * images),
        }
    return Example(fields, KEYS, images, f"row {number}")


def check(batch: Batch, wanted: list[Example]) -> None:
    """The batch holds these rows and all their keys; a text row beside image rows has fills."""
    assert len(batch) == len(wanted)
    assert batch.images == [one.images for one in wanted]
    assert batch.where == [one.where for one in wanted]
    assert batch.lengths == [len(one) for one in wanted]
    assert batch.tokens == sum(len(one) for one in wanted)
    for got, one in zip(batch.examples(), wanted):
        assert (len(got), got.images, got.where) == (len(one), one.images, one.where)
        for name, value in one.fields.items():
            assert torch.equal(got.fields[name], value), name
            assert got.fields[name].dtype == value.dtype
            assert got.keys[name] == KEYS[name]
        extra = set(got.fields) - set(one.fields)
        assert extra <= {"type_ids", "per_head", "seen"}  # never a pixel that the row does not have
        for name in extra:
            assert got.fields[name].shape[KEYS[name].axis] == len(one)
            assert (got.fields[name] == KEYS[name].fill).all()


@st.composite
def rows(draw) -> list[Example]:
    shapes = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2)), min_size=1, max_size=6))
    return [example(i, length, images) for i, (length, images) in enumerate(shapes)]


def quick(test):
    return settings(max_examples=40, deadline=None)(test)


@quick
@given(rows())
def test_a_batch_holds_its_rows(examples):
    check(Batch.of(examples), examples)


@quick
@given(rows(), st.data())
def test_selected_and_reordered_rows_keep_every_key(examples, data):
    places = st.integers(0, len(examples) - 1)
    chosen = data.draw(st.lists(places, min_size=1, max_size=8))
    check(Batch.of(examples).select(chosen), [examples[i] for i in chosen])


@quick
@given(rows(), st.data())
def test_a_slice_keeps_every_key(examples, data):
    chosen = data.draw(st.slices(len(examples)))
    check(Batch.of(examples)[chosen], examples[chosen])


@quick
@given(rows(), st.integers(1, 5))
def test_ranks_get_all_rows_in_order_in_shares_of_like_size(examples, ranks):
    parts = Batch.of(examples).split(ranks)
    sizes = [len(part) for part in parts]
    assert len(sizes) == ranks
    assert max(sizes) - min(sizes) <= 1
    done = 0
    for part in parts:
        check(part, examples[done : done + len(part)])
        done += len(part)
    check(Batch.cat(parts), examples)


@quick
@given(st.lists(rows(), min_size=1, max_size=3))
def test_joined_batches_hold_all_rows(groups):
    joined = Batch.cat([Batch.of(group) for group in groups])
    check(joined, [one for group in groups for one in group])


@settings(max_examples=10, deadline=None)
@given(rows())
def test_a_batch_crosses_a_pickle(examples):
    check(pickle.loads(pickle.dumps(Batch.of(examples))), examples)
    check(Batch.of(pickle.loads(pickle.dumps(examples))), examples)


@quick
@given(rows())
def test_every_key_moves_to_the_device(examples):
    batch = Batch.of(examples)
    check(batch.to("cpu"), examples)
    moved = batch.to("meta")
    assert set(moved.columns) == set(batch.columns)
    for column in moved.columns.values():
        assert {one.device.type for one in column.rows if one is not None} == {"meta"}


@quick
@given(rows())
def test_packed_rows_stand_end_to_end(examples):
    batch = Batch.of(examples)
    out = batch.pack()
    assert out.pop("lengths").tolist() == batch.lengths
    full = batch.examples()  # with the fills
    for name in out:
        parts = [one.fields[name] for one in full if name in one.fields]
        if name == "seen":
            most = max(one.shape[1] for one in parts)
            wide = [F.pad(one, (0, 0, 0, most - one.shape[1]), value=3) for one in parts]
            assert torch.equal(out[name], torch.cat(wide)[None])
        elif KEYS[name].kind == "token":
            assert torch.equal(out[name], torch.cat(parts, -1).unsqueeze(-2)), name
            assert out[name].shape[-2:] == (1, batch.tokens)
        elif KEYS[name].kind == "packed":
            assert torch.equal(out[name], torch.cat(parts, KEYS[name].axis)), name
    assert "attention_mask" not in out


@quick
@given(rows(), st.booleans())
def test_padded_rows_keep_their_values_under_the_mask(examples, left):
    batch = Batch.of(examples)
    out = batch.pad(pad_id=5, left=left)
    longest = max(batch.lengths)
    full = batch.examples()
    for i, one in enumerate(full):
        here = slice(longest - len(one), None) if left else slice(0, len(one))
        mask = torch.zeros(longest, dtype=torch.bool)
        mask[here] = True
        assert torch.equal(out["attention_mask"][i].bool(), mask)
        for name, value in one.fields.items():
            if KEYS[name].kind != "token":
                continue
            got = out[name][:, i] if name == "positions" else out[name][i]
            if name == "seen":  # tokens first: turned, so that the next lines fit
                images = value.shape[1]
                assert (got[:, images:] == KEYS[name].fill).all()
                got, value = got[:, :images].permute(1, 2, 0), value.permute(1, 2, 0)
            fill = 5 if name == "input_ids" else KEYS[name].fill
            assert torch.equal(got[..., mask], value), name
            assert (got[..., ~mask] == fill).all(), name


# -- right values by hand ------------------------------------------------------------------------


def three() -> Batch:
    """A text row of 2 tokens, an image row of 3, an image row of 1."""
    keys = {**BASE_KEYS, "types": Key("token"), "pixels": Key("packed"), "tiles": Key("padded", -1)}

    def one(ids, labels, positions, tiles, **more):
        fields = {
            "input_ids": torch.tensor(ids),
            "labels": torch.tensor(labels),
            "loss_weight": torch.tensor([float(label != IGNORE) for label in labels]),
            "positions": torch.tensor(positions),
            "tiles": torch.tensor(tiles),
        }
        return Example(fields | {n: torch.tensor(v) for n, v in more.items()}, keys)

    return Batch.of(
        [
            one([10, 11], [IGNORE, 11], [[0, 1], [0, 1]], [[1]]),
            one(
                [20, 21, 22],
                [IGNORE, IGNORE, 22],
                [[0, 1, 2], [0, 1, 1]],
                [[2, 3]],
                types=[0, 1, 0],
                pixels=[[0.5], [0.6]],
            ),
            one([30], [IGNORE], [[0], [0]], [[4], [5]], types=[1], pixels=[[0.7]]),
        ]
    )


def lists(out: dict[str, torch.Tensor]) -> dict[str, list]:
    return {name: value.tolist() for name, value in out.items() if value.dtype != torch.float32}


TILES = [[[1, -1], [-1, -1]], [[2, 3], [-1, -1]], [[4, -1], [5, -1]]]


def test_pack_by_hand():
    out = three().pack()
    assert out.pop("lengths").tolist() == three().lengths
    assert lists(out) == {
        "input_ids": [[10, 11, 20, 21, 22, 30]],
        "labels": [[IGNORE, 11, IGNORE, IGNORE, 22, IGNORE]],
        "positions": [[[0, 1, 0, 1, 2, 0]], [[0, 1, 0, 1, 1, 0]]],
        "types": [[0, 0, 0, 1, 0, 1]],
        "tiles": TILES,
    }
    assert out["loss_weight"].tolist() == [[0, 1, 0, 0, 1, 0]]
    assert torch.equal(out["pixels"], torch.tensor([[0.5], [0.6], [0.7]]))


def test_pad_right_by_hand():
    out = three().pad(pad_id=99)
    assert lists(out) == {
        "input_ids": [[10, 11, 99], [20, 21, 22], [30, 99, 99]],
        "labels": [[IGNORE, 11, IGNORE], [IGNORE, IGNORE, 22], [IGNORE, IGNORE, IGNORE]],
        "positions": [[[0, 1, 0], [0, 1, 2], [0, 0, 0]], [[0, 1, 0], [0, 1, 1], [0, 0, 0]]],
        "types": [[0, 0, 0], [0, 1, 0], [1, 0, 0]],
        "tiles": TILES,
        "attention_mask": [[1, 1, 0], [1, 1, 1], [1, 0, 0]],
    }
    assert out["loss_weight"].tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert torch.equal(out["pixels"], torch.tensor([[0.5], [0.6], [0.7]]))


def test_pad_left_by_hand():
    out = three().pad(pad_id=99, left=True)
    assert lists(out) == {
        "input_ids": [[99, 10, 11], [20, 21, 22], [99, 99, 30]],
        "labels": [[IGNORE, IGNORE, 11], [IGNORE, IGNORE, 22], [IGNORE, IGNORE, IGNORE]],
        "positions": [[[0, 0, 1], [0, 1, 2], [0, 0, 0]], [[0, 0, 1], [0, 1, 1], [0, 0, 0]]],
        "types": [[0, 0, 0], [0, 1, 0], [0, 0, 1]],
        "tiles": TILES,  # only tokens have a side to pad
        "attention_mask": [[0, 1, 1], [1, 1, 1], [0, 0, 1]],
    }
    assert out["loss_weight"].tolist() == [[0, 0, 1], [0, 0, 1], [0, 0, 0]]


def test_tokens_in_the_first_dimension_by_hand():
    """Row 0 has 1 token and 2 images, row 1 has 2 tokens and 1 image."""
    column = Ragged(Key("token", dim=0), [torch.tensor([[1, 2]]), torch.tensor([[3], [4]])])
    assert column.padded().tolist() == [[[1, 2], [0, 0]], [[3, 0], [4, 0]]]
    assert column.padded(left=True).tolist() == [[[0, 0], [1, 2]], [[3, 0], [4, 0]]]
    assert column.packed().tolist() == [[1, 2], [3, 0], [4, 0]]


def test_text_rows_alone_have_no_image_key():
    text = three().select([0])
    own = {"input_ids", "labels", "loss_weight", "positions", "types", "tiles"}
    assert set(text.pack()) == own | {"lengths"}


# -- what is refused -----------------------------------------------------------------------------


def test_a_processor_key_without_a_kind_is_an_error():
    fields = {"input_ids": torch.zeros(2, dtype=torch.long), "aspect_ratios": torch.ones(1, 2)}
    with pytest.raises(KeyError, match="aspect_ratios"):
        Example(fields, BASE_KEYS)


def test_a_token_key_of_another_length_is_an_error():
    fields = {"input_ids": torch.zeros(3, dtype=torch.long), "labels": torch.zeros(2)}
    with pytest.raises(ValueError, match="labels: 2 values for 3 tokens"):
        Example(fields, BASE_KEYS)


def test_columns_of_two_kinds_do_not_join():
    with pytest.raises(ValueError, match="two kinds"):
        Ragged(Key("token", fill=1), []).extend(Ragged(Key("token", fill=2), []))


def test_joined_columns_hold_the_rows_of_both():
    one, two = (Ragged(Key("packed"), [torch.full((n, 2), n)]) for n in (1, 2))
    packed = one.extend(two).packed()
    assert packed is not None
    assert packed.tolist() == [[1, 1], [2, 2], [2, 2]]


def test_a_padded_key_that_one_row_lacks_is_an_error():
    column = Ragged(Key("padded"), [torch.ones(2, 2), None])
    with pytest.raises(ValueError, match="every row"):
        column.padded()


def test_a_batch_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        Batch.of([])


def test_a_copy_to_the_host_is_waited_for():
    waits = []

    class OnDevice:
        def to(self, device, non_blocking=False):
            waits.append((str(device), not non_blocking))
            return self

    row: Any = OnDevice()
    column = Ragged(Key("token"), [row])
    column.to("cpu")
    column.to("cuda")
    assert waits == [("cpu", True), ("cuda", False)]
