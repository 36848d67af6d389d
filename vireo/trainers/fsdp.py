"""Trainer `fsdp`: supervised fine-tuning of a text model, the same path without images."""

from __future__ import annotations

from vireo.settings import Settings
from vireo.trainers import sft


def run(settings: Settings) -> int:
    return sft.run(settings, vision=False)
