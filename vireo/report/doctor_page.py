"""The doctor's report as one page."""

from __future__ import annotations

from typing import Any

from vireo.report.doctor_sections import Section, headline, percent, sections
from vireo.report.page import document, escape, histogram, tiles

_STYLE = """
.columns { columns: 2; column-gap: 1rem; }
@media (max-width: 52rem) { .columns { columns: 1; } }
.columns .card { break-inside: avoid; display: inline-block; width: 100%; }
dl { display: grid; grid-template-columns: fit-content(55%) minmax(0, 1fr);
  gap: .2rem 1rem; margin: 0; }
dt { color: var(--soft); }
dd { margin: 0; font-variant-numeric: tabular-nums; }
ul { margin: .2rem 0 .2rem; padding-left: 1.1rem; }
li { font-size: .85rem; }
.refused h3 { color: var(--bad); }
"""


def page(report: dict[str, Any]) -> str:
    """The whole page, from the report alone."""
    first, *others = sections(report)
    cards = "".join(map(_card, others))
    names = "<br>".join(f"<code>{escape(file['file'])}</code>" for file in report["files"])
    model = f" for <code>{escape(report['model'])}</code>" if report["model"] else ""
    bad = report["rows"]["bad"]
    body = (
        f"<header><h1>{escape(headline(report))}</h1>"
        f'<p class="soft">{names}{model}</p></header>{tiles(_figures(report))}'
        f"{_card(first, 'refused') if bad else ''}"
        f'<div class="columns">{cards}</div>'
    )
    return document(f"Doctor: {headline(report)}", body, _STYLE)


def _figures(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows, lengths = report["rows"], report["lengths"]
    found = [
        ("bad rows", f"{rows['bad']:,}", "bad" if rows["bad"] else "good"),
        ("rows", f"{rows['total']:,}", ""),
        ("distinct images", f"{report['images']['distinct']:,}", ""),
        ("rows without an image", percent(rows["text_only_share"]), ""),
    ]
    if lengths["per_row"]:
        found.append(
            (f"{lengths['unit']} a row (median)", f"{lengths['per_row']['median']:,g}", "")
        )
    if "trained_share" in lengths:
        found.append(("of the tokens trained", percent(lengths["trained_share"]), ""))
    if report["steps"]:
        found.append(("optimizer steps", f"{report['steps']['total']:,}", ""))
    if report["micro_batches"] and report["micro_batches"]["packed"]:
        filled = percent(report["micro_batches"]["packed"]["filled"])
        found.append(("of the token budget filled", filled, ""))
    return found


def _card(section: Section, kind: str = "") -> str:
    facts = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in section.facts
    )
    charts = "".join(
        histogram(title, chart["edges"], chart["counts"])
        for title, chart in section.charts
        if chart["counts"]
    )
    lists = ""
    for heading, lines in section.lists:
        items = "".join(f"<li>{escape(line)}</li>" for line in lines)
        lists += f"<h3>{escape(heading)}</h3><ul>{items}</ul>"
    body = (f"<dl>{facts}</dl>" if facts else "") + charts + lists
    return (
        f'<section class="card {kind}" tabindex="0"><h2>{escape(section.title)}</h2>'
        f"{body}</section>"
    )
