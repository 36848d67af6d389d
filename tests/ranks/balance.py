"""Runs of `vireo.train` that note what each rank has, after a test of `Parallel.exchange`.

    torchrun --nproc_per_node=2 -m tests.ranks.balance BASE NAME ...

BASE/NAME/flags.json holds the flags of a run, in which {out} is BASE/NAME/WORLD. Each run writes
to it rank-RANK.jsonl, a line a step: the rows of this rank with a checksum of all their tensors,
and the tokens of its micro-batches. BASE/exchange-WORLD-RANK.json has what came of the exchange.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vireo import parallel as parallel_module
from vireo.data.ragged import Batch, Example
from vireo.parallel import Parallel
from vireo.settings import load_settings
from vireo.trainers import registry, sft

made = sft.micro_batches


def checksum(example: Example) -> str:
    digest = hashlib.sha256(str(example.images).encode())
    for name, value in sorted(example.fields.items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)} {example.keys[name]}".encode())
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def train(folder: Path, parallel: Parallel) -> None:
    """One run of `vireo.train`, noted."""
    out = folder / str(parallel.world)
    out.mkdir(exist_ok=True)
    flags = [
        flag.replace("{out}", str(out)) for flag in json.loads((folder / "flags.json").read_text())
    ]

    def noted(examples: Sequence[Example], **options: Any) -> list[Batch]:
        batches = made(examples, **options)
        rows = {example.where: checksum(example) for example in examples}
        with (out / f"rank-{parallel.rank}.jsonl").open("a") as file:
            file.write(json.dumps([rows, [batch.tokens for batch in batches]]) + "\n")
        return batches

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft, "micro_batches", noted)
        settings = load_settings(flags)
        assert registry.find(settings.trainer)(settings) == 0


def exchanged(parallel: Parallel) -> dict[str, Any]:
    """Every rank sends the last one its number and a tensor, and keeps a word for itself."""
    sent = []

    def counted(tensor: torch.Tensor, target: int) -> Any:
        sent.append(target)
        return send(tensor, target)

    send, last = dist.isend, parallel.world - 1
    outgoing: list[list[Any]] = [[] for _ in range(parallel.world)]
    outgoing[last] += [parallel.rank, torch.full((3,), parallel.rank, dtype=torch.bfloat16)]
    outgoing[parallel.rank].append("mine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", counted)
        got = parallel.exchange(outgoing)
        nothing = parallel.exchange([[] for _ in range(parallel.world)])
    got = [[*one.tolist(), str(one.dtype)] if torch.is_tensor(one) else one for one in got]
    return {"got": got, "nothing": nothing, "sent": sent}


def main() -> None:
    base = Path(sys.argv[1])
    torch.set_num_threads(1)
    # A rank that waits for another longer than this has drifted: the test fails, it never hangs.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    parallel = parallel_module.start()
    found = json.dumps(exchanged(parallel))
    (base / f"exchange-{parallel.world}-{parallel.rank}.json").write_text(found)
    for name in sys.argv[2:]:
        train(base / name, parallel)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
