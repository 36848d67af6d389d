"""Every family on two ranks against one: gradients, with text-only rows beside image rows.

    torchrun --nproc_per_node=2 -m tests.ranks.families BASE

BASE/FAMILY holds a model, rows and one rank's gradients; writes BASE/FAMILY/found.json.
"""

from __future__ import annotations

import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks.cases import engine_for, examples_of, furthest, gradients
from vireo import parallel as parallel_module
from vireo.data.packing import by_kind, by_rows
from vireo.data.ragged import Batch, Example


def micro_batches(examples: list[Example], can_mix: bool, rows: int) -> list[Batch]:
    return [b for kind in by_kind(examples, can_mix) for b in by_rows(kind, rows)]


def compare(folder: Path) -> dict[str, Any]:
    """Rank 0 has the rows with images, rank 1 those without; then both have some of each."""
    parallel = parallel_module.start()
    reference = torch.load(folder / "reference.pt")
    # Gradients of linear attention's decay are sums that cancel to a thousandth of their terms.
    floor = 0.01 * max(float(grad.abs().max()) for grad in reference.values())
    found = {}
    for recompute in (False, True):
        engine, renderer = engine_for(str(folder / "model"), parallel, recompute=recompute)
        examples = examples_of(renderer, folder / "data" / "rows.json")
        texts = [e for e in examples if not e.images]
        images = [e for e in examples if e.images]
        apart = [images, texts] if images else [texts[:1], texts[1:]]
        for name, mine in (
            ("apart", apart[parallel.rank]),
            ("dealt", examples[parallel.rank :: 2]),
        ):
            batches = micro_batches(mine, renderer.family.can_mix, 2)
            grads = gradients(engine, batches)
            found[f"{name}, recompute {recompute}"] = furthest(grads, reference, floor)
    return found


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    for folder in sorted(p for p in Path(sys.argv[1]).iterdir() if p.is_dir()):
        try:
            result: dict[str, Any] = compare(folder)
        except Exception:
            result = {"error": traceback.format_exc()}
        if dist.get_rank() == 0 or "error" in result:
            (folder / "found.json").write_text(json.dumps(result))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
