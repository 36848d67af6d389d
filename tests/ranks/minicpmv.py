"""The stand-in for MiniCPM-V 4.x on two ranks, one of which has no picture, against one rank.

    torchrun --nproc_per_node=2 -m tests.ranks.minicpmv BASE

BASE holds the model, its rows, and what one rank found (reference.pt); writes BASE/found.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.ranks.cases import examples_of, furthest, gradients
from vireo import parallel as parallel_module
from vireo.data.conversation import read_rows
from vireo.data.packing import by_rows
from vireo.data.ragged import Example
from vireo.data.render import Renderer, open_renderer
from vireo.evaluation import policy_answers
from vireo.parallel import Parallel
from vireo.settings import load_settings
from vireo.trainers.build import build_engine
from vireo.training.engine import TrainEngine

FROZEN = {"trained": (), "aligned": ("vision", "language")}


def engine_for(
    base: Path,
    parallel: Parallel,
    frozen: tuple[str, ...] = (),
    start_from: Path | None = None,
    more: tuple[str, ...] = (),
) -> tuple[TrainEngine, Renderer]:
    """The engine as the trainer builds it, for a fresh run or to go on from a checkpoint."""
    settings = load_settings(
        [
            *("--trainer=fsdp_vlm", f"--vlm_model_name_or_path={base / 'model'}"),
            *("--trust_remote_code", "--fsdp_mp_dtype=fp32", "--lr=1e-3"),
            f"--fsdp_enable={'false' if parallel.mesh is None else 'true'}",
            *(f"--freeze_{part}={part in frozen}".lower() for part in ("vision", "language")),
            *more,
        ]
    )
    renderer = open_renderer(settings)
    built = build_engine(settings, renderer, parallel, packing=False, start_from=start_from)
    return built.engine, renderer


def compute(
    base: Path, parallel: Parallel, frozen: tuple[str, ...], share: Any
) -> list[dict[str, torch.Tensor]]:
    """For each way to deal the rows: their gradients, and their loss in evaluation."""
    engine, renderer = engine_for(base, parallel, frozen)
    out = []
    for mine in share(examples_of(renderer, base / "data" / "rows.json")):
        batches = by_rows(mine, 2)
        loss, weight = engine.evaluate(batches)
        engine.policy.train()
        out.append({**gradients(engine, batches), "loss": torch.tensor([loss / weight])})
    return out


def answers(base: Path, parallel: Parallel) -> list[str]:
    """To two rows of text and one with a picture."""
    engine, renderer = engine_for(base, parallel)
    rows = read_rows(base / "data" / "rows.json")
    found = policy_answers(engine, renderer, [rows[i] for i in (1, 3, 0)], 3)
    return [answer["answer"] for answer in found]


def main() -> None:
    torch.set_num_threads(1)
    base = Path(sys.argv[1])
    parallel = parallel_module.start()

    def share(rows: list[Example]) -> list[list[Example]]:
        """Text and pictures apart; then some of each, with other numbers of slices."""
        apart = [e for e in rows if bool(e.images) == (parallel.rank == 0)]
        return [apart, rows[parallel.rank :: 2]]

    reference = torch.load(base / "reference.pt")
    found: dict[str, Any] = {}
    for name, frozen in FROZEN.items():
        for how, mine in zip(("apart", "dealt"), compute(base, parallel, frozen, share)):
            found[f"{name}, {how}"] = furthest(mine, reference[name])
    found["answers"] = answers(base, parallel)
    if parallel.main:
        (base / "found.json").write_text(json.dumps(found))
    parallel.close()


if __name__ == "__main__":
    main()
