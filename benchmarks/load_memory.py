"""Peak host memory of each rank while a model is loaded and sharded, against its shard.

    python benchmarks/load_memory.py [--ranks 4] [--layers 24]

Builds a Qwen2.5-VL-shaped model (0.5 B parameters with 24 layers), starts CPU ranks, and prints for
each the highest resident memory above what the imports took. Ranks other than 0 must stay under
1.2 x their shard + 1 GB; the script fails if one does not.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def resident(key: str) -> float:
    """VmRSS or VmHWM of this process in GB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e6 for line in lines if line.startswith(key + ":"))


def rank(model: str) -> None:
    import torch

    from vireo import parallel as parallel_module
    from vireo.data.render import Renderer
    from vireo.models.build import ModelSpec, build_policy

    torch.set_num_threads(1)
    parallel = parallel_module.start()
    renderer = Renderer(model)
    parallel.barrier()
    before = resident("VmRSS")
    spec = ModelSpec(model)
    policy, _ = build_policy(spec, renderer.config, renderer.family, parallel, renderer.dummy())
    peak = resident("VmHWM") - before
    shard = sum(p.to_local().numel() * p.element_size() for p in policy.parameters()) / 1e9
    limit = 1.2 * shard + 1.0
    line = f"| {parallel.rank} | {shard:.2f} | {peak:.2f} | {limit:.2f} |"
    lines = parallel.gather(line)
    fine = parallel.gather(parallel.rank == 0 or peak <= limit)
    if parallel.main:
        total = sum(p.numel() for p in policy.parameters()) / 1e6
        print(f"{total:.0f} M parameters, {parallel.world} ranks")
        print("| rank | shard GB | peak over imports GB | limit GB |\n| --- | --- | --- | --- |")
        print("\n".join(lines), flush=True)
    parallel.close()
    if not all(fine):
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.model:
        return rank(given.model)
    from vireo.families.tiny import build

    with tempfile.TemporaryDirectory() as folder:
        build(
            "qwen2_5_vl",
            folder,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=given.layers,
            num_attention_heads=16,
            num_key_value_heads=4,
            vocab_size=152_064,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [8, 12, 12],
            },
            vision={"out_hidden_size": 1024},
        )
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launcher, f"--nproc_per_node={given.ranks}", __file__, "--model", folder]
        root = str(Path(__file__).resolve().parent.parent)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
        sys.exit(subprocess.run(command, env=env).returncode)


if __name__ == "__main__":
    main()
