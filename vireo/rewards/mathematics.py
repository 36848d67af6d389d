"""The response equals the expected answer as mathematics."""

from __future__ import annotations

from vireo.rewards import expected_answer
from vireo.rewards.helpers import Helpers
from vireo.rewards.text import last_boxed, tagged
from vireo.rollout.sample import Sample

_HELPERS = Helpers("math")


def math(sample: Sample) -> float:
    """1 where the response's last \\boxed{...}, or else what its one <answer> tag holds, or else
    its last number or formula in dollar signs, equals the answer: 1/2 is 0.5 (math-verify). 0
    elsewhere, and where comparing takes more than 5 s."""
    expected = str(expected_answer(sample, "math"))
    response, whole = _expression(sample.text)
    return _HELPERS.score(sample, response=response, whole=whole, label=_expression(expected)[0])


def _expression(text: str) -> tuple[str, bool]:
    """The part that counts, and whether it is nothing but an expression."""
    inside = tagged(text)
    text = text if inside is None else inside
    boxed = last_boxed(text)
    return (text, inside is not None and "$" not in text) if boxed is None else (boxed, True)
