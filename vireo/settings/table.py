"""The table of `vireo settings`."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from vireo.settings.flags import FLAGS, Flag


def describe(trainer: str) -> str:
    """Every setting of `trainer`: flag, dotted name, type or choices, default, and meaning."""
    rows = [_row(flag, trainer) for flag in FLAGS.values()]
    head = ("flag", "setting", "type", "default")
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(cells: tuple[str, ...]) -> str:
        return "  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip()

    lines = [line(head)]
    for _, group in groupby(
        zip(FLAGS.values(), rows, strict=True), key=lambda pair: _section(pair[0])
    ):
        lines.append("")
        for flag, row in group:
            lines += [line(row), f"    {flag.meaning}{_also(flag)}"]
    return "\n".join(lines) + "\n"


def _section(flag: Flag) -> str:
    return flag.dotted.rpartition(".")[0]


def _also(flag: Flag) -> str:
    return "".join(f" Also --{name}." for name in flag.names[1:])


def _row(flag: Flag, trainer: str) -> tuple[str, str, str, str]:
    default = trainer if flag.dotted == "trainer" else flag.default
    return (
        f"--{flag.names[0]}",
        flag.dotted,
        flag.type,
        "required" if flag.required else _shown(default),
    )


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
