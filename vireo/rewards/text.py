"""Rewards that compare a response with an expected text."""

from __future__ import annotations

import re

from vireo.rewards import expected_answer
from vireo.rollout.sample import Sample

_TEXT = r"(?:(?!</?(?:think|answer)>).)*"  # without any of the tags
_TAGS = re.compile(rf"<think>{_TEXT}</think>\s*<answer>{_TEXT}</answer>", re.S)
_INTEGER = re.compile(
    r"(?<![\d.])(?<!\d,)-?\d{1,3}(?:,\d{3})+(?!\d|\.\d)|(?<![\d.,])-?\d+(?!\d|\.\d)"
)


def said(sample: Sample) -> str:
    """The text inside <answer>...</answer> if there is just one, else the whole response."""
    found = re.findall(r"<answer>(.*?)</answer>", sample.text, re.S)
    return (found[0] if len(found) == 1 else sample.text).strip()


def alnum_match(sample: Sample) -> float:
    """1 where the letters and digits equal the expected answer's, in any case; 0 elsewhere. Of a
    response with one <answer> tag, what is inside."""
    expected = str(expected_answer(sample, "alnum_match"))
    one, other = ("".join(filter(str.isalnum, t)).casefold() for t in (said(sample), expected))
    return float(one == other)


def last_integer(sample: Sample) -> float:
    """1 where the last integer of the response is the expected one; 0 elsewhere. Commas between
    thousands and a Unicode minus are read; an integer is no part of a decimal number."""
    wanted = _integers(str(expected_answer(sample, "last_integer")))
    found = _integers(said(sample))
    return float(bool(found and wanted) and found[-1] == wanted[-1])


def boxed(sample: Sample) -> float:
    """1 where what the last \\boxed{...} of the response holds is the expected answer, white space
    and dollar signs aside; 0 elsewhere."""
    inside = last_boxed(sample.text)
    expected = str(expected_answer(sample, "boxed"))
    expected = last_boxed(expected) or expected
    return float(inside is not None and _bare(inside) == _bare(expected))


def choice(sample: Sample) -> float:
    """1 where the response names the expected letter and no other: alone, in brackets, before a
    full stop, after "answer:", or in a \\boxed{}; 0 elsewhere."""
    text = last_boxed(sample.text) or said(sample)
    patterns = (
        r"^\s*\(?([A-Z])\)?[.):]?\s*$",
        r"(?i:answer)\s*(?:(?i:is)|:)*\s*\(?([A-Z])\b\)?",
        r"\(([A-Z])\)",
        r"^\s*([A-Z])[.):]",
    )
    found = (set(re.findall(pattern, text)) for pattern in patterns)
    letters = next(filter(None, found), set())
    wanted = str(expected_answer(sample, "choice")).strip().strip("().:").upper()
    return float(letters == {wanted})


def format_tags(sample: Sample) -> float:
    """1 where the response is <think>...</think><answer>...</answer>, each tag once and nothing
    outside but white space; 0 elsewhere."""
    return float(_TAGS.fullmatch(sample.text.strip()) is not None)


def last_boxed(text: str) -> str | None:
    """What the last \\boxed{...} holds, with its braces balanced; None: there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for i in range(start + 6, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if not depth:
            return text[start + 7 : i]
    return None


def _bare(text: str) -> str:
    return re.sub(r"[\s$]", "", text)


def _integers(text: str) -> list[int]:
    text = text.replace("\N{MINUS SIGN}", "-")
    found = _INTEGER.findall(text)
    return [int(one.replace(",", "")) for one in found]
