"""What a climb found, as text for a terminal, as JSON, and as one page with a plot."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from vireo.report.page import plain, render
from vireo.rl.ladder import Report
from vireo.rl.mismatch import KINDS, NAMES, NEAR

_LOW, _HIGH = -8, 1  # powers of ten that plots reach
_MOST = 3000  # points of the plot


def as_json(report: Report) -> str:
    """Everything that the report holds; null for what is not finite."""
    made = json.dumps(asdict(report) | {"agrees": report.agrees, "verdict": report.verdict})
    finite = json.loads(made, parse_constant=lambda name: None)  # JSON has no infinity
    return json.dumps(finite, indent=1) + "\n"


def as_text(report: Report) -> str:
    lines = [f"{report.engine}; {len(report.tokens)} response tokens", ""]
    lines += [f"{r.name:<17} {r.state:<13} {plain(r.found)}".rstrip() for r in report.rungs]
    kinds, rows = _table(report)
    lines += ["", f"{'':<28}" + "".join(f"{kind:>14}" for kind in kinds)]
    lines += [f"{name:<28}" + "".join(f"{value:>14}" for value in row) for name, row in rows]
    if report.tried:
        lines += ["", f"{'swap':<28}{'mult error - 1':>16}{'largest gap':>14}{'rows':>6}"]
        lines += [
            f"{t.name:<28}{t.mult:>16.2e}{t.gap['max_abs']:>14.2e}{t.rows or '':>6}"
            for t in _ordered(report)
        ]
    return "\n".join([*lines, "", report.verdict]) + "\n"


def as_page(report: Report) -> str:
    kinds, rows = _table(report)
    step = max(1, len(report.tokens) // _MOST)
    width = max((place for _, place, _, _ in report.tokens), default=0) + 1
    points = [
        (kind, round(20 + 960 * (place + 0.5) / width, 1), round(_height(g - t), 1))
        for kind, place, g, t in report.tokens[::step]
    ]
    near = round(20 + 960 * min(NEAR, width) / width, 1)
    ticks = [(f"1e{power}", _height(10.0**power)) for power in range(_LOW, _HIGH + 1)]
    bars = [(t, round(100 * _share(t.mult), 1)) for t in _ordered(report)]
    return render(
        _PAGE, report=report, kinds=kinds, rows=rows, points=points, near=near, ticks=ticks,
        bars=bars, near_tokens=NEAR,
    )  # fmt: skip


def _table(report: Report) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Kinds of tokens that there are, and rows of figures: the gap, and the noise floor below."""
    gap, floor = report.base.gap, report.base.floor
    prefixes = {kind: "" if kind == "all" else f"{kind}/" for kind in KINDS}
    kinds = [kind for kind in KINDS if f"{prefixes[kind]}max_abs" in gap]
    rows = []
    for name in NAMES:
        for label, figures in ((name, gap), ("  noise floor", floor)):
            values = [figures[prefixes[kind] + name] for kind in kinds]
            rows.append((label, [_shown(name, value) for value in values]))
    return kinds, rows


def _shown(name: str, value: float) -> str:
    """Ratios as 1 and what they are more or less: `1 + 2.1e-07`."""
    if name.endswith("ratio") or "mult" in name or name == "seq_ratio_error":
        return f"1{value - 1:+.2e}"
    return f"{value:.2e}"


def _ordered(report: Report) -> list[Any]:
    return [report.base, *sorted(report.tried, key=lambda t: t.mult)]


def _share(value: float) -> float:
    """Of the way from 1e-8 to 10, by powers of ten; 0 to 1."""
    power = math.log10(max(abs(value), 10.0**_LOW)) if math.isfinite(value) else _HIGH
    return min(1.0, (power - _LOW) / (_HIGH - _LOW))


def _height(gap: float) -> float:
    return 290 - 280 * _share(gap)


_PAGE = """{% extends "base" %}
{% block title %}Mismatch{% endblock %}
{% block style %}
table { border-collapse: collapse; width: 100%; font-size: .85rem; }
td, th { text-align: left; padding: .15rem .6rem .15rem 0; vertical-align: top; }
td + td { font-variant-numeric: tabular-nums; }
.text { fill: #3b78d8; } .image_first { fill: #d8653b; } .image_later { fill: #b58900; }
line { stroke: var(--line); } .bar { background: var(--bar); height: .6rem; border-radius: 2px; }
{% endblock %}
{% block body %}
<h1>Mismatch of engine and trainer</h1>
<p class="soft">{{ report.engine }}; {{ report.tokens | length }} response tokens</p>
<div class="card{% if not report.agrees %} bad{% endif %}"><p>{{ report.verdict }}</p></div>
<div class="card"><h2>Ladder</h2><table>
{% for rung in report.rungs %}
<tr><td>{{ rung.name }}</td><td>{{ rung.state }}</td><td>{{ rung.found }}</td></tr>
{% endfor %}
</table></div>
<div class="card"><h2>Gap of each token, |engine - trainer|, by its place in the response</h2>
<svg viewBox="0 0 1000 310" role="img" aria-label="gap of each token">
{% for name, y in ticks %}
<line x1="20" x2="980" y1="{{ y }}" y2="{{ y }}"/><text x="0" y="{{ y }}">{{ name }}</text>
{% endfor %}
<line x1="{{ near }}" x2="{{ near }}" y1="0" y2="295" stroke-dasharray="4"/>
{% for kind, x, y in points %}<circle class="{{ kind }}" cx="{{ x }}" cy="{{ y }}" r="3"/>
{% endfor %}
</svg>
<p class="soft">Blue: text rows. Red: the first {{ near_tokens }} tokens of rows with images (left
of the dashed line). Yellow: their later tokens.</p></div>
<div class="card"><h2>Metrics, each with the trainer's own noise floor below</h2><table>
<tr><th></th>{% for kind in kinds %}<th>{{ kind }}</th>{% endfor %}</tr>
{% for name, row in rows %}
<tr><td>{{ name }}</td>{% for value in row %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% if report.tried %}
<div class="card"><h2>Swaps: mult error - 1 with one factor changed in the trainer</h2><table>
{% for tried, share in bars %}
<tr><td>{{ tried.name }}</td><td>{{ "%.2e" | format(tried.mult) }}</td>
<td width="40%"><div class="bar" style="width: {{ share }}%"></div></td>
<td>{{ tried.meaning }}</td></tr>
{% endfor %}
</table></div>
{% endif %}
{% endblock %}
"""
