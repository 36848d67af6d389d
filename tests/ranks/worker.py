"""Runs the cases of one world size in one torchrun: starting ranks costs more than the cases.

    torchrun --nproc_per_node=2 -m tests.ranks.worker OUT MODEL DATA

writes OUT/CASE.json with what rank 0 found, or the traceback of the first failure.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from tests.ranks.cases import CASES


def main() -> None:
    out, model, data = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    from datetime import timedelta

    # A rank that waits for another longer than this has drifted: the test fails, it never hangs.
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    for name, case in CASES.items():
        if case.worlds and dist.get_world_size() not in case.worlds:
            continue
        try:
            result = case.run(model, data, out)
        except Exception:
            result = {"error": traceback.format_exc()}
        if dist.get_rank() == 0 or "error" in (result or {}):
            (out / f"{name}.json").write_text(json.dumps(result))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
