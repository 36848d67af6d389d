"""Bounds on the numbers of `metrics.jsonl`, and whether a run keeps them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One number of a run beside what it may be."""

    name: str
    found: float
    bound: str
    ok: bool


def check(phase: str, bounds: Sequence[dict[str, Any]], records: list[dict]) -> list[Finding]:
    """A bound has a `metric`, `at` (see `values`), and `min`, `max` or both, ends included."""
    findings = []
    for bound in bounds:
        low, high = bound.get("min", -math.inf), bound.get("max", math.inf)
        found = values(records, bound["metric"], bound["at"])
        # Of several numbers the one that is farthest out is shown; NaN keeps no bound.
        worst = max(found, key=lambda v: math.inf if math.isnan(v) else max(low - v, v - high))
        findings.append(
            Finding(
                f"{phase} {bound['metric']}, {bound['at']}",
                worst,
                " and ".join(f"{n} {bound[n]:.7g}" for n in ("min", "max") if n in bound),
                low <= worst <= high,
            )
        )
    return findings


def values(records: list[dict], metric: str, at: str) -> list[float]:
    """The numbers of a metric that a bound speaks of: at `step N`, at `every step`, or the mean of
    the `last N`. ValueError: the run has them not."""
    having = [record for record in records if metric in record]
    kind, _, number = at.partition(" ")
    if kind == "every":
        found = [record[metric] for record in having]
    elif kind == "step":
        found = [record[metric] for record in having if record["step"] == int(number)]
    elif kind == "last":
        found = [fmean(record[metric] for record in having[-int(number) :])] if having else []
    else:
        raise ValueError(f"at {at!r} is none of 'step N', 'every step' and 'last N'")
    if not found or (kind == "last" and len(having) < int(number)):
        raise ValueError(f"metrics.jsonl has no {metric} at {at}: {len(having)} records have it")
    return found


def measured(bound: dict[str, Any], runs: list[list[dict]]) -> dict[str, Any]:
    """The bound with what `runs` gave. With a `margin` its ends are the least and greatest of
    that, moved out by the margin; without one they hold by definition and stay."""
    found = [[*values(records, bound["metric"], bound["at"])] for records in runs]
    made = bound | {"measured": [[min(v), max(v)] if len(v) > 1 else v[0] for v in found]}
    if "margin" in bound:
        flat = [value for v in found for value in v]
        ends = {"min": min(flat) - bound["margin"], "max": max(flat) + bound["margin"]}
        made |= {n: round(ends[n], 6) for n in ends if n in bound}
    return made
