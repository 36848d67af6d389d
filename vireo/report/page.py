"""Self-contained HTML pages: no script, no request, everything escaped, light and dark."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence
from typing import Any

from PIL import Image

THUMBNAIL = 448  # longest side in pixels

# Nothing but the page itself may load, and no script may run, whatever a row holds.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

_STYLE = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #fff; --line: #dde1e7; --text: #1c2330; --soft: #5b6575;
  --trained: #0f6b34; --trained-bg: #c9f2d6; --image: #6d32c9; --image-bg: #ecdfff;
  --masked: #4a5362; --masked-bg: #eef0f4; --bad: #b3261e; --bad-bg: #fde7e5; --bar: #3b78d8; }
@media (prefers-color-scheme: dark) { :root {
  --page: #11151b; --card: #1a2028; --line: #313a46; --text: #e6eaf0; --soft: #9aa5b4;
  --trained: #8ff0b0; --trained-bg: #12402a; --image: #d3b8ff; --image-bg: #3a2363;
  --masked: #b6bfcc; --masked-bg: #262e39; --bad: #ff9d94; --bad-bg: #4a1d1a; --bar: #6ca0f2; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 4rem; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
main { max-width: 76rem; margin: 0 auto; padding: 1.5rem 1.25rem 3rem; }
h1 { font-size: 1.5rem; margin: 0; letter-spacing: -.01em; }
h2 { font-size: 1.05rem; margin: 0 0 .6rem; }
h3 { font-size: .85rem; margin: 1rem 0 .3rem; color: var(--soft); font-weight: 600; }
p { margin: .25rem 0; }
.soft, figcaption { color: var(--soft); }
code, .tokens { font-family: ui-monospace, "SF Mono", Consolas, "DejaVu Sans Mono", monospace; }
code { font-size: .9em; }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.1rem 0; }
.tile { flex: 1 1 8rem; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; padding: .6rem .9rem; }
.tile b { display: block; font-size: 1.45rem; line-height: 1.25; font-weight: 650; }
.tile.bad { background: var(--bad-bg); border-color: var(--bad); }
.tile.bad b { color: var(--bad); }
.tile.good b { color: var(--trained); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 1rem 1.15rem; margin: 0 0 1rem; min-width: 0; }
.card:focus-visible, a:focus-visible { outline: 3px solid var(--bar); outline-offset: 2px; }
.bad-text { color: var(--bad); }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 11px system-ui, "DejaVu Sans", sans-serif; }
svg rect { fill: var(--bar); }
svg line { stroke: var(--line); }
a { color: inherit; }
"""


def escape(value: Any) -> str:
    """Text that is safe inside an element and an attribute; control characters made visible."""
    return html.escape(plain(str(value)))


def plain(text: str) -> str:
    """Text without characters that could steer a terminal or turn the reading direction."""
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(char: str) -> str:
    return char if char.isprintable() else repr(char)[1:-1]


def document(title: str, body: str, style: str = "") -> str:
    """One whole page."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def tiles(items: Iterable[tuple[str, str, str]]) -> str:
    """Large figures in a row: (label, value, "" or "good" or "bad")."""
    made = [
        f'<div class="tile {tone}"><b>{escape(value)}</b><span class="soft">{escape(label)}</span>'
        "</div>"
        for label, value, tone in items
    ]
    return f'<div class="tiles">{"".join(made)}</div>'


def histogram(title: str, edges: Sequence[float], counts: Sequence[int]) -> str:
    """Bars as inline SVG: `counts[i]` values from `edges[i]` to below `edges[i + 1]`."""
    width, height, base = 560, 150, 126
    top = max([*counts, 1])
    step = min(70, width / max(1, len(counts)))
    bars, labels = [], []
    every = -(-len(edges) // 9)  # labels that do not touch
    for i, count in enumerate(counts):
        tall = max(1.5, 108 * count / top) if count else 0
        bars.append(
            f'<rect x="{i * step + 1:.1f}" y="{base - tall:.1f}" width="{step - 2:.1f}" '
            f'height="{tall:.1f}" rx="2"><title>{_edge(edges[i])} to {_edge(edges[i + 1])}: '
            f"{count:,}</title></rect>"
        )
    for i in range(0, len(edges), every):
        anchor = "start" if i == 0 else "end" if i * step > width - 20 else "middle"
        labels.append(
            f'<text x="{i * step:.1f}" y="{base + 16}" text-anchor="{anchor}">'
            f"{_edge(edges[i])}</text>"
        )
    return (
        f'<figure style="margin:.4rem 0"><svg viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}"><text x="0" y="10">{top:,}</text>{"".join(bars)}'
        f'<line x1="0" x2="{width}" y1="{base}" y2="{base}"/>{"".join(labels)}</svg>'
        f"<figcaption>{escape(title)}</figcaption></figure>"
    )


def _edge(value: float) -> str:
    return f"{value:,.0f}"


def data_uri(image: Image.Image) -> str:
    """The picture inside the page, made smaller where its longest side passes THUMBNAIL."""
    small = image.convert("RGB")
    small.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    small.save(file, "PNG", optimize=True)
    kind = "png"
    if file.tell() > 60_000:  # a photograph
        file = io.BytesIO()
        small.save(file, "JPEG", quality=88)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
