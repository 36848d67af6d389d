"""`vireo view`: a run as a page: its curves, and the rollouts of each step token by token."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image as Pil

from vireo.data.conversation import Conversation, Image, ImageRef
from vireo.data.images import load_image
from vireo.data.references import ImageError, open_reference
from vireo.errors import InputError
from vireo.report.page import data_uri, write
from vireo.report.view_page import page
from vireo.rollout import dump
from vireo.rollout.sample import Sample


def view(run: str, *, html: str | None = None, steps: int = 20, port: int = 0) -> None:
    """Write one page with `steps` steps, spread evenly (`html`), or serve all of them at
    127.0.0.1:`port` (0: any free one) until SIGINT or SIGTERM, following the run.

    InputError: `run` is no run folder, the page cannot be written, or the port is taken.
    """
    opened = Run(run)
    if html is None:
        from vireo.report.view_server import serve

        return serve(opened, port)
    pictures = Pictures()
    every = opened.steps()
    chosen = spread(every, steps)
    data = opened.news() | {"name": opened.name, "live": False, "steps": chosen}
    data |= {"total": len(every), "data": {n: opened.step(n, pictures) for n in chosen}}
    write(html, page(data | {"pictures": pictures.urls}))
    size = Path(html).stat().st_size / 1e6
    print(f"{len(chosen)} of {len(every)} steps with rollouts, {size:.1f} MB (--steps N)")


def spread(steps: Sequence[int], count: int) -> list[int]:
    """`count` of the steps at most, evenly; the last one always, the first one if two fit."""
    if len(steps) <= count:
        return list(steps)
    if count == 1:
        return [steps[-1]]
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


class Pictures:
    """Pictures as data URLs, each once, by a hash of its bytes."""

    def __init__(self) -> None:
        self.urls: dict[str, str] = {}

    def part(self, ref: ImageRef) -> dict[str, str]:
        """What stands for the picture in a turn: its key, or why it cannot be shown."""
        try:
            if isinstance(ref.value, Pil.Image):
                data = ref.value.tobytes()
            else:
                with open_reference(ref) as stream:
                    data = stream.read()
            key = hashlib.sha256(data).hexdigest()[:20]
            if key not in self.urls:
                self.urls[key] = data_uri(load_image(ref))
            return {"image": key}
        except ImageError as error:
            return {"text": f"[{error.message}]"}


class Run:
    """A run folder, read anew at every call. InputError: it is none."""

    def __init__(self, folder: str):
        path = Path(folder)
        self.name, self.metrics, self.rollouts = folder, path / "metrics.jsonl", path / "rollouts"
        if not any((path / n).exists() for n in ("metrics.jsonl", "settings.yaml", "rollouts")):
            found = "there is no such folder" if not path.is_dir() else "it has none of these"
            raise InputError(
                f"{folder} is no run folder: expected metrics.jsonl, settings.yaml or rollouts/ in "
                f"it, and {found}; give the --output_dir of a run"
            )

    def steps(self) -> list[int]:
        """Steps that have rollouts, in order."""
        names = (re.fullmatch(r"step-(\d+)\.jsonl", p.name) for p in self.rollouts.glob("step-*"))
        return sorted(int(name[1]) for name in names if name)

    def news(self, at: str = "") -> dict[str, Any]:
        """What metrics.jsonl holds behind `at`, which an earlier call returned: `curves`, lists of
        [step, value or None] by name; `broken`, numbers of lines that cannot be read; the next
        `at`; `reset`, whether it begins anew, because the file is another one by now."""
        curves: dict[str, list[list[float | None]]] = defaultdict(list)
        broken: list[int] = []
        file = offset = line = 0
        data, reset = b"", True
        if self.metrics.exists():
            with self.metrics.open("rb") as stream:
                file = self.metrics.stat().st_ino
                known = re.fullmatch(r"(\d+)-(\d+)-(\d+)", at)
                if known and int(known[1]) == file and int(known[2]) <= stream.seek(0, 2):
                    offset, line, reset = int(known[2]), int(known[3]), False
                stream.seek(offset)
                data = stream.read()
        for text in data.splitlines(keepends=True):
            record = _record(text)
            if record is None and not text.endswith(b"\n"):
                break  # being written, or cut off by a kill
            offset, line = offset + len(text), line + 1
            if record is None:
                broken += [line] if text.strip() else []
                continue
            for name, value in record.items():
                if name != "step" and (value is None or _is_number(value)):
                    curves[name].append([record["step"], _number(value)])
        at = f"{file}-{offset}-{line}"
        return {"at": at, "reset": reset, "curves": curves, "broken": broken}

    def step(self, step: int, pictures: Pictures) -> dict[str, Any]:
        """The groups of a step, in the order of its file; `error` if that cannot be read."""
        groups: dict[str, list[Sample]] = defaultdict(list)
        try:
            for sample in dump.read(self.rollouts / f"step-{step}.jsonl"):
                groups[sample.group].append(sample)
        except InputError as error:
            return {"groups": [], "error": str(error)}
        return {"groups": [_group(samples, pictures) for samples in groups.values()]}


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and _is_number(record.get("step")) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any, digits: int | None = None) -> float | None:
    """A number that JSON has, or None."""
    if not _is_number(value) or not math.isfinite(value):
        return None
    return value if digits is None else round(value, digits)


def _group(samples: list[Sample], pictures: Pictures) -> dict[str, Any]:
    first = samples[0]
    rewards = [s.reward for s in samples if s.reward is not None]
    kind = ""  # as `groups/...` of the metrics counts them; all equal in between is neither
    if rewards:
        low, high = min(rewards), max(rewards)
        kind = "mixed" if low < high else "right" if low >= 1 else "wrong" if high <= 0 else ""
    shown = [_sample(sample) for sample in samples]
    gaps = [
        abs(e - t)
        for one in shown
        for e, t, m in zip(one["engine"], one["trainer"], one["mask"])
        if e is not None and t is not None and m
    ]
    return {
        "name": first.group,
        "where": first.conversation.where,
        "prompt": _turns(first.conversation, pictures),
        "answer": first.answer,
        "kind": kind,
        "gap": max(gaps, default=None),
        "samples": shown,
    }


def _turns(row: Conversation, pictures: Pictures) -> list[dict[str, Any]]:
    """The prompt's turns: all but an answer that ends the row."""
    turns = row.turns
    if len(turns) > 1 and turns[-1].role == "assistant":
        turns = turns[:-1]
    return [
        {
            "role": turn.role,
            "parts": [
                pictures.part(row.images[p.index]) if isinstance(p, Image) else asdict(p)
                for p in turn.parts
            ]
            + [{"text": json.dumps(call, ensure_ascii=False)} for call in turn.tool_calls],
        }
        for turn in turns
    ]


def _sample(sample: Sample) -> dict[str, Any]:
    """Lists are as long as the response; None where the trainer or the engine said nothing."""
    more, count = sample.metadata, len(sample.response_ids)

    def aligned(values: Any) -> list[float | None]:
        values = values if isinstance(values, list) else [values] * count
        return [_number(value, 5) for value in values] if len(values) == count else [None] * count

    pieces = more.get("pieces")
    return {
        "index": sample.index,
        "reward": _number(sample.reward),
        "rewards": {name: _number(value) for name, value in sample.rewards.items()},
        "finish": sample.finish or sample.status,
        "spans": sample.spans,
        "text": sample.text,
        "pieces": pieces if isinstance(pieces, list) and len(pieces) == count else None,
        "engine": aligned(sample.logprobs),
        "trainer": aligned(more.get("trainer_logprobs")),
        "reference": aligned(more["reference_logprobs"]) if "reference_logprobs" in more else None,
        "advantage": aligned(more.get("advantage")),
        "mask": sample.mask if len(sample.mask) == count else [1] * count,
    }
