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
from vireo.families import FAMILIES, Family, Key

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
            assert got.keys[name] == one.keys[name]
        for name in set(got.fields) - set(one.fields):
            key = got.keys[name]
            assert key.kind == "token"  # never a pixel that the row does not have
            assert got.fields[name].shape[key.axis] == len(one)
            assert (got.fields[name] == key.fill).all()


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


# -- every family's own keys ---------------------------------------------------------------------


def tensor(number: int, key: Key, size: int, more: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Values that tell the row's number: `size` along the key's axis, `more` beside it."""
    axis = key.axis if key.axis >= 0 else len(more) + 1 + key.axis
    shape = torch.Size([*more[:axis], size, *more[axis:]])
    values = (number * 1000 + torch.arange(shape.numel()) % 997).reshape(shape)
    return values % 2 == 0 if dtype == torch.bool else values.to(dtype)


@st.composite
def rows_of(draw, family: Family) -> list[Example]:
    """Rows with the keys of a family: images in any number (or one number, where rows cannot mix),
    any number of crops, text rows with and without their own values of the token keys."""
    counts = st.integers(0, 3)
    if not family.can_mix:
        counts = st.just(draw(counts))
    drawn = draw(st.lists(st.tuples(st.integers(1, 6), counts), min_size=1, max_size=5))
    chance = draw(st.randoms(use_true_random=True))
    beside = {}  # the dimensions of each key beside its axis, whether rows differ in them, its type
    for name, key in family.keys.items():
        least = -key.axis - 1 if key.axis < 0 else key.axis
        more = [chance.randint(1, 3) for _ in range(least + chance.randint(0, 2))]
        free = key.kind != "token" or key.dim is not None
        beside[name] = more, free, chance.choice([torch.float32, torch.int64, torch.bool])
    made, keys = [], {**BASE_KEYS, **family.keys}
    for number, (length, images) in enumerate(drawn):
        fields = {n: tensor(number, k, length, [], torch.int64) for n, k in BASE_KEYS.items()}
        fields["loss_weight"] = fields["loss_weight"].float()
        dimensions = [4 if family.positions == "mrope" else 1]
        fields["positions"] = tensor(number, keys["positions"], length, dimensions, torch.int64)
        for name, key in family.keys.items():
            if not images and (key.kind != "token" or chance.random() < 0.5):
                continue
            more, free, dtype = beside[name]
            more = [chance.randint(1, 4) for _ in more] if free else more
            size = length if key.kind == "token" else images * chance.randint(1, 3)
            fields[name] = tensor(number, key, size, more, dtype)
        made.append(Example(fields, keys, images, f"row {number}"))
    return made


def same(examples: list[Example], data) -> tuple[Batch, list[Example]]:
    """A batch after a few operations, and the rows that it must have now."""
    batch, wanted = Batch.of(examples), examples
    for _ in range(data.draw(st.integers(1, 4))):
        what = data.draw(st.sampled_from(OPERATIONS))
        batch, wanted = what(batch, wanted, data)
        check(batch, wanted)
    return batch, wanted


def reorder(batch: Batch, wanted: list[Example], data) -> tuple[Batch, list[Example]]:
    order = data.draw(st.permutations(range(len(wanted))))
    return batch.select(order), [wanted[i] for i in order]


def select(batch: Batch, wanted: list[Example], data) -> tuple[Batch, list[Example]]:
    places = st.lists(st.integers(0, len(wanted) - 1), min_size=1, max_size=6)
    chosen = data.draw(places)
    return batch.select(chosen), [wanted[i] for i in chosen]


def cut(batch: Batch, wanted: list[Example], data) -> tuple[Batch, list[Example]]:
    start = data.draw(st.integers(0, len(wanted) - 1))
    stop = data.draw(st.integers(start + 1, len(wanted)))
    return batch[start:stop], wanted[start:stop]


def part_and_join(batch: Batch, wanted: list[Example], data) -> tuple[Batch, list[Example]]:
    """Over so many ranks, and back; ranks without rows have empty parts."""
    parts = batch.split(data.draw(st.integers(1, 7)))
    done = 0
    for part in parts:
        check(part, wanted[done : done + len(part)])
        done += len(part)
    return Batch.cat(parts), wanted


def join(batch: Batch, wanted: list[Example], data) -> tuple[Batch, list[Example]]:
    """With the rows of another batch, here some of its own."""
    other, more = select(batch, wanted, data)
    return Batch.cat([batch, other]), [*wanted, *more]


def send(batch: Batch, wanted: list[Example], data) -> tuple[Batch, list[Example]]:
    moved = batch.to("meta")
    assert moved.lengths == batch.lengths
    for name, column in moved.columns.items():
        for row, here in zip(column.rows, batch.columns[name].rows):
            assert (row is None) == (here is None)
            assert row is None or (row.device.type, row.shape) == ("meta", here.shape)
    return batch.to("cpu"), wanted


def store(batch: Batch, wanted: list[Example], data) -> tuple[Batch, list[Example]]:
    return pickle.loads(pickle.dumps(batch)), wanted


OPERATIONS = [reorder, select, cut, part_and_join, join, send, store]


def placed(row: torch.Tensor, shape: torch.Size, fill: float, at_end: int | None) -> torch.Tensor:
    """A tensor of fills with the row in its first corner, or at the end of one dimension."""
    wide = row.new_full(shape, fill)
    spans = [slice(size) for size in row.shape]
    if at_end is not None:
        spans[at_end] = slice(shape[at_end] - row.shape[at_end], None)
    wide[tuple(spans)] = row
    return wide


every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)


@every_family
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_familys_rows_are_what_they_were_after_any_operations(family, data):
    same(data.draw(rows_of(family)), data)


@every_family
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_familys_packed_rows_cut_apart_are_the_rows(family, data):
    batch, wanted = same(data.draw(rows_of(family)), data)
    out = batch.pack()
    assert out.pop("lengths").tolist() == [len(one) for one in wanted]
    cut_apart(out, wanted, packed=True)


@every_family
@settings(max_examples=12, deadline=None)
@given(data=st.data(), left=st.booleans())
def test_a_familys_padded_rows_are_the_rows_and_fills(family, data, left):
    batch, wanted = same(data.draw(rows_of(family)), data)
    out = batch.pad(pad_id=5, left=left)
    mask = out.pop("attention_mask")
    assert mask.sum(dim=1).tolist() == [len(one) for one in wanted]
    assert mask.shape == out["input_ids"].shape
    cut_apart(out, wanted, packed=False, left=left)


def cut_apart(out: dict, wanted: list[Example], packed: bool, left: bool = False) -> None:
    """Every value of every row stands where it must in the inputs, and fills everywhere else."""
    assert {name for one in wanted for name in one.fields} <= set(out)
    longest = max(len(one) for one in wanted)
    for name, value in out.items():
        key = wanted[0].keys[name]
        fill = 5 if name == "input_ids" and not packed else key.fill
        rows = [one.fields.get(name) for one in wanted]
        at_end = None
        if key.kind == "token" and packed:  # a batch of one just before the tokens
            batch_of_one = key.axis if key.axis >= 0 else value.dim() + key.axis - 1
            assert value.shape[batch_of_one] == 1
            pieces = value.squeeze(batch_of_one).split([len(one) for one in wanted], key.axis)
        elif key.kind == "packed":
            rows = [row for row in rows if row is not None]
            pieces = value.split([row.shape[key.axis] for row in rows], key.axis)
        else:
            pieces = value.transpose(0, 1) if name == "positions" else value
            at_end = key.axis if left and key.kind == "token" else None
            assert key.kind != "token" or pieces[0].shape[key.axis] == longest
        assert len(pieces) == len(rows)
        for piece, row in zip(pieces, rows):
            if row is None:  # a text row that came without its own values of a token key
                assert (piece == fill).all()
            else:
                assert torch.equal(piece, placed(row, piece.shape, fill, at_end)), name


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
