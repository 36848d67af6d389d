"""The parity grid: every property that a family's entry and a model must have, one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata

import torch

import vireo
from vireo.checks.gradients import (
    every_parameter_learns,
    frozen_parts_cost_nothing,
    text_leaves_the_tower_alone,
)
from vireo.checks.joined import own_loss, packed_is_alone, padded_is_alone, rows_render, rows_run
from vireo.checks.keys import (
    joined_as_the_processor_joins,
    key_matters,
    keys_are_known,
    keys_survive,
    rows_are_the_processors,
)
from vireo.checks.labels import (
    labels_over_turns,
    labels_with_images,
    labels_with_system,
    labels_with_tools,
)
from vireo.checks.matters import (
    images_are_told_apart,
    order_of_images_matters,
    pixels_matter,
    positions_matter,
)
from vireo.checks.names import layer_classes, parts_cover_the_model, tokens_and_ids
from vireo.checks.report import Cannot, Finding, Report, Result, Status
from vireo.checks.saved import saved_is_loaded
from vireo.checks.starter import check_known
from vireo.checks.subject import Subject, open_subject
from vireo.errors import first_line


@dataclass(frozen=True)
class Property:
    """`needs`: properties without which this one says nothing; where one fails, it is left out."""

    group: str
    name: str
    measure: Callable[[Subject], Finding]
    needs: tuple[str, ...] = ()


RENDER = ("rows render",)
RUN = (*RENDER, "rows run alone")
JOIN = (*RUN, "alone = padded")
LEARN = (*JOIN, "every parameter learns")
GRID = (
    Property("rows", "rows render", rows_render),
    Property("rows", "rows run alone", rows_run, RENDER),
    Property("joined", "alone = padded", padded_is_alone, RUN),
    Property("joined", "alone = packed", packed_is_alone, RUN),
    Property("loss", "loss = the family's own", own_loss, RUN),
    Property("labels", "labels over turns", labels_over_turns, RENDER),
    Property("labels", "labels with a system turn", labels_with_system, RENDER),
    Property("labels", "labels with images", labels_with_images, RENDER),
    Property("labels", "labels with tools", labels_with_tools, RENDER),
    Property("keys", "keys are known", keys_are_known, RENDER),
    Property("keys", "rows = the processor's", rows_are_the_processors, RENDER),
    Property("keys", "joined as the processor joins", joined_as_the_processor_joins, RENDER),
    Property("keys", "keys survive every operation", keys_survive, RENDER),
    Property("positions", "positions matter", positions_matter, RUN),
    Property("pictures", "pixels matter", pixels_matter, RUN),
    Property("pictures", "order of images matters", order_of_images_matters, RUN),
    Property("pictures", "same-size images differ", images_are_told_apart, RUN),
    Property("entry", "tokens and ids exist", tokens_and_ids, RENDER),
    Property("entry", "layer classes exist", layer_classes),
    Property("entry", "parts cover the model", parts_cover_the_model),
    Property("gradients", "every parameter learns", every_parameter_learns, JOIN),
    Property("gradients", "text leaves the tower alone", text_leaves_the_tower_alone, JOIN),
    Property("gradients", "frozen parts cost nothing", frozen_parts_cost_nothing, LEARN),
    Property("weights", "saved = loaded", saved_is_loaded, RUN),
)


def check_family(
    model: str,
    rows: str | None = None,
    *,
    trust_remote_code: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Report:
    """The grid of a model folder, in float32 on this machine's CPU, or GPU if there is one.

    rows: a data file whose first rows stand in for drawn ones where pictures and texts of one's own
        say more. tell: called with a line about the model, and one for each result as it is there.
    InputError: no such model, no entry for its family (UnknownFamily has one to start from), or
        more weights than the device has memory for.
    """
    check_known(model)
    return run_grid(open_subject(model, rows, trust_remote_code, tell), tell)


def run_grid(subject: Subject, tell: Callable[[str], None] = lambda line: None) -> Report:
    """Every property of the subject; what one raises is its failure, not the grid's."""
    report = Report(
        model=subject.renderer.model_path,
        family=subject.family.name,
        parameters=subject.parameters,
        device=subject.device.type,
        date=time.strftime("%Y-%m-%d"),
        versions={"vireo": vireo.__version__}
        | {name: metadata.version(name) for name in ("torch", "transformers")},
    )
    # A GPU's convolutions would round float32 to 10 bits, each size of batch in another way.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for item in properties(subject):
            result = _result(item, subject, report.failed)
            report.results.append(result)
            tell(result.line)
    return report


def properties(subject: Subject) -> Iterator[Property]:
    """The grid, with one property more for each key of the entry."""
    for item in GRID:
        yield item
        if item.name == "keys survive every operation":
            for name in subject.family.keys:
                measure = partial(key_matters, name=name)
                yield Property("keys", f"{name} matters", measure, RUN)


def _result(item: Property, subject: Subject, failed: list[str]) -> Result:
    if missing := [name for name in item.needs if name in failed]:
        return Result(item.group, item.name, "cannot", why=f"{missing[0]!r} fails")
    try:
        found = item.measure(subject)
    except Cannot as reason:
        return Result(item.group, item.name, "cannot", why=str(reason))
    except Exception as error:  # a wrong entry can make a model raise anything
        return Result(
            item.group, item.name, "fail", why=f"{type(error).__name__}: {first_line(error)}"
        )
    status: Status = "pass" if found.holds else "fail"
    why = "" if found.holds else found.wrong
    return Result(item.group, item.name, status, found.figure, found.limit, found.above, why)
