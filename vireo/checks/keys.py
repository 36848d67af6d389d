"""What the processor returns besides ids: known, joined rightly, and used."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vireo.checks.joined import image_rows
from vireo.checks.report import Cannot, Finding, listed
from vireo.checks.subject import Subject
from vireo.data.conversation import Conversation
from vireo.data.ragged import Batch
from vireo.families import Key

_OF_ALL = {"input_ids", "attention_mask"}


def keys_are_known(subject: Subject) -> Finding:
    """The entry has every key that the processor returns, and none that it never returns."""
    _need_processor(subject)
    returned: set[str] = set()
    for row in subject.drawn:
        subject.renderer.example(row)
        returned |= set(subject.processor.returned)
    declared = set(subject.family.keys)
    return listed(
        [
            f"{name}: the processor returns it, and the entry has no such key"
            for name in sorted(returned - declared - _OF_ALL)
        ]
        + [
            f"{name}: in the entry, but the processor never returns it"
            for name in sorted(declared - returned)
        ]
    )


def rows_are_the_processors(subject: Subject) -> Finding:
    """Ids and every key of a row are what the plain processor makes of the same text and pictures.

    Its ids may be parted otherwise where an answer begins inside a token; they spell the same text.
    """
    wrong = []
    tokens = {n for n, key in subject.family.keys.items() if key.kind == "token"} | _OF_ALL
    for row in subject.drawn:
        wanted = subject.plain_inputs(row)
        for example in subject.examples_of(row):
            found = Batch.of([example]).pad(subject.renderer.pad_id)
            names = set(wanted) & (set(subject.family.keys) | _OF_ALL)
            if not torch.equal(found["input_ids"], wanted["input_ids"]):
                texts = [
                    subject.renderer.tokenizer.decode(ids["input_ids"][0])
                    for ids in (found, wanted)
                ]
                if texts[0] == texts[1]:
                    names -= tokens
            for name in sorted(names):
                if name not in found:
                    wrong.append(f"{row.where}: {name} is missing")
                elif place := _differ(found[name], wanted[name]):
                    wrong.append(f"{row.where}: {name} {place}")
    return listed(wrong)


def joined_as_the_processor_joins(subject: Subject) -> Finding:
    """Dimension and fill of each key: rows padded together are what the processor makes of them in
    one call.

    Of keys with one value a token, the padding is compared. Of others, those that have the
    processor's shape: a family may join them in another way, if its model takes it.
    """
    _need_processor(subject)
    rows = image_rows(subject, subject.drawn)
    wrong: list[str] = []
    for members in _kinds(rows, subject.family.can_mix):
        texts, images, lengths = [], [], []
        for row in members:
            subject.renderer.example(row)
            texts += subject.processor.given["text"]
            images += subject.processor.given["images"]
            lengths.append(subject.processor.returned["input_ids"].shape[-1])
        wanted = _in_one_call(subject, texts, images)
        found = Batch.of(subject.examples(members)).pad(subject.renderer.pad_id)
        for name in [n for n in subject.family.keys if n in wanted and n in found]:
            key = subject.family.keys[name]
            place = ""
            if key.kind == "token" and key.dim is None:
                place = _padding(wanted[name], key, lengths)
            elif key.kind != "token" and found[name].shape == wanted[name].shape:
                place = _differ(found[name], wanted[name])
            if place:
                wrong.append(f"{name} {place}")
    return listed(list(dict.fromkeys(wrong)))


def keys_survive(subject: Subject) -> Finding:
    """Every key of every row comes out of each batch operation as it went in."""
    examples = subject.examples(subject.rows)
    batch = Batch.of(examples)
    back = range(len(examples) - 1, -1, -1)
    trips = {
        "select": batch.select(range(len(examples))),
        "reorder": batch.select(back).select(back),
        "split and cat": Batch.cat(batch.split(3)),
        "pickle": pickle.loads(pickle.dumps(batch)),
    }
    wrong = [
        f"{example.where}: {name} changes in {trip}"
        for trip, after in trips.items()
        for example, other in zip(examples, after.examples())
        for name, value in example.fields.items()
        if name not in other.fields or _differ(other.fields[name], value)
    ]
    for packing in (True, False) if subject.family.can_pack else (False,):
        for micro_batch in subject.batches(examples, packing):
            wrong += _lost(micro_batch, packing, subject.renderer.pad_id)
    return listed(wrong)


def key_matters(subject: Subject, name: str) -> Finding:
    """Without the key the log-probabilities of a row change, or something raises."""
    rows = image_rows(subject, subject.drawn)
    key = subject.family.keys[name]
    values = [e.fields[name].flatten() for e in subject.examples(rows) if name in e.fields]
    if not values:
        return Finding(wrong="no row has it")
    largest = 0.0
    subject.processor.without = {name}
    try:
        for row in rows:
            without = subject.logprobs(subject.renderer.example(row))
            largest = max(largest, float((without - subject.alone(row)).abs().max()))
    except Exception:  # whatever a renderer or a model does without it, it is noticed
        return Finding()
    finally:
        subject.processor.without = set()
    if largest <= subject.close and len(torch.cat(values).unique()) == 1:
        raise Cannot(f"it is {values[0][0].item():g} everywhere in these rows")
    wrong = f"not used: dropping this {key.kind} key changes nothing"
    return Finding(largest, subject.close, above=True, wrong=wrong)


def _need_processor(subject: Subject) -> None:
    if not subject.family.has_vision:
        raise Cannot("a text family's tokenizer returns ids alone")
    if subject.family.remote:
        raise Cannot("the processor returns lists, which the renderer makes flat")


def _kinds(rows: list[Conversation], can_mix: bool) -> list[list[Conversation]]:
    """Rows that may share a micro-batch."""
    counts = sorted({len(row.images) for row in rows})
    return [rows] if can_mix else [[r for r in rows if len(r.images) == n] for n in counts]


def _in_one_call(subject: Subject, texts: list[str], images: list[list]) -> dict[str, Tensor]:
    tokenizer = subject.renderer.tokenizer
    side, tokenizer.padding_side = tokenizer.padding_side, "right"
    try:
        return dict(
            subject.processor.inner(
                text=texts,
                images=images,
                padding=True,
                add_special_tokens=False,
                return_tensors="pt",
            )
        )
    except Exception as error:  # not every processor takes rows of several sizes at once
        what = f"{type(error).__name__}: {str(error)[:80]}"
        raise Cannot(f"the processor takes no such rows in one call: {what}") from error
    finally:
        tokenizer.padding_side = side


def _differ(found: Tensor, wanted: Any) -> str:
    """Where two tensors first differ; '' where they are equal."""
    if not isinstance(wanted, Tensor):
        return f"is of type {type(wanted).__name__} by the processor"
    if found.shape != wanted.shape:
        return f"has shape {tuple(found.shape)}, the processor's has {tuple(wanted.shape)}"
    at = (found != wanted).nonzero()
    if not len(at):
        return ""
    place = tuple(at[0].tolist())
    return f"is {found[place].item():g} at {place}, the processor's {wanted[place].item():g}"


def _padding(wanted: Tensor, key: Key, lengths: list[int]) -> str:
    """How the processor pads a token key [B, L] otherwise than the entry; '' if it does not."""
    for row, length in zip(wanted, lengths):
        if (row[length:] != key.fill).any():
            return f"is padded with {key.fill:g}, by the processor with {row[-1].item():g}"
    return ""


def _lost(batch: Batch, packing: bool, pad_id: int) -> Iterator[str]:
    """What of a micro-batch's rows cannot be found again in its packed or padded inputs."""
    inputs = batch.pack() if packing else batch.pad(pad_id)
    how = "packed" if packing else "padded"
    starts: dict[str, int] = {}
    for i, example in enumerate(batch.examples()):
        for name, value in example.fields.items():
            key = example.keys[name]
            whole = inputs[name]
            if name == "positions" and not packing:
                whole = whole.transpose(0, 1)  # [R, B, L]
            start = starts.get(name, 0)
            if key.kind == "padded" or (key.kind == "token" and not packing):
                whole, start, axis = whole[i], 0, key.axis
            else:
                axis = key.axis
                if key.kind == "token":  # a batch of one, just before the tokens
                    whole = whole.squeeze(axis if axis >= 0 else axis - 1)
                starts[name] = start + value.shape[axis]
            here = [slice(0, size) for size in value.shape]
            if value.dim():
                here[axis] = slice(start, start + value.shape[axis])
            if not whole[tuple(here)].equal(value):
                yield f"{example.where}: {name} is not in the {how} inputs"
