"""Rewards that compare a response with an expected text."""

from __future__ import annotations

import re
from decimal import Decimal

from vireo.rewards import expected_answer
from vireo.rollout.sample import Sample

_TEXT = r"(?:(?!</?(?:think|answer)>).)*"  # without any of the tags
_TAGS = re.compile(rf"<think>{_TEXT}</think>\s*<answer>{_TEXT}</answer>", re.S)
# A whole number token: 1,234 and 1.2.3 are one each, 3,4 and 3-4 are two.
_NUMBER = re.compile(r"(?:(?<!\d)-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)*|(?:\.\d+)+)")
_BOXED = re.compile(r"\\boxed\s*\{")
_DEEPEST = 4  # braces in braces: a response of nothing else must not take minutes
_TYPEFACE = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")


def said(sample: Sample) -> str:
    """The text inside <answer>...</answer> if there is just one, else the whole response."""
    inside = tagged(sample.text)
    return sample.text.strip() if inside is None else inside


def tagged(text: str) -> str | None:
    """What is inside <answer>...</answer>; None: there is not just one."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.S)
    return found[0].strip() if len(found) == 1 else None


def alnum_match(sample: Sample) -> float:
    """1 where the letters and digits equal the expected answer's, in any case; 0 elsewhere. Of a
    response with one <answer> tag, what is inside."""
    expected = str(expected_answer(sample, "alnum_match"))
    one, other = ("".join(filter(str.isalnum, t)).casefold() for t in (said(sample), expected))
    return float(one == other)


def last_integer(sample: Sample) -> float:
    """1 where the last integer of the response is the expected one; 0 elsewhere. Commas between
    thousands and a Unicode minus are read: 1,234 is 1234. A decimal number is no integer and
    holds none: 1,234.5 is passed over."""
    wanted = _integers(str(expected_answer(sample, "last_integer")))
    found = _integers(said(sample))
    return float(bool(found and wanted) and found[-1] == wanted[-1])


def boxed(sample: Sample) -> float:
    """1 where what the last \\boxed{...} of the response holds is the expected answer; 0 elsewhere.
    White space, dollar signs, braces round it all and \\text{...} do not count."""
    inside = last_boxed(sample.text)
    expected = str(expected_answer(sample, "boxed"))
    expected = last_boxed(expected) or expected
    return float(inside is not None and _bare(inside) == _bare(expected))


def choice(sample: Sample) -> float:
    """1 where the response names the expected letter and no other: alone, after "answer:", in bold,
    in brackets, before a full stop, or in a \\boxed{}; 0 elsewhere."""
    text = _unset(last_boxed(sample.text) or said(sample))
    plain = re.sub(r"[*$]", "", text)
    patterns = (
        (r"^\s*[{(]*([A-Z])[)}]*[.):]?\s*$", plain),
        (r"(?i:answer)\s*(?:(?i:is)|:)*\s*\(?([A-Z])\b\)?", plain),
        (r"\*\*\s*\(?([A-Z])\)?[.):]?\s*\*\*", text),
        (r"\(([A-Z])\)", plain),
        (r"^\s*([A-Z])[.):]", plain),
    )
    found = (set(re.findall(pattern, where)) for pattern, where in patterns)
    letters = next(filter(None, found), set())
    expected = str(expected_answer(sample, "choice"))
    wanted = _bare(last_boxed(expected) or expected).strip("().:*").upper()
    return float(letters == {wanted})


def format_tags(sample: Sample) -> float:
    """1 where the response is <think>...</think><answer>...</answer>, each tag once and nothing
    outside but white space; 0 elsewhere."""
    return float(_TAGS.fullmatch(sample.text.strip()) is not None)


def last_boxed(text: str) -> str | None:
    """What the last \\boxed{...} holds, with its braces balanced; None: there is none."""
    starts = [found.end() for found in _BOXED.finditer(text)]
    return _to_its_brace(text[starts[-1] :]) if starts else None


def _to_its_brace(text: str) -> str | None:
    """The text up to the } that closes a { before it; None: none does."""
    depth = 1
    for found in re.finditer(r"\\.|[{}]", text, re.S):  # \{ and \} are no braces
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if not depth:
            return text[: found.start()]
    return None


def _unset(text: str) -> str:
    r"""The text without the commands for typefaces: \text{B} is B."""
    for _ in range(_DEEPEST):
        text = _TYPEFACE.sub(r"\1", text)
    return text


def _bare(text: str) -> str:
    text = re.sub(r"[\s$]", "", _unset(text))
    for _ in range(_DEEPEST):
        if text.startswith("{") and _to_its_brace(text[1:]) == text[1:-1]:
            text = text[1:-1]
    return text


def _integers(text: str) -> list[Decimal]:
    """Exact, of any length: `int` refuses more than 4,300 digits."""
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return [Decimal(one.replace(",", "")) for one in found if "." not in one]
