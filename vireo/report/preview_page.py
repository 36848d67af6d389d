"""The preview for a terminal, and as one page."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, groupby

from vireo.errors import RowError
from vireo.report.page import plain, render
from vireo.report.preview import LINE_END, File

_CODES = {"trained": "1;32", "image": "35", "masked": "2", "bad": "31", "head": "1"}


def text(files: list[File], summary: str, colour: bool) -> str:
    """The whole preview. Without colours what is trained stands in brackets."""

    def paint(kind: str, words: str) -> str:
        if colour:
            return f"\x1b[{_CODES[kind]}m{words}\x1b[0m"
        return f"[[ {words} ]]" if kind == "trained" else words

    def lines() -> Iterator[str]:
        yield "  ".join(paint(kind, kind) for kind in ("trained", "masked", "image"))
        for facts, rows in files:
            yield f"\n{plain(facts)}"
            for row in rows:
                if isinstance(row, RowError):
                    yield paint("bad", f"refused: {plain(str(row))}")
                    continue
                yield f"\n{paint('head', plain(row.where))}\n{row.facts}"
                for number, image in enumerate(row.images, 1):
                    yield f"image {number}: {plain('; '.join([image.name, *image.facts]))}"
                ends = accumulate((LINE_END in piece.text for piece in row.tokens), initial=0)
                for _, line in groupby(zip(ends, row.tokens), key=lambda pair: pair[0]):
                    kinds = groupby((piece for _, piece in line), key=lambda piece: piece.kind)
                    yield " ".join(paint(k, " ".join(p.label for p in of)) for k, of in kinds)
        yield f"\n{plain(summary)}"

    return "\n".join(lines()) + "\n"


def page(files: list[File], summary: str) -> str:
    """The whole page."""
    return render(_PAGE, files=files, summary=summary, line_end=LINE_END)


_PAGE = """{% extends "base" %}
{% block title %}Preview: what the trainer sees{% endblock %}
{% block style %}
.pictured { display: grid; grid-template-columns: minmax(0, 15rem) minmax(0, 1fr); gap: 1rem; }
@media (max-width: 46rem) { .pictured { display: block; } }
.tokens { font: .86rem/1.95 ui-monospace, Consolas, "DejaVu Sans Mono", monospace; }
.tokens span { padding: .1rem .16rem; border-radius: 3px; unicode-bidi: isolate; }
.trained { color: light-dark(#0f6b34, #8ff0b0); background: light-dark(#c9f2d6, #12402a);
  font-weight: 600; }
.masked { color: light-dark(#4a5362, #b6bfcc); background: light-dark(#eef0f4, #262e39); }
.image { color: light-dark(#6d32c9, #d3b8ff); background: light-dark(#ecdfff, #3a2363); }
img { max-width: 100%; min-width: 4rem; image-rendering: pixelated;
  border: 1px solid var(--line); }
{% endblock %}
{% block body %}
<h1>What the trainer sees</h1>
<p class="soft">{{ summary }}</p>
<p class="tokens"><span class="trained">trained</span> <span class="masked">masked</span>
<span class="image">image x 64</span> &middot; space &crarr; line end</p>
{% for facts, rows in files %}
<h2>{{ facts }}</h2>
{% for row in rows %}
{% if row.reason is defined %}
<article class="card bad">refused: {{ row }}</article>
{% else %}
<article class="card"><h3>{{ row.where }}</h3><p class="soft">{{ row.facts }}</p>
<div{% if row.images %} class="pictured"{% endif %}><div>
{% for image in row.images %}
<figure>{% for picture in image.pictures %}<img src="{{ picture|data_uri }}" alt="">{% endfor %}
<figcaption><b>image {{ loop.index }}</b>,
{{ "as the model sees it" if image.rebuilt else "before the processor" }}<br>{{ image.name }}
{% for fact in image.facts %}<br>{{ fact }}{% endfor %}</figcaption></figure>
{% endfor %}
</div><div class="tokens">
{% for piece in row.tokens -%}
<span class="{{ piece.kind }}">{{ piece.label }}</span>
{%- if line_end in piece.text %}<br>{% endif %}
{%- endfor %}
</div></div></article>
{% endif %}
{% endfor %}
{% endfor %}
{% endblock %}
"""
