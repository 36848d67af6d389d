"""The bounds of `make functional`: files that say what was measured, and faults that break them."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest

from tests.functional import __main__ as command
from tests.functional import runner
from tests.functional.bounds import check, measured

LEARNS = "grpo reward, last 3"
FAULTY = Path(runner.__file__).with_name("faulty.py")
RUN = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 2.0, "rare": 1.0}]


def bounds(name: str) -> list[tuple[str, dict]]:
    case = runner.load(name)
    return [(phase, bound) for phase in runner.PHASES for bound in case[phase]["bounds"]]


# -- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "low", "high", "found", "ok"),
    [
        ("step 2", 1.0, 1.0, 1.0, True),
        ("step 2", 1.1, 9.0, 1.0, False),
        ("last 2", 1.5, 1.5, 1.5, True),
        ("every step", 1.0, 3.0, 3.0, True),
        ("every step", 0.0, 2.5, 3.0, False),
        ("every step", 1.5, 4.0, 1.0, False),
    ],
)
def test_a_number_is_held_against_both_ends(
    at: str, low: float, high: float, found: float, ok: bool
) -> None:
    [finding] = check("sft", [{"metric": "loss", "at": at, "min": low, "max": high}], RUN)
    assert finding.ok == ok
    if not ok or low == high:
        assert finding.found == found


@pytest.mark.parametrize("place", [0, 1, 2])
def test_nan_keeps_no_bound_wherever_it_stands(place: int) -> None:
    run = [{"step": i + 1, "loss": math.nan if i == place else 1.0} for i in range(3)]
    for at in ("every step", "last 3"):
        [finding] = check("sft", [{"metric": "loss", "at": at, "max": 5.0}], run)
        assert not finding.ok


@pytest.mark.parametrize(
    ("metric", "at"),
    [("lost", "every step"), ("loss", "step 4"), ("rare", "last 2"), ("loss", "first")],
)
def test_a_number_that_a_run_lacks_is_an_error(metric: str, at: str) -> None:
    with pytest.raises(ValueError, match=f"{at}"):
        check("sft", [{"metric": metric, "at": at, "max": 1}], RUN)


def test_bounds_are_moved_only_where_they_were_measured() -> None:
    other = [{"step": 1, "loss": 4.0}]
    made = measured({"metric": "loss", "at": "step 1", "min": 0, "margin": 0.5}, [RUN, other])
    assert made["min"] == 2.5
    assert made["measured"] == [3.0, 4.0]
    assert "max" not in made
    exact = measured({"metric": "loss", "at": "every step", "max": 1.0}, [RUN, other])
    assert exact["max"] == 1.0
    assert exact["measured"] == [[1.0, 3.0], 4.0]


# -- files ----------------------------------------------------------------------------------------


def test_three_families_have_text_and_image_rows() -> None:
    cases = [runner.load(name) for name in runner.names()]
    assert runner.names() == sorted(f"{c['family']}-{c['rows']}" for c in cases)
    assert len({c["family"] for c in cases}) == 3
    assert len(cases) == 6


@pytest.mark.parametrize("name", runner.names())
def test_a_file_keeps_its_own_measurements_and_exact_bounds(name: str) -> None:
    metrics = set()
    for phase, bound in bounds(name):
        metrics.add((phase, bound["metric"]))
        assert len(bound["measured"]) == len(command.SEEDS)
        for found in bound["measured"]:
            for value in found if isinstance(found, list) else [found]:
                assert bound.get("min", -math.inf) <= value <= bound.get("max", math.inf)
        if bound["metric"].startswith("probs_ratio/"):
            assert (bound["min"], bound["max"]) == (1 - 1e-5, 1 + 1e-5)
        if bound["metric"].endswith("token_mult_prob_error"):
            assert bound["max"] == 1 + 2e-5
    ratios = {("grpo", f"probs_ratio/{n}") for n in ("min", "mean", "max")}
    assert metrics == ratios | {
        ("sft", "loss"),
        ("sft", "grad_norm"),
        ("grpo", "loss"),
        ("grpo", "reward"),
        ("grpo", "grad_norm"),
        ("grpo", "mismatch/token_mult_prob_error"),
    }


@pytest.mark.parametrize("name", runner.names())
def test_losses_must_fall_and_rewards_rise(name: str) -> None:
    of = {(phase, b["metric"], b["at"]): b for phase, b in bounds(name)}
    assert of["sft", "loss", "last 5"]["max"] < of["sft", "loss", "step 1"]["min"] / 2
    assert of["grpo", "reward", "last 3"]["min"] > max(of["grpo", "reward", "step 1"]["measured"])


def test_an_unknown_name_is_refused_with_the_names_there_are(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(["qwen9-text"])
    assert stopped.value.code == 2
    assert "qwen2_5_vl-text" in capsys.readouterr().err


# -- faults ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "metric", "kept"),
    [
        ("advantage_sign", LEARNS, "sft loss, last 5"),
        ("loss_scale", "grpo grad_norm, step 1", LEARNS),
        ("engine_logprobs", "grpo mismatch/token_mult_prob_error, every step", LEARNS),
        ("old_logprobs", "grpo probs_ratio/mean, every step", LEARNS),
        ("label_shift", "sft loss, last 5", "sft loss, step 1"),
    ],
)
def test_a_planted_fault_breaks_the_bound_that_is_there_for_it(
    fault: str, metric: str, kept: str, capsys
) -> None:
    status = command.main(["qwen2_5_vl-text"], (sys.executable, str(FAULTY), fault))
    said = capsys.readouterr().out
    assert status == 1
    assert re.search(f"^  {re.escape(metric)} .*BROKEN$", said, re.M), said
    assert re.search(f"^  {re.escape(kept)} .*ok$", said, re.M), said


@pytest.mark.slow
def test_the_same_run_without_a_fault_keeps_all_bounds(capsys) -> None:
    assert command.main(["qwen2_5_vl-text"]) == 0
    assert "BROKEN" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_fails_shows_its_output(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no_such_setting"):
        runner.train(runner.VIREO, {"no_such_setting": 1}, tmp_path / "run")
