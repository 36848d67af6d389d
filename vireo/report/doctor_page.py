"""The doctor's report for a terminal and as one page; both are made of the same sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vireo.report.page import plain, render

_BARS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def sections(report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each dict of the report, its keys as words: a title, (name, value) `facts`, (name, histogram)
    `charts` and (heading, lines) `lists`."""
    for key, values in report.items():
        if not isinstance(values, dict):
            continue
        facts, charts, lists = [], [], []
        for name, value in values.items():
            name = name if key == "bad_rows" else _label(name)  # whose keys are the reasons
            if isinstance(value, dict) and "counts" in value:
                charts.append((name, value))
            elif isinstance(value, dict) and "examples" in value:
                lines = [_words("", example) for example in value["examples"]]
                more = value["count"] - len(lines)
                lines += [f"and {more:,} more"] if more else []
                lists.append((f"{name}: {value['count']:,}", lines))
            else:
                facts.append((name, _words(name, value)))
        title = _label(key).capitalize()
        yield {"title": title, "facts": facts, "charts": charts, "lists": lists}


def _label(key: str) -> str:
    return key.replace("_", " ")


def _words(name: str, value: Any) -> str:
    """Any value in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{_label(k)}: {_words(k, v)}" for k, v in value.items()) or "none"
    if isinstance(value, list):
        return " and ".join(value)
    if isinstance(value, float) and name.endswith("share"):
        return f"{value:.1%}"
    return f"{value:,.12g}" if isinstance(value, int | float) else str(value or "none")


def headline(report: dict[str, Any]) -> str:
    return f"{report['rows']['bad']:,} of {report['rows']['total']:,} rows are bad"


def text(report: dict[str, Any]) -> str:
    """The whole report; the number of bad rows is its first line."""
    lines = [headline(report)]
    for section in sections(report):
        lines += ["", section["title"]]
        lines += [f"  {plain(name):<20}  {plain(value)}" for name, value in section["facts"]]
        for name, chart in section["charts"]:
            top, edges = max(chart["counts"]), chart["edges"]
            bars = "".join(_BARS[-(-8 * count // top)] for count in chart["counts"])
            lines.append(f"  {name:<20}  {edges[0]:,} {bars} {edges[-1]:,}")
        for heading, items in section["lists"]:
            lines += [f"  {plain(heading)}", *(f"    {plain(item)}" for item in items)]
    return "\n".join(lines) + "\n"


def page(report: dict[str, Any]) -> str:
    """The whole page, from the report alone."""
    return render(_PAGE, report=report, headline=headline(report), sections=sections(report))


_PAGE = """{% extends "base" %}
{% macro chart(name, edges, counts) %}
{% set top, step = counts|max, [70, 560 / counts|length]|min %}
<figure><svg viewBox="0 0 560 148" role="img" aria-label="{{ name }}">
<text y="10">{{ top }}</text>
{% for count in counts %}
{% set tall = 110 * count / top %}
<rect x="{{ step * loop.index0 + 1 }}" y="{{ 126 - tall }}" width="{{ step - 2 }}"
  height="{{ tall }}"><title>from {{ edges[loop.index0] }}: {{ count }}</title></rect>
{% endfor %}
{% for i in range(0, edges|length, 4) %}
<text x="{{ step * i }}" y="142">{{ edges[i] }}</text>
{% endfor %}
</svg><figcaption>{{ name }}</figcaption></figure>
{% endmacro %}
{% block title %}Doctor: {{ headline }}{% endblock %}
{% block style %}
.columns { columns: 2 22rem; }
.card { break-inside: avoid; }
th { text-align: left; min-width: 8rem; font-weight: normal; }
{% endblock %}
{% block body %}
<h1>{{ headline }}</h1>
<p class="soft">{{ report.files|join(", ") }}{% if report.model %} for {{ report.model }}{% endif %}
</p>
<div class="columns">
{% for section in sections %}
<section class="card{% if section.title == "Bad rows" and report.rows.bad %} bad{% endif %}">
<h2>{{ section.title }}</h2>
<table>{% for name, value in section.facts %}<tr><th>{{ name }}<td>{{ value }}{% endfor %}</table>
{% for name, histogram in section.charts %}{{ chart(name, **histogram) }}{% endfor %}
{% for heading, lines in section.lists %}
<h3>{{ heading }}</h3><ul>{% for line in lines %}<li>{{ line }}</li>{% endfor %}</ul>
{% endfor %}
</section>
{% endfor %}
</div>
{% endblock %}
"""
