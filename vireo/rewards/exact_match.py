"""The response is the expected answer, or it is not."""

from __future__ import annotations

from vireo.rewards import expected_answer
from vireo.rollout.sample import Sample


def exact_match(sample: Sample) -> float:
    """1 where the text equals the answer that ends the row, or else its column `answer`, white
    space at the ends aside; 0 elsewhere. InputError: the row has neither."""
    return float(sample.text.strip() == str(expected_answer(sample, "exact_match")).strip())
