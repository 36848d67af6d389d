"""Vireo's losses are TRL's, step by step: those that `benchmarks/trl_loss.py` recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.trl_cases import (
    GOLDEN,
    SHORT,
    STEPS,
    TEXT,
    TOLERANCE,
    VLM,
    Case,
    train_vireo,
    write_case,
)

LONG = pytest.param(STEPS, marks=pytest.mark.slow)  # several epochs, each with a short last step


@pytest.mark.parametrize("steps", [SHORT, LONG])
@pytest.mark.parametrize("case", [TEXT, VLM], ids=lambda case: case.name)
def test_every_step_has_the_loss_that_trl_had(case: Case, steps: int, tmp_path: Path) -> None:
    golden = json.loads((GOLDEN / f"trl_{case.name}.json").read_text())["runs"][str(steps)]
    model, data = write_case(case, tmp_path)
    records = train_vireo(replace(case, steps=steps), model, data, tmp_path / "run")
    assert [r["supervised_tokens"] for r in records] == golden["supervised_tokens"]
    assert [r["loss"] for r in records] == pytest.approx(golden["losses"], abs=TOLERANCE, rel=0)
