"""The run folder: settings, environment, metrics, samples and log, readable without a service."""

from __future__ import annotations

import json
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("vireo-vl", "torch", "torchvision", "transformers", "tokenizers", "datasets", "numpy")


class RunFolder:
    """`path`/settings.yaml, environment.json, metrics.jsonl, log.txt, samples/.

    Only the main rank writes (`active`). `resumed_at`: records of later steps, left by the run
    that was killed, are dropped, so that metrics.jsonl reads like an unbroken run's.
    """

    def __init__(self, path: Path, settings_yaml: str, active: bool, resumed_at: int | None):
        self.path, self.active = path, active
        if not active:
            return
        path.mkdir(parents=True, exist_ok=True)
        (path / "settings.yaml").write_text(settings_yaml)
        (path / "environment.json").write_text(json.dumps(environment(), indent=1))
        records = path / "metrics.jsonl"
        if resumed_at is None:
            records.write_text("")
        elif records.exists():
            kept = [line for line in records.read_text().splitlines() if _step(line) <= resumed_at]
            records.write_text("".join(line + "\n" for line in kept))

    def metrics(self, record: dict[str, Any]) -> None:
        """Append one record to metrics.jsonl."""
        if self.active:
            with (self.path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")

    def say(self, text: str) -> None:
        """A line for the person: to the console and to log.txt."""
        if self.active:
            print(text, flush=True)
            with (self.path / "log.txt").open("a") as file:
                file.write(time.strftime("%H:%M:%S ") + text + "\n")

    def samples(self, step: int, answers: list[dict[str, Any]], pictures: list[list[Any]]) -> None:
        """Answers of an evaluation: samples/step-N.jsonl with the images that the model saw."""
        if not self.active or not answers:
            return
        folder = self.path / "samples"
        folder.mkdir(exist_ok=True)
        write_samples(folder / f"step-{step}.jsonl", answers, pictures)


def write_samples(file: Path, answers: list[dict[str, Any]], pictures: list[list[Any]]) -> None:
    """One JSON line an answer, its pictures beside the file as PNG."""
    with file.open("w") as out:
        for i, (answer, images) in enumerate(zip(answers, pictures)):
            names = []
            for k, image in enumerate(images):
                name = f"{file.stem}-{i}-{k}.png"
                image.save(file.parent / name)
                names.append(name)
            out.write(json.dumps(answer | {"images": names}, ensure_ascii=False) + "\n")


def environment() -> dict[str, Any]:
    """Versions and machine, for a report that can be read later."""
    import torch

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "gpus": gpus,
        "packages": {name: version(name) for name in PACKAGES},
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return float("inf")  # a line cut short by a kill
