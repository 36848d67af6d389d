"""The doctor's report for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vireo.report.doctor_sections import headline, sections
from vireo.report.page import plain

_BARS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def text(report: dict[str, Any]) -> str:
    """The whole report; the number of bad rows is its first line."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: dict[str, Any]) -> Iterator[str]:
    yield headline(report)
    for section in sections(report):
        yield f"\n{section.title}"
        wide = min(44, max((len(name) for name, _ in section.facts), default=0))
        for name, value in section.facts:
            yield f"  {plain(name):<{wide}}  {plain(value)}"
        for title, chart in section.charts:
            if chart["counts"]:
                edges = chart["edges"]
                yield f"  {title}: {edges[0]:,} {_bars(chart['counts'])} {edges[-1]:,}"
        for heading, lines in section.lists:
            yield f"  {plain(heading)}"
            yield from (f"    {plain(line)}" for line in lines)


def _bars(counts: list[int]) -> str:
    top = max(counts)
    return "".join(_BARS[-(-8 * count // top)] for count in counts)
