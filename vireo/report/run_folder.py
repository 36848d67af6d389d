"""The run folder: settings, environment, metrics, samples and log, readable without a service."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from vireo.errors import VireoError
from vireo.report.environment import environment
from vireo.report.trackers import RunFacts, Trackers, choose
from vireo.settings import Settings


class RunFolder:
    """`path`/settings.yaml, environment.json, metrics.jsonl, log.txt, samples/.

    Only the main rank writes (`active`). `resumed_at`: records of later steps, left by the run
    that was killed, are dropped, so that metrics.jsonl reads like an unbroken run's; all of them,
    if it was killed before its first checkpoint (None). The trackers
    of --report_to are opened here and closed on leaving `with`. InputError: one cannot be opened.
    """

    def __init__(self, path: Path, settings: Settings, active: bool, resumed_at: int | None):
        self.path, self.active, self._closed = path, active, False
        if not active:
            return
        path.mkdir(parents=True, exist_ok=True)
        (path / "settings.yaml").write_text(settings.to_yaml())
        (path / "environment.json").write_text(json.dumps(environment(), indent=1))
        records = path / "metrics.jsonl"
        if records.exists():
            last = -1 if resumed_at is None else resumed_at
            kept = [line for line in records.read_text().splitlines() if _step(line) <= last]
            aside = path / ".metrics.jsonl"
            aside.write_text("".join(line + "\n" for line in kept))
            os.replace(aside, records)
        run = settings.run
        facts = RunFacts(
            folder=path,
            project=run.project,
            name=run.run_name or path.resolve().name,
            config=settings.model_dump(mode="json", by_alias=True),
            resumed_at=resumed_at,
        )
        self._trackers = Trackers(choose(run.report_to), facts, self.say)

    def begin(self) -> None:
        """The run has begun: from here on its folder is taken, and another one is refused it."""
        if self.active:
            (self.path / "metrics.jsonl").touch()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failed=error is not None)

    def close(self, failed: bool = False) -> None:
        """Close the trackers; they are told whether the run failed. The first call counts."""
        if self.active and not self._closed:
            self._closed = True
            self._trackers.finish(failed)

    def metrics(self, record: dict[str, Any]) -> None:
        """Append one record to metrics.jsonl and send its numbers to the trackers."""
        if self.active:
            self._append("metrics.jsonl", json.dumps(record))
            self._trackers.record(record)

    def last_evaluated(self) -> int:
        """The step of the last evaluation on record, -1 for none."""
        records = self.path / "metrics.jsonl"
        lines = records.read_text().splitlines() if self.active and records.exists() else []
        found = [json.loads(line) for line in lines if '"eval_loss"' in line]
        return found[-1]["step"] if found else -1

    def say(self, text: str) -> None:
        """A line for the person: to the console and to log.txt."""
        if self.active:
            print(text, flush=True)
            self._append("log.txt", time.strftime("%H:%M:%S ") + text)

    def _append(self, name: str, line: str) -> None:
        try:
            with (self.path / name).open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            what = error.strerror or error
            raise VireoError(f"{self.path / name} cannot be written: {what}") from error

    def samples(self, step: int, answers: list[dict[str, Any]], pictures: list[list[Any]]) -> None:
        """Answers of an evaluation: samples/step-N.jsonl with the images that the model saw."""
        if not self.active or not answers:
            return
        folder = self.path / "samples"
        folder.mkdir(exist_ok=True)
        write_samples(folder / f"step-{step}.jsonl", answers, pictures)
        self._trackers.answers(step, answers)


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


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return float("inf")  # a line cut short by a kill
