"""The preview as one page."""

from __future__ import annotations

from vireo.errors import RowError
from vireo.report.page import data_uri, document, escape, tiles
from vireo.report.pieces import Piece
from vireo.report.preview import File, Preview, Row
from vireo.report.preview_text import image_facts, label
from vireo.report.seen import Seen

_STYLE = """
.bar { position: sticky; top: 0; z-index: 1; background: var(--page); padding: .55rem 0;
  border-bottom: 1px solid var(--line); margin-bottom: 1rem; display: flex; flex-wrap: wrap;
  gap: .4rem 1.1rem; align-items: center; }
.bar nav { margin-left: auto; display: flex; flex-wrap: wrap; gap: .3rem; }
.bar nav a { text-decoration: none; padding: .05rem .5rem; border: 1px solid var(--line);
  border-radius: 6px; background: var(--card); font-size: .85rem; }
.bar nav a.refused { color: var(--bad); border-color: var(--bad); }
.row { display: grid; grid-template-columns: minmax(0, 1fr); gap: 1rem; }
.row.pictured { grid-template-columns: minmax(0, 15rem) minmax(0, 1fr); }
@media (max-width: 46rem) { .row.pictured { grid-template-columns: minmax(0, 1fr); } }
.figures { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: 0 0 .7rem;
  color: var(--soft); font-size: .9rem; }
.figures b { color: var(--text); }
.tokens { font-size: .86rem; line-height: 1.95; }
.tokens span, .key { padding: .1rem .16rem; margin: 0 1px 0 0; border-radius: 3px;
  unicode-bidi: isolate; box-decoration-break: clone; -webkit-box-decoration-break: clone; }
.t { color: var(--trained); background: var(--trained-bg); font-weight: 600;
  box-shadow: inset 0 -2px 0 var(--trained); }
.m { color: var(--masked); background: var(--masked-bg); }
.i { color: var(--image); background: var(--image-bg); border: 1px solid var(--image); }
.c { font-style: italic; }
.share { display: flex; height: 6px; border-radius: 3px; overflow: hidden; margin: 0 0 .8rem;
  background: var(--masked-bg); }
.share i { display: block; }
figure { margin: 0 0 .9rem; font-size: .82rem; }
figure .frame { display: flex; flex-wrap: wrap; gap: 3px; }
figure img { max-width: 100%; min-width: 7rem; height: auto; border: 1px solid var(--line);
  border-radius: 6px; image-rendering: pixelated; background: #fff; }
figure.large img { image-rendering: auto; }
figure.tiled img { min-width: 4rem; max-width: 48%; }
"""


def page(preview: Preview) -> str:
    """The whole page."""
    numbered = [(file, row) for file in preview.files for row in file.rows]
    rows, refused = preview.rows, preview.refused
    tokens = sum(row.length for row in rows)
    figures = [
        ("rows shown", f"{len(rows):,}", ""),
        ("rows refused", f"{refused:,}", "bad" if refused else "good"),
        ("tokens", f"{tokens:,}", ""),
        ("of them trained", _share(sum(row.trained for row in rows), tokens), ""),
        ("of them image", _share(sum(row.image_tokens for row in rows), tokens), ""),
    ]
    if preview.padding is not None:
        figures.append(("padding in one padded batch", f"{preview.padding:.1%}", ""))
    if preview.filled is not None:
        how = "packed" if preview.packing else "padded"
        name = f"of {preview.micro_batches} x {preview.budget:,} tokens filled, {how}"
        figures.append((name, f"{preview.filled:.1%}", ""))
    links = "".join(
        f'<a href="#row-{i}"{" class=refused" if isinstance(row, RowError) else ""}>{i}</a>'
        for i, (_, row) in enumerate(numbered, 1)
    )
    legend = (
        '<span><span class="key tokens t">trained</span> the model learns to write it</span>'
        '<span><span class="key tokens m">masked</span> read, without loss</span>'
        '<span><span class="key tokens i">image x 64</span> image tokens</span>'
        '<span class="soft tokens">\u00b7 space &nbsp;\u21b5 line end &nbsp;<i>control</i></span>'
    )
    body = [
        "<header><h1>What the trainer sees</h1>",
        f"<p class=soft><code>{escape(preview.model)}</code> ({escape(preview.family)})</p>"
        f"</header>{tiles(figures)}",
        f'<div class="bar">{legend}<nav aria-label="rows">{links}</nav></div>',
    ]
    number = 0
    for file in preview.files:
        body.append(_file(file))
        for row in file.rows:
            number += 1
            shown = _refused(row) if isinstance(row, RowError) else _row(row)
            body.append(f'<article class="card" id="row-{number}" tabindex="0">{shown}</article>')
    return document("Preview: what the trainer sees", "\n".join(body), _STYLE)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _file(file: File) -> str:
    head = f"<h2><code>{escape(file.path)}</code> <span class=soft>{file.total:,} rows</span></h2>"
    if not file.skipped:
        return head
    listed = "".join(f"<li>{escape(error)}</li>" for error in file.skipped[:100])
    more = f"<p>and {len(file.skipped) - 100:,} more</p>" if len(file.skipped) > 100 else ""
    count = f"{len(file.skipped):,} of {file.total:,} rows refused when the file was opened"
    return (
        f'{head}<details class="card" {"open" if len(file.skipped) < 6 else ""}>'
        f"<summary class=bad-text>{count}</summary><ul>{listed}</ul>{more}</details>"
    )


def _refused(error: RowError) -> str:
    return f'<h2 class="bad-text">refused</h2><p>{escape(error)}</p>'


def _row(row: Row) -> str:
    weights = ", ".join(f"{weight:g}" for weight in row.weights)
    figures = [
        (row.length, "tokens"),
        (row.trained, "trained"),
        (row.image_tokens, "image"),
    ]
    facts = "".join(f"<span><b>{count:,}</b> {name}</span>" for count, name in figures)
    facts += f"<span>loss weight <b>{weights}</b></span>"
    images = "".join(_image(image, i) for i, image in enumerate(row.images, 1))
    left = f"<div>{images}</div>" if images else ""
    return (
        f"<h2>{escape(row.where)}</h2>"
        f'<div class="figures">{facts}</div>{_bar(row)}'
        f'<div class="row{" pictured" if images else ""}">{left}'
        f'<div class="tokens">{"".join(map(_token, row.tokens))}</div></div>'
    )


def _bar(row: Row) -> str:
    """The row's shares as a thin strip."""
    parts = (("image", row.image_tokens), ("trained", row.trained))
    return '<div class="share" aria-hidden="true">' + "".join(
        f'<i style="width:{100 * count / row.length:.2f}%;background:var(--{name})"></i>'
        for name, count in parts
    ) + "</div>"  # fmt: skip


def _token(piece: Piece) -> str:
    places = (
        f"{piece.start}" if piece.count == 1 else f"{piece.start}-{piece.start + piece.count - 1}"
    )
    ids = ", ".join(map(str, dict.fromkeys(piece.ids)))
    kind = piece.kind[0] + (" c" if piece.control else "")
    end = "<br>" if "\u21b5" in piece.text else ""
    return (
        f'<span class="{kind}" title="token {places}, id {ids}">{escape(label(piece))}</span>{end}'
    )


def _image(image: Seen, number: int) -> str:
    size = image.size or image.fitted
    kind = "tiled" if len(image.pictures) > 1 else "large" if max(size) > 300 else ""
    what = "as the model sees it" if image.rebuilt else "before the processor"
    shown = "".join(
        f'<img src="{data_uri(picture)}" alt="image {number} {what}">' for picture in image.pictures
    )
    facts = "".join(f"<br>{escape(fact)}" for fact in image_facts(image).split("; "))
    name = escape(image.name.strip("'"))
    return (
        f'<figure class="{kind}"><div class="frame">{shown}</div><figcaption>'
        f"<b>image {number}</b>, {what}<br><code>{name}</code>{facts}"
        "</figcaption></figure>"
    )
