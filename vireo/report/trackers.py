"""Trackers beside the run folder: TensorBoard, W&B and trackio, all fed with the same records.

Only `RunFolder` talks to this file. A tracker gets the numbers of each record and the answers of
each evaluation; everything else about a run is in its folder. A tracker that cannot be opened stops
the run at its start, where nothing is lost yet. One that fails later is dropped and said aloud.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from vireo.errors import InputError, first_line
from vireo.nearest import nearest


@dataclass(frozen=True)
class RunFacts:
    """What a tracker is told of a run when it opens."""

    folder: Path
    project: str
    name: str
    config: dict[str, Any]  # the settings, section by section
    resumed_at: int | None  # step of the checkpoint that the run goes on from


class Tracker(Protocol):
    """One open tracker. Any method may raise; `Trackers` says so and goes on without it."""

    def numbers(self, step: int, values: dict[str, float]) -> None: ...

    def answers(self, step: int, rows: Sequence[dict[str, Any]]) -> None: ...

    def finish(self, failed: bool) -> None: ...


class TensorBoard:
    """Event files in RUN/tensorboard, by tensorboard's own writer: no torch is needed."""

    def __init__(self, run: RunFacts):
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = event_pb2.Event
        self._writer = EventFileWriter(str(run.folder / "tensorboard"))
        # Readers of the folder drop what a run of it that was killed wrote from this step on.
        first = 0 if run.resumed_at is None else run.resumed_at + 1
        self._write(first, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))
        settings = json.dumps(run.config, indent=1, ensure_ascii=False)
        self._text(run.resumed_at or 0, "settings", f"```\n{settings}\n```")

    def numbers(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        pairs = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(step, summary=Summary(value=pairs))

    def answers(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        self._text(step, "eval/answers", _markdown_table(rows))

    def finish(self, failed: bool) -> None:
        self._writer.close()

    def _text(self, step: int, tag: str, markdown: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata

        text = TensorProto(dtype=DT_STRING, string_val=[markdown.encode()])
        kind = create_summary_metadata(display_name="", description="")
        self._write(
            step, summary=Summary(value=[Summary.Value(tag=tag, metadata=kind, tensor=text)])
        )

    def _write(self, step: int, **what: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, **what))
        self._writer.flush()  # a killed run keeps its last step, and a full disk is seen at once


class Wandb:
    """A W&B run in RUN/wandb. A resumed run continues it, by the id in RUN/trackers.json.

    W&B keeps the first value of a step: those that a killed run reached after its checkpoint stay
    as they were logged then.
    """

    def __init__(self, run: RunFacts):
        import wandb

        ids = run.folder / "trackers.json"
        resumed = run.resumed_at is not None and ids.exists()
        name = json.loads(ids.read_text())["wandb"] if resumed else uuid.uuid4().hex[:8]
        self._table = wandb.Table
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=name,
            resume="allow",
            config=run.config,
            dir=os.environ.get("WANDB_DIR") or str(run.folder),
        )
        ids.write_text(json.dumps({"wandb": name}))

    def numbers(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def answers(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        columns: list[Any] = list(rows[0])
        table = self._table(columns=columns, data=[[row[name] for name in columns] for row in rows])
        self._run.log({"eval/answers": table}, step=step)

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A trackio run, which goes where trackio's own variables say (by default: this machine).

    It is found again by its name when the run is resumed. trackio has no way to drop steps, so
    those after the checkpoint are there twice.
    """

    def __init__(self, run: RunFacts):
        import trackio

        resume = "never" if run.resumed_at is None else "allow"
        self._close = trackio.finish  # the run's own leaves it open for trackio's exit hook
        self._run = trackio.init(
            project=run.project, name=run.name, config=run.config, resume=resume
        )

    def numbers(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def answers(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Not sent: they are in RUN/samples."""

    def finish(self, failed: bool) -> None:
        self._close()


KINDS: dict[str, Callable[[RunFacts], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}
_EXTRA = 'pip install "vireo-vl[track]"'
INSTALL = {
    "tensorboard": _EXTRA,
    "wandb": _EXTRA,
    # trackio asks for a Pillow below ours, so no extra can name both; it works with ours.
    "trackio": 'pip install trackio, and after it pip install "pillow>=13"',
}


def choose(report_to: Sequence[str] | None) -> list[str]:
    """The trackers of a run: those named, or tensorboard where it is installed. Opens nothing.

    InputError: a name is unknown (says the nearest), or its package is not installed.
    """
    if report_to is None:
        return ["tensorboard"] if _installed("tensorboard") else []
    names = list(dict.fromkeys(report_to))
    if names == ["none"]:
        return []
    for name in names:
        if name == "none":
            raise InputError(f"--report_to {','.join(names)}: none goes with no other tracker")
        if name not in KINDS:
            near = nearest(name, [*KINDS, "none"])
            hint = f"did you mean {near}?" if near else f"there are {', '.join(KINDS)} and none"
            raise InputError(f"--report_to: unknown tracker {name!r}; {hint}")
        if not _installed(name):
            raise InputError(
                f"--report_to {name}: the package {name} is not installed; {INSTALL[name]}, or "
                f"leave {name} out"
            )
    return names


class Trackers:
    """The open trackers of one run. InputError: one cannot be opened."""

    def __init__(self, names: Sequence[str], run: RunFacts, say: Callable[[str], None]):
        self._say = say
        self._open: dict[str, Tracker] = {}
        self._failed: dict[str, str] = {}
        for name in names:
            try:
                self._open[name] = KINDS[name](run)
            except Exception as error:
                self.finish(failed=True)
                raise InputError(
                    f"--report_to {name} could not be opened: {first_line(error)}; mend that, or "
                    f"leave {name} out (--report_to none: no tracker)"
                ) from error

    def record(self, record: dict[str, Any]) -> None:
        """Send the numbers of one record: train/NAME, or eval/NAME of an evaluation's."""
        step, values = record["step"], tracked_numbers(record)
        self._each(f"step {step}", lambda tracker: tracker.numbers(step, values))

    def answers(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Send the answers of an evaluation, one dict of the same keys a row."""
        self._each(f"step {step}", lambda tracker: tracker.answers(step, rows))

    def finish(self, failed: bool) -> None:
        """Close every tracker; then say again which one has only a part of the run."""
        self._each("its end", lambda tracker: tracker.finish(failed))
        self._open.clear()
        for problem in self._failed.values():
            self._say(f"warning: {problem}")

    def _each(self, where: str, call: Callable[[Tracker], None]) -> None:
        """A tracker that fails is dropped: its service is not worth hours of training, the records
        are in metrics.jsonl all the same, and to try again at each step could cost a time-out each.
        It is said when it happens and again at the end, where a person looks first."""
        for name, tracker in list(self._open.items()):
            try:
                call(tracker)
            except Exception as error:  # whatever another package may raise
                del self._open[name]
                self._failed[name] = (
                    f"{name} failed at {where} and got nothing after it ({first_line(error)}); "
                    "metrics.jsonl has every record"
                )
                self._say(f"warning: {self._failed[name]}")


def tracked_numbers(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record by the names they are tracked under; None and texts are left out."""
    group = "eval" if any(name.startswith("eval_") for name in record) else "train"
    return {
        f"{group}/{name.removeprefix('eval_')}": value
        for name, value in record.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _installed(name: str) -> bool:
    # A folder of that name, such as W&B's own wandb/, is found too but has no file of its own.
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


def _markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    def line(cells: Sequence[Any]) -> str:
        texts = [" ".join(str(cell).split()).replace("|", "\\|") for cell in cells]
        return f"| {' | '.join(texts)} |"

    columns = list(rows[0])
    body = [line([row[name] for name in columns]) for row in rows]
    return "\n".join([line(columns), "|" + " --- |" * len(columns), *body])
