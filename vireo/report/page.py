"""Self-contained HTML pages: no request, everything escaped, no script but a page's own."""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup
from PIL import Image

from vireo.errors import InputError

# Nothing but the page itself may load, and no script may run, whatever a row holds.
_BASE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:;
  style-src 'unsafe-inline'{% block policy %}{% endblock %}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{% block title %}{% endblock %}</title>
<style>
:root { color-scheme: light dark;
  --page: light-dark(#f6f7f9, #11151b); --card: light-dark(#fff, #1a2028);
  --line: light-dark(#dde1e7, #313a46); --text: light-dark(#1c2330, #e6eaf0);
  --soft: light-dark(#5b6575, #9aa5b4); --bar: light-dark(#3b78d8, #6ca0f2);
  --bad: light-dark(#b3261e, #ff9d94); --bad-bg: light-dark(#fde7e5, #4a1d1a); }
body { max-width: 76rem; margin: 0 auto; padding: 1.5rem 1.25rem 3rem; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1, h2, h3, p, ul { margin: 0 0 .5rem; font-size: 1rem; }
h1 { font-size: 1.5rem; }
ul { padding-left: 1.1rem; }
figure { margin: .4rem 0 .9rem; }
.soft, figcaption { color: var(--soft); font-size: .9rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  margin: 0 0 1rem; padding: 1rem; }
.bad { background: var(--bad-bg); border-color: var(--bad); }
svg { display: block; width: 100%; fill: var(--bar); }
text { fill: var(--soft); font-size: 11px; }
{% block style %}{% endblock %}
</style>
</head>
<body>
{% block body %}{% endblock %}
</body>
</html>
"""


def render(template: str, **values: Any) -> str:
    """A page from a template that extends `base`."""
    return _ENVIRONMENT.from_string(template).render(values)


def plain(text: str) -> str:
    """Text without characters that could steer a terminal or turn the reading direction."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _shown(value: Any) -> Any:
    """What stands for a value in a page, before it is escaped: no control characters either."""
    if isinstance(value, Markup):
        return value
    return f"{value:,}" if type(value) is int else plain(str(value))


def data_uri(image: Image.Image) -> str:
    """The picture inside the page, at most 448 pixels wide and high."""
    small, file = image.copy(), io.BytesIO()
    small.thumbnail((448, 448))
    small.save(file, "WEBP", quality=90, lossless=max(small.size) < 200)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"


_ENVIRONMENT = Environment(
    loader=DictLoader({"base": _BASE}),
    autoescape=True,
    finalize=_shown,
    undefined=StrictUndefined,
    trim_blocks=True,
)
_ENVIRONMENT.filters["data_uri"] = data_uri


def write(path: str, content: str) -> None:
    """Write a page or a report, its folder too; InputError where that cannot be done."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(content, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error
    print(f"wrote {path}")


def show(text: str) -> None:
    """Print text; what the terminal's encoding lacks becomes an escape, never an error."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
