"""The engine's side of a prompt: what a request's ids or text and its pictures become."""

from __future__ import annotations

from typing import Any

import torch

from vireo.data.prompt import Prompt
from vireo.data.ragged import IGNORE, Example
from vireo.data.render import Renderer, split_at
from vireo.data.typed import MARK
from vireo.errors import RowError


def received(
    renderer: Renderer, pictures: list[Any], *, text: str = "", ids: list[int] | None = None
) -> Prompt:
    """The prompt of a request: `text`, or `ids` with one placeholder an image, and its pictures.

    Ids stay as they are, but for the placeholders. RowError: there are more or fewer placeholders
    than pictures, or ids alone do not say what to expand in this family (it takes text).
    """
    family = renderer.family
    if ids is None:
        _same_number(text.count(family.placeholder) if family.placeholder else 0, pictures)
        before, after = family.around
        if pictures:
            placeholder = family.placeholder or ""
            text = text.replace(placeholder, before + placeholder + after)
        out = renderer.call(text, pictures)
        return _prompt(renderer, out, out["input_ids"][0].tolist(), text, pictures)
    if pictures and family.forms["embedded"] != "ids":
        raise RowError("template", f"{family.name} takes a prompt with pictures as text")
    if pictures and not family.expands:  # other keys depend on where images stand
        text = renderer.tokenizer.decode(ids)
        _same_number(text.count(family.placeholder or ""), pictures)
        out = renderer.call(text, pictures)
        if out["input_ids"][0].tolist() != ids:
            raise RowError("template", "the text of the prompt's ids has other ids")
        return _prompt(renderer, out, ids, text, pictures)
    return _spliced(renderer, ids, pictures)


def _spliced(renderer: Renderer, ids: list[int], pictures: list[Any]) -> Prompt:
    """The ids with each placeholder replaced by what the processor makes of its picture."""
    placeholder = renderer.family.placeholder or ""
    short = renderer.tokenizer.encode(placeholder, add_special_tokens=False) if pictures else []
    places = _find(ids, short)
    _same_number(len(places), pictures)
    out = renderer.call(f"{MARK}{placeholder}{MARK}" * len(pictures) or ".", pictures)
    runs = split_at(out["input_ids"][0].tolist(), renderer.mark_id)
    keys = {n: k for n, k in renderer.family.keys.items() if k.kind == "token" and n in out}
    full: list[int] = []
    columns: dict[str, list] = {name: [] for name in keys}
    last = 0
    for place, (start, expanded) in zip([*places, len(ids)], [*runs[1::2], (0, [])]):
        full += ids[last:place] + expanded
        for name, column in columns.items():
            column += [keys[name].fill] * (place - last)
            column += out[name][0, start : start + len(expanded)].tolist()
        last = place + len(short)
    made = dict(out) | {"input_ids": torch.tensor([full])}
    made |= {name: torch.tensor([column]) for name, column in columns.items()}
    return _prompt(renderer, made, ids, "", pictures)


def _find(ids: list[int], wanted: list[int]) -> list[int]:
    """Where `wanted` stands in `ids`, without overlaps."""
    places, at = [], 0
    while wanted and at <= len(ids) - len(wanted):
        if ids[at : at + len(wanted)] == wanted:
            places.append(at)
            at += len(wanted)
        else:
            at += 1
    return places


def _same_number(places: int, pictures: list[Any]) -> None:
    if places != len(pictures):
        raise RowError("placeholder_count", f"{len(pictures)} pictures for {places} placeholders")


def _prompt(
    renderer: Renderer, out: dict[str, Any], ids: list[int], text: str, pictures: list[Any]
) -> Prompt:
    fields = {"input_ids": out["input_ids"][0]}
    for name, key in renderer.family.keys.items():
        if name in out:
            fields[name] = out[name] if key.kind == "packed" else out[name][0]
    fields["labels"] = torch.full_like(fields["input_ids"], IGNORE)
    fields["loss_weight"] = torch.zeros(len(fields["input_ids"]))
    fields["positions"] = renderer.positions(fields)
    example = Example(fields, renderer.keys, images=len(pictures))
    return Prompt(example, ids, text, pictures)
