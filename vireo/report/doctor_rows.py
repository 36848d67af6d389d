"""What `vireo doctor` counts row by row: turns, roles, lengths, twins, and what was refused."""

from __future__ import annotations

import json
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from vireo.data.conversation import Conversation, Text, Turn
from vireo.errors import RowError
from vireo.report.doctor_images import digest, pairs
from vireo.report.figures import histogram, share, spread

_SHOWN = 5
NONE = 2**32 - 1  # the length of a row that has none


class Refused:
    """Refused rows by reason: how many, and the first few."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._first: dict[str, list[str]] = defaultdict(list)

    def add(self, error: RowError) -> None:
        self.counts[error.reason] += 1
        if len(self._first[error.reason]) < _SHOWN:
            place = f"{error.where}: " if error.where else ""
            self._first[error.reason].append(place + error.message)

    def report(self) -> list[dict[str, Any]]:
        return [
            {"reason": reason, "count": count, "examples": self._first[reason]}
            for reason, count in self.counts.most_common()
        ]


class RowCounts:
    """Counts over rows that can be read; about 40 bytes of memory a row."""

    def __init__(self) -> None:
        self.roles: Counter[str] = Counter()
        self._turns, self._images, self._characters = array("I"), array("I"), array("I")
        # A row's whole content, its question (all up to the last answer) and that answer.
        self._rows, self._questions, self._answers = array("Q"), array("Q"), array("Q")
        self._numbers = array("I")
        self.rows = 0

    def add(self, number: int, row: Conversation, pictures: list[int] | None) -> None:
        """Row `number`, whose pictures have these hashes (None: one is bad, so it has no twin)."""
        self.rows += 1
        self.roles.update(turn.role for turn in row.turns)
        self._turns.append(len(row.turns))
        self._images.append(len(row.images))
        self._characters.append(sum(len(turn.text) for turn in row.turns))
        if pictures is None:
            return
        last = max(i for i, turn in enumerate(row.turns) if turn.role == "assistant")
        shown = json.dumps([pictures, row.tools], default=str).encode()
        question, answer = map(_content, (row.turns[:last], row.turns[last:]))
        self._numbers.append(number)
        self._rows.append(digest(shown, question, answer))
        self._questions.append(digest(shown, question))
        self._answers.append(digest(answer))

    @property
    def text_only(self) -> int:
        return int((np.array(self._images) == 0).sum())

    def turns(self) -> dict[str, Any]:
        """The section `turns` of the report."""
        return {
            "total": int(np.array(self._turns).sum()),
            "per_row": spread(self._turns),
            "roles": dict(self.roles.most_common()),
        }

    def images_per_row(self) -> dict[str, int]:
        found, counts = np.unique(np.array(self._images, dtype=np.int64), return_counts=True)
        return {str(n): c for n, c in zip(found.tolist(), counts.tolist())}

    def characters(self) -> dict[str, Any]:
        """The section `lengths` where there is no model."""
        return {
            "unit": "characters",
            "per_row": spread(self._characters),
            "histogram": histogram(self._characters),
        }

    def twins(self, place: Callable[[int], str]) -> dict[str, Any]:
        """Rows of one content, and questions (with their pictures) of several answers."""
        rows = np.array(self._rows, dtype=np.uint64)
        questions = np.array(self._questions, dtype=np.uint64)
        answers = np.array(self._answers, dtype=np.uint64)
        copies = _groups(rows, np.ones(len(rows), dtype=bool))
        # Of rows with one content only the first, so that a group has different answers.
        first = np.zeros(len(rows), dtype=bool)
        first[np.unique(pairs(questions, answers), return_index=True)[1]] = True
        several = _groups(questions, first)

        def listed(groups: list[np.ndarray]) -> list[list[str]]:
            return [[place(self._numbers[i]) for i in g[:_SHOWN].tolist()] for g in groups[:_SHOWN]]

        return {
            "rows": {
                "groups": len(copies),
                "extra_rows": sum(len(group) - 1 for group in copies),
                "extra_share": share(sum(len(group) - 1 for group in copies), len(rows)),
                "examples": listed(copies),
            },
            "questions": {"count": len(several), "examples": listed(several)},
        }


def _groups(keys: np.ndarray, used: np.ndarray) -> list[np.ndarray]:
    """The indices of each key that stands more than once among `used`, by their first index."""
    at = np.flatnonzero(used)
    order = at[np.argsort(keys[at], kind="stable")]
    starts = np.flatnonzero(np.diff(keys[order], prepend=~keys[order[:1]]))
    sizes = np.diff(starts, append=len(order))
    found = [order[start : start + size] for start, size in zip(starts, sizes) if size > 1]
    return sorted(found, key=lambda group: int(group[0]))


def _content(turns: tuple[Turn, ...]) -> bytes:
    parts = [
        [turn.role, [p.text if isinstance(p, Text) else p.index for p in turn.parts]]
        + ([list(turn.tool_calls)] if turn.tool_calls else [])
        for turn in turns
    ]
    return json.dumps(parts, default=str).encode()


class TokenCounts:
    """Lengths in tokens of every row, through the trainer's own renderer.

    A picture is stood in for by a blank one of its size, which takes the same tokens: so no
    picture is decoded twice.
    """

    def __init__(self, renderer: Any):
        import copy

        self.renderer = renderer
        self._unlimited = copy.copy(renderer)
        self._unlimited.longest = 2**62
        renderer.tokenizer.model_max_length = 2**62  # or it warns of rows that are too long
        self.lengths, self.images = array("I"), array("I")  # of every row, NONE where refused
        self._all = array("I")  # of every row that has a length, too long or not
        self._trained = self._image_tokens = self._too_long = 0

    def add(self, row: Conversation, sizes: list[tuple[int, int]]) -> None:
        """Measure a row with pictures of these sizes; RowError where the trainer refuses it."""
        from PIL import Image

        from vireo.data.conversation import ImageRef

        blank = tuple(ImageRef(Image.new("RGB", size)) for size in sizes)
        row = replace(row, images=blank)
        try:
            example = self.renderer.example(row)
        except RowError as error:
            if error.reason == "too_long":
                self._all.append(len(self._unlimited.example(row)))
                self._too_long += 1
            raise
        ids = example.fields["input_ids"].tolist()
        self._all.append(len(ids))
        self._trained += example.supervised
        self._image_tokens += sum(token in self.renderer.image_ids for token in ids)
        self.lengths.append(len(ids))
        self.images.append(len(sizes))

    def skip(self) -> None:
        """A row without a length keeps its place."""
        self.lengths.append(NONE)
        self.images.append(0)

    def report(self) -> dict[str, Any]:
        """The section `lengths` of the report; shares are of the tokens of usable rows."""
        usable = sum(length for length in self.lengths if length != NONE)
        return {
            "unit": "tokens",
            "total": usable,
            "per_row": spread(self._all),
            "histogram": histogram(self._all),
            "trained": self._trained,
            "trained_share": share(self._trained, usable),
            "image": self._image_tokens,
            "image_share": share(self._image_tokens, usable),
            "limit": self.renderer.longest,
            "over_limit": self._too_long,
        }
