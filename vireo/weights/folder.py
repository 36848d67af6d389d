"""Weights as a model folder, for engines that read them from a disk both sides see."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from vireo.aside import written_aside

SHARD_BYTES = 5 << 30
SMALL = (".json", ".jinja", ".txt", ".model", ".py")  # endings of what a model folder has beside


def write_weights(
    out: Path, model: str, named: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write `out` anew: (checkpoint name, tensor) pairs, taken one at a time, in files of
    `shard_bytes` or little more, beside the small files of the folder `model`."""
    with written_aside(out) as folder:
        for file in Path(model).iterdir():
            if file.suffix in SMALL and not file.name.endswith(".index.json"):
                shutil.copy2(file, folder)
        names, shard, size = dict[str, str](), dict[str, Tensor](), 0

        def close() -> None:
            name = f"model-{len(set(names.values())):05}.safetensors"
            save_file(shard, folder / name, {"format": "pt"})
            names.update(dict.fromkeys(shard, name))
            shard.clear()

        total = 0
        for name, tensor in named:
            if shard and size + tensor.nbytes > shard_bytes:
                close()
                size = 0
            # A copy: the next tensor may come in the same memory.
            shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
            size, total = size + tensor.nbytes, total + tensor.nbytes
        close()
        index = {"metadata": {"total_size": total}, "weight_map": names}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
