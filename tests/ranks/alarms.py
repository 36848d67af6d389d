"""Alarms on two ranks that have different rows.

    torchrun --nproc_per_node=2 -m tests.ranks.alarms FOLDER ...

FOLDER holds a model and rows; writes FOLDER/alarms.json: case -> what each rank found.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.ranks.cases import engine_for, examples_of
from vireo import parallel as parallel_module
from vireo.data.packing import micro_batches
from vireo.training.alarms import look


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    parallel = parallel_module.start()
    for folder in map(Path, sys.argv[1:]):
        engine, renderer = engine_for(str(folder / "model"), parallel)
        rows = examples_of(renderer, folder / "data" / "rows.json")
        texts, images = [r for r in rows if not r.images], [r for r in rows if r.images]
        cases = {"apart": (images, texts), "one idle": (rows, []), "text": (texts, texts)}
        found = {}
        for name, both in cases.items():
            mine = micro_batches(both[parallel.rank], rows=4, can_mix=renderer.family.can_mix)
            found[name] = parallel.gather(look(engine, mine))
        if parallel.main:
            (folder / "alarms.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
