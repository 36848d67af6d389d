"""The doctor's report in words, section by section, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Section:
    """`facts`: (name, value); `charts`: (title, histogram); `lists`: (heading, lines)."""

    title: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    charts: list[tuple[str, dict[str, list[int]]]] = field(default_factory=list)
    lists: list[tuple[str, list[str]]] = field(default_factory=list)


def headline(report: dict[str, Any]) -> str:
    rows = report["rows"]
    found = f"{rows['bad']:,} of {rows['total']:,} rows are bad"
    if report["limit"] is not None:
        found += f" ({rows['looked_at']:,} looked at)"
    return found


def sections(report: dict[str, Any]) -> Iterator[Section]:
    """What there is to say, the worst first."""
    yield _bad(report)
    yield _lengths(report["lengths"])
    if report["steps"]:
        yield _steps(report["steps"], report["micro_batches"])
    if report["images"]["references"]:
        yield _images(report["images"])
    yield _duplicates(report["duplicates"])
    yield _rows(report)


def percent(share: float) -> str:
    return f"{share:.1%}" if share == 0 or share >= 0.001 else "under 0.1%"


def _spread(found: dict[str, Any] | None) -> str:
    if found is None:
        return "none"
    return (
        f"{found['min']:,} to {found['max']:,}, median {found['median']:,g}, "
        f"95% up to {found['p95']:,g}"
    )


def _bad(report: dict[str, Any]) -> Section:
    out = Section("Bad rows")
    nothing = report["rows"]["nothing_to_learn"]
    if nothing:
        out.facts.append(
            ("of them with nothing to learn (left out, never an error)", f"{nothing:,}")
        )
    for group in report["bad_rows"]:
        more = group["count"] - len(group["examples"])
        lines = group["examples"] + ([f"and {more:,} more"] if more else [])
        out.lists.append((f"{group['reason']}: {group['count']:,}", lines))
    if not report["bad_rows"]:
        out.facts.append(("refused", "none"))
    return out


def _lengths(lengths: dict[str, Any]) -> Section:
    unit = lengths["unit"]
    out = Section(f"Lengths in {unit}", [("a row", _spread(lengths["per_row"]))])
    if unit == "tokens":
        out.facts += [
            ("tokens of usable rows", f"{lengths['total']:,}"),
            ("trained", f"{lengths['trained']:,} ({percent(lengths['trained_share'])})"),
            ("image tokens", f"{lengths['image']:,} ({percent(lengths['image_share'])})"),
            (f"rows over the limit of {lengths['limit']:,}", f"{lengths['over_limit']:,}"),
        ]
    out.charts.append((f"rows by {unit}", lengths["histogram"]))
    return out


def _steps(steps: dict[str, Any], filled: dict[str, Any] | None) -> Section:
    ranks = f" over {steps['ranks']} ranks" if steps["ranks"] > 1 else ""
    out = Section(
        "Steps",
        [
            ("rows a step", f"{steps['rows_per_step']:,}{ranks}"),
            ("steps an epoch", f"{steps['per_epoch']:,}"),
            (f"steps of {steps['epochs']} epoch(s)", f"{steps['total']:,}"),
        ],
    )
    if filled is None:
        return out
    budget = filled["budget"]
    for how in ("packed", "padded"):
        part = filled[how]
        if part and budget:
            name = f"{how} to {budget:,} tokens"
            share, count = percent(part["filled"]), part["per_step"]
            out.facts.append((name, f"{share} filled, {count:.2f} micro-batches a step and rank"))
    name = (
        "padding in padded ones"
        if budget
        else f"padding in micro-batches of {filled['rows']:,} row(s)"
    )
    out.facts.append((name, percent(filled["padded"]["padding"])))
    out.facts.append(("steps simulated for these shares", f"{filled['steps_looked_at']:,}"))
    return out


def _images(images: dict[str, Any]) -> Section:
    out = Section(
        "Images",
        [
            ("named in rows", f"{images['references']:,}"),
            ("distinct", f"{images['distinct']:,}"),
            ("refused", f"{images['refused']:,}"),
            ("width", _spread(images["width"])),
            ("height", _spread(images["height"])),
            ("modes", _counts(images["modes"])),
            ("formats", _counts(images["formats"])),
            ("images a row", _counts(images["per_row"])),
            (
                "turned by EXIF",
                f"{images['exif_turned']:,} ({percent(images['exif_turned_share'])})",
            ),
        ],
    )
    if images["distinct"]:
        out.charts.append(("images by longest side in pixels", images["longest_side"]))
    words = {
        "long_ratio": "longer than {limit:,} times their width or height",
        "tiny_side": "with a side below {limit:,} pixels",
        "huge_pixels": "of more than {limit:,} pixels",
    }
    for key, text in words.items():
        odd = images[key]
        name = text.format(limit=odd["limit"])
        out.facts.append((name, f"{odd['count']:,}"))
        if odd["examples"]:
            lines = [f"{e['row']}: {e['size'][0]} x {e['size'][1]}" for e in odd["examples"]]
            out.lists.append((name, lines))
    return out


def _counts(found: dict[str, int]) -> str:
    shown = list(found.items())[:8]
    more = f", and {len(found) - 8} more" if len(found) > 8 else ""
    return ", ".join(f"{name}: {count:,}" for name, count in shown) + more or "none"


def _duplicates(found: dict[str, Any]) -> Section:
    rows, questions, images = found["rows"], found["questions"], found["images"]
    out = Section(
        "Duplicates",
        [
            (
                "rows that repeat another one",
                f"{rows['extra_rows']:,} ({percent(rows['extra_share'])})",
            ),
            ("questions with several answers", f"{questions['count']:,}"),
            ("images under several names", f"{images['count']:,}"),
        ],
    )
    for heading, part in (
        ("the same row", rows),
        ("the same question, other answers", questions),
        ("the same image", images),
    ):
        if part["examples"]:
            out.lists.append((heading, [" and ".join(group) for group in part["examples"]]))
    return out


def _rows(report: dict[str, Any]) -> Section:
    rows, turns = report["rows"], report["turns"]
    text_only = f"{rows['text_only']:,} ({percent(rows['text_only_share'])})"
    out = Section(
        "Rows and turns",
        [
            ("rows", f"{rows['total']:,}"),
            ("without an image", text_only),
            ("turns", f"{turns['total']:,}"),
            ("turns a row", _spread(turns["per_row"])),
            ("roles", _counts(turns["roles"])),
        ],
    )
    for file in report["files"]:
        out.facts.append((file["file"], f"{file['rows']:,} rows, {file['bad']:,} bad"))
    return out
