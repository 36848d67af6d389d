"""The rule that DAPO scores mathematics by."""

from __future__ import annotations

import re

from vireo.rewards import expected_answer
from vireo.rollout.sample import Sample

_LAST = 300  # characters of a response that are looked at
_UNITS = re.compile(
    "square|ways|integers|dollars|mph|inches|hours|km|units|points|feet|minutes|digits|cents|"
    "degrees|cm|gm|pounds|meters|meals|edges|students|childrentickets|multiples|sue"
)
_MARKUP = re.compile(
    r"\\text\{\}(?:\^[23])?|\\text\{[s.]\}|\\mathrm\{th\}|\^\\circ|\^\{\\circ\}|\\l?dots"
    r"|\\;|,\\!|\{,\}|\""
)


def dapo_math(sample: Sample) -> float:
    """1 where what follows the last "Answer:" on its line, within the last 300 characters, is the
    answer after both are normalised; -1 elsewhere.

    The rule-based reward of DAPO (Yu et al. 2025, arXiv 2503.14476, section 2.4), whose published
    code normalises as Minerva does (Lewkowycz et al. 2022, arXiv 2206.14858, appendix D.1)."""
    found = re.findall(r"(?i)answer\s*:\s*([^\n]+)", sample.text[-_LAST:])
    expected = _normalised(str(expected_answer(sample, "dapo_math")))
    return 1.0 if found and _normalised(found[-1]) == expected else -1.0


def _normalised(text: str) -> str:
    """The value behind the last =, without articles, units, markup and commas in a number."""
    text = text.rsplit("=", 1)[-1]
    text = re.sub(r"an? ", "", text).replace(".$", "$")
    text = re.sub(r"\\\$|\\? ", "", text).replace("mbox", "text")
    text = re.sub(r",?\\text\{and\}", ",", text).replace("\\text{m}", "\\text{}")
    text = _MARKUP.sub("", _UNITS.sub("", text))  # in this order: units stand in \\text{}
    if formula := re.search(r"\$(.*?)\$", text):
        text = formula[1]
    for command in ("text", "textbf", "overline"):
        text = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    whole = text.replace(",", "")
    return whole if whole.isdigit() else text.strip()
