"""`vireo.train` that also notes which rows each step has: SEEN/rows-RANK.jsonl, a line a step.

A line is [position after the step, the rows of this rank]. It is written before the step is made,
so a step that was killed and made again is there twice.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from vireo.data.loader import StepLoader, StepRows
from vireo.train import main

steps = StepLoader.__iter__


def noted(loader: StepLoader) -> Iterator[StepRows]:
    file = Path(os.environ["SEEN"]) / f"rows-{loader.rank}.jsonl"
    for item in steps(loader):
        with file.open("a") as out:
            rows = [example.where for example in item.examples]
            out.write(json.dumps([item.position, rows]) + "\n")
        yield item


if __name__ == "__main__":
    StepLoader.__iter__ = noted  # type: ignore[method-assign]
    sys.exit(main())
