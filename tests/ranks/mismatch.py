"""Scoring and mismatch metrics on ranks that hold different responses.

    torchrun --nproc_per_node=2 -m tests.ranks.mismatch FOLDER ...

FOLDER holds a model; writes FOLDER/mismatch.json: log-probs by rank, and the metrics of each rank.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.ranks.cases import engine_for
from tests.tiny_models import noise, row, user
from vireo import parallel as parallel_module
from vireo.data.render import Renderer
from vireo.rl.mismatch import Mismatch
from vireo.rl.score import Shape, score
from vireo.rollout.sample import Sample, Sampling

PAIRS = 5


def pairs(renderer: Renderer) -> list:
    """Rows with 0, 1 or 2 images (where the family has any) and responses of 3 to 11 tokens, which
    were never sampled."""
    made = []
    for i in range(PAIRS):
        count = i % 3 if renderer.family.has_vision else 0
        images = [noise(56, 56 + 28 * k, seed=10 * i + k) for k in range(count)]
        prompt = renderer.rollout(row(user(*range(len(images)), f"Number {i}?"), images=images))
        ids = [5 + 3 * i + k for k in range(3 + 2 * i)]
        logprobs = [-0.1 * k for k in range(len(ids))]
        sample = Sample(str(i), 0, prompt.row, response_ids=ids, logprobs=logprobs)
        sample.mask = [1] * len(ids)
        sample.sampling = Sampling(temperature=0.7)
        made.append((prompt, sample))
    return made


def measured(logprobs: list[torch.Tensor], some: list) -> Mismatch:
    engine = [sample.logprobs for _, sample in some]
    return Mismatch.of(engine, logprobs, [bool(prompt.pictures) for prompt, _ in some])


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    parallel = parallel_module.start()
    for folder in map(Path, sys.argv[1:]):
        engine, renderer = engine_for(str(folder), parallel)
        everything = pairs(renderer)
        mine = everything[:4] if parallel.main else everything[4:]
        logprobs = score(engine, renderer, mine, Shape(rows=2))
        figures = measured(logprobs, mine).over_ranks(parallel).figures()
        # A rank with nothing to score runs along, and adds nothing.
        alone = score(engine, renderer, everything if parallel.main else [], Shape(rows=2))
        again = measured(alone, everything[: len(alone)]).over_ranks(parallel).figures()
        found = {
            "logprobs": parallel.gather([one.tolist() for one in logprobs]),
            "figures": parallel.gather(figures),
            "one idle": parallel.gather(again),
        }
        if parallel.main:
            (folder / "mismatch.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
