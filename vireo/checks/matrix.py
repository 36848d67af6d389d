"""The support matrix of docs/families.md: from the families' entries and reports of the grid.

for name in llama qwen2_5_vl; do
  vireo tiny $name tiny/$name --size test
  vireo check-family tiny/$name --json grid/$name.json
done
python -m vireo.checks.matrix grid/*.json > docs/families.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vireo.errors import InputError, first_line
from vireo.families import FAMILIES, Family

STATIC = ("family", "kind", "rows joined", "attention", "positions", "micro-batches")
GROUPS = (
    *("joined", "loss", "labels", "keys", "positions"),
    *("pictures", "entry", "gradients", "weights"),
)
PAGE = """\
# Model families

What each family's entry says, and what `vireo check-family` found when it ran its grid on a tiny
random model of each. Both tables are made by `python -m vireo.checks.matrix`, never by hand.

## What is supported

{static}

A packed family is padded where `--packing false` asks for it. *varlen*: attention takes sequences
of any lengths end to end, without a mask (on a GPU in bf16 by one kernel); *sdpa*: PyTorch's own,
with masks.

{limits}
## What the grid found

{grid}

{legend}

## A model of your own

The same grid runs on any model folder, in float32, and says what is wrong and where first. It needs
4 bytes of memory a parameter (and of disk, for the last line), and what a few rows need. `--rows
FILE` puts rows of your own in the place of drawn ones. Log-probabilities that must be equal may
differ by 1e-5 or, in a model that amplifies rounding, by four times what it makes of a last bit in
its inputs; each line shows its limit.

```bash
vireo tiny qwen2_5_vl tiny --size test
vireo check-family tiny --json report.json
```

For a model whose family has no entry it prints one to start from: what it found in the model and
its processor. Save that under `vireo/families/`, correct it, and run the grid until nothing fails.
"""
LEGEND = """\
- joined: log-probabilities of a row are those that it has alone, padded or packed with rows of 0 to
  3 images
- loss: it is that of the family's own `forward(labels=...)`
- labels: exactly the assistant's text and its end of turn carry loss
- keys: every processor key is known, joined rightly, survives every batch operation, and is used
- positions: 1-D positions in the place of the family's own are noticed
- pictures: pixels, their order and their content change log-probabilities
- entry: tokens, layer classes and parts exist in the model
- gradients: every parameter learns, text leaves the tower alone, frozen parts cost nothing
- weights: written and read back, the model is the same

`-`: has no meaning for this family."""


def static_row(family: Family) -> tuple[str, ...]:
    """The columns `STATIC` of a family's entry."""
    mixes = "any rows" if family.can_mix else "rows with as many images"
    return (
        family.name,
        ("vision" if family.has_vision else "text") + (", own code" if family.remote else ""),
        "packed" if family.can_pack else "padded (why: below)",
        f"varlen: {', '.join(sorted(family.varlen))}" if family.varlen else "sdpa",
        {"1d": "1-D", "mrope": "3-D"}[family.positions],
        mixes if family.has_vision else "any rows",
    )


def grid_row(report: dict[str, Any]) -> tuple[str, ...]:
    """A family's name, pass or fail of each group (`-` where all of it has no meaning), and what it
    ran on."""
    cells = []
    for group in GROUPS:
        found = [r for r in report["results"] if r["group"] == group and r["status"] != "cannot"]
        failed = [result["name"] for result in found if result["status"] == "fail"]
        cells.append(f"fail: {', '.join(failed)}" if failed else "pass" if found else "-")
    if any(r["status"] == "fail" for r in report["results"] if r["group"] == "rows"):
        cells = ["fail: rows"] * len(cells)
    versions = report["versions"]
    ran = f"{report['date']}, torch {versions['torch']}, transformers {versions['transformers']}"
    return (report["family"], *cells, f"{ran}, {report['device']}")


def page(reports: Sequence[dict[str, Any]]) -> str:
    """docs/families.md. The last report of a family counts; one without any has an empty row."""
    latest = {report["family"]: report for report in sorted(reports, key=lambda r: r["date"])}
    names = sorted(FAMILIES)
    none = ("not run", *[""] * len(GROUPS))
    grid = [grid_row(latest[name]) if name in latest else (name, *none) for name in names]
    limits = [f"- {name}: {text}\n" for name in names for text in FAMILIES[name].limits]
    return PAGE.format(
        static=_table(STATIC, [static_row(FAMILIES[name]) for name in names]),
        limits="".join(["Of single families:\n\n", *limits]) if limits else "",
        grid=_table(("family", *GROUPS, "run"), grid),
        legend=LEGEND,
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(paths: list[str]) -> int:
    """Prints the page made from these reports; 2 if one is no report."""
    try:
        reports = [_read(path) for path in paths]
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(page(reports), end="")
    return 0


def _read(path: str) -> dict[str, Any]:
    try:
        report = json.loads(Path(path).read_text())
        grid_row(report)
        return report
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is no report of `vireo check-family --json`: {first_line(error)}"
        ) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
