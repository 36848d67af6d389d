"""The response is the expected answer, or it is not."""

from __future__ import annotations

from vireo.errors import InputError
from vireo.rollout.sample import Sample


def exact_match(sample: Sample) -> float:
    """1 where the text equals the answer that ends the row, or else its column `answer`, white
    space at the ends aside; 0 elsewhere. InputError: the row has neither."""
    expected = sample.answer
    if expected is None:
        expected = sample.conversation.extra.get("answer")
    if expected is None:
        raise InputError(
            f"{sample.name}: exact_match has nothing to compare with; let the row end with the "
            "expected assistant turn, or give it a column 'answer'"
        )
    return float(sample.text.strip() == str(expected).strip())
