"""The page of `vireo view`; `view.js` beside it draws what the data holds."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from vireo.report.page import render


def page(data: dict[str, Any]) -> str:
    """The whole page. No script but its own may run: the policy has its hash."""
    script = Path(__file__).with_name("view.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"script-src 'sha256-{digest}'" + ("; connect-src 'self'" if data["live"] else "")
    embedded = htmlsafe_json_dumps(data)
    name = data["name"]
    return render(_PAGE, name=name, policy=policy, data=embedded, script=Markup(script))


_PAGE = """{% extends "base" %}
{% block policy %}; {{ policy|safe }}{% endblock %}
{% block title %}Run {{ name }}{% endblock %}
{% block style %}
body { max-width: none; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: .8rem; }
.chart { margin: 0; font-size: .8rem; }
.chart path { fill: none; stroke: var(--bar); stroke-width: 1.5; }
.chart line { stroke: var(--soft); }
summary { cursor: pointer; margin: .5rem 0; }
#bar { position: sticky; top: 0; background: var(--page); padding: .5rem 0; z-index: 1;
  display: flex; flex-wrap: wrap; gap: .4rem 1.2rem; align-items: center; }
#slider { flex: 1 1 16rem; }
.samples { display: flex; gap: .8rem; overflow-x: auto; align-items: flex-start; }
.sample { flex: 1 0 19rem; max-width: 45rem; border: 1px solid var(--line); border-radius: 8px;
  padding: .6rem; }
.said, .tokens { white-space: pre-wrap; margin: 0 0 .5rem; }
.tokens { font: .86rem/1.6 ui-monospace, Consolas, "DejaVu Sans Mono", monospace; }
.tokens span { unicode-bidi: isolate; border-radius: 2px; }
.tokens .unmasked { text-decoration: underline dotted; opacity: .6; }
img { max-width: 9rem; max-height: 9rem; vertical-align: top; margin: .2rem; cursor: zoom-in; }
img.large { max-width: 100%; max-height: none; cursor: zoom-out; }
{% endblock %}
{% block body %}
<h1>{{ name }}</h1>
<p class="card bad" id="fault" hidden></p>
<div id="curves"></div>
<div id="bar" hidden>
<label>step <b id="step"></b></label><input type="range" id="slider" min="0" value="0">
<span class="soft" id="which"></span>
<label>colour <select id="colour"><option value="difference">engine - trainer</option>
<option value="advantage">advantage</option><option value="probability">trainer's probability
</option><option value="none">none</option></select></label>
<label>groups <select id="kind"><option value="">all</option><option value="mixed">mixed</option>
<option value="right">all right</option><option value="wrong">all wrong</option></select></label>
<label><input type="checkbox" id="sort"> largest difference first</label>
<span id="legend" class="tokens"></span></div>
<div id="groups"></div>
<script type="application/json" id="data">{{ data }}</script>
<script>{{ script }}</script>
{% endblock %}
"""
