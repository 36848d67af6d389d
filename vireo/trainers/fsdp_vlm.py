"""Trainer `fsdp_vlm`: supervised fine-tuning of a vision-language model.

    torchrun --nproc_per_node=2 -m vireo.train --trainer fsdp_vlm \\
        --vlm_model_name_or_path MODEL --train_file rows.json --output_dir runs/first
"""

from __future__ import annotations

from vireo.settings import Settings
from vireo.trainers import sft


def run(settings: Settings) -> int:
    return sft.run(settings, vision=True)
