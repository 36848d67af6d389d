"""The table of `vireo settings`."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from vireo.settings.flags import FLAGS, Flag
from vireo.settings.schema import RL_SECTIONS, SFT, TRAINER_DEFAULTS


def describe(trainer: str) -> str:
    """Every setting of `trainer`: flag, dotted name, type or choices, default, and meaning."""
    flags = [
        flag
        for flag in FLAGS.values()
        if trainer not in SFT or flag.dotted.split(".")[0] not in RL_SECTIONS
    ]
    rows = [_row(flag, trainer) for flag in flags]
    head = ("flag", "setting", "type", "default")
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(cells: tuple[str, ...]) -> str:
        return "  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip()

    lines = [line(head)]
    for _, group in groupby(zip(flags, rows, strict=True), key=lambda pair: _section(pair[0])):
        lines.append("")
        for flag, row in group:
            lines += [line(row), f"    {flag.meaning}{_also(flag)}"]
    return "\n".join(lines) + "\n"


def _section(flag: Flag) -> str:
    return flag.dotted.rpartition(".")[0]


def _also(flag: Flag) -> str:
    return "".join(f" Also --{name}." for name in flag.names[1:])


def _row(flag: Flag, trainer: str) -> tuple[str, str, str, str]:
    own = {"trainer": trainer} | TRAINER_DEFAULTS.get(trainer, {})
    default = own.get(flag.dotted, flag.default)
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
