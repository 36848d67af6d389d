"""Control tokens that a person typed: they stay text, through template, processor and tokenizer.

Before the chat template runs, each is replaced by a stand-in, one private-use character for each
different text; templates move and join them like any letter. In the rendered text every stand-in
becomes the mark (see `vireo.data.render`), whose ids as plain text are put back at the end.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vireo.data.conversation import Text, Turn
from vireo.errors import RowError

MARK = "\U0010fffd"  # the last private-use character; typed by a person, it is text like any other
_FIRST = 0x100000  # its plane, which no script uses, holds the stand-ins
_STAND_IN = re.compile(f"[{chr(_FIRST)}-{MARK}]")


class Typed:
    """The control tokens typed in one row's turns and tools: `turns` and `tools` without them."""

    def __init__(self, controls: re.Pattern[str], turns: Sequence[Turn], tools: Sequence[dict]):
        self._controls = controls
        self._stand_ins: dict[str, str] = {}  # by the text that they stand for
        self._placed: Counter[str] = Counter()
        try:
            self.tools = tuple(self._structure(tool) for tool in tools)
            self.turns = tuple(self._turn(turn) for turn in turns)
        except RecursionError as error:
            raise RowError("tool_calls", "tools or tool calls have too many brackets") from error

    @staticmethod
    def pattern(controls: Sequence[str]) -> re.Pattern[str]:
        """What is replaced: the tokenizer's control tokens, and the characters that stand in."""
        return re.compile("|".join([*map(re.escape, controls), _STAND_IN.pattern]))

    def marked(self, text: str) -> tuple[str, list[str]]:
        """The rendered text with the mark for each stand-in, and what each one stands for.

        Raises RowError where the template did not keep them all.
        """
        meanings = {stand_in: typed for typed, stand_in in self._stand_ins.items()}
        found = _STAND_IN.findall(text)
        for stand_in in (self._placed - Counter(found)) + (Counter(found) - self._placed):
            raise RowError(
                "reserved_token",
                "the chat template drops, repeats or rewrites a text with the control token "
                f"{meanings[stand_in]}, which so cannot be kept as text: take it out",
            )
        return _STAND_IN.sub(MARK, text), [meanings[stand_in] for stand_in in found]

    def _turn(self, turn: Turn) -> Turn:
        # Found in the turn's whole text: templates may join what stands in several parts.
        spans = [match.span() for match in self._controls.finditer(turn.text)]
        parts: list[Any] = []
        start = 0
        for part in turn.parts:
            if isinstance(part, Text):
                end = start + len(part.text)
                inside = [(max(a, start), min(b, end)) for a, b in spans if a < end and b > start]
                part = Text(self._hide(part.text, [(a - start, b - start) for a, b in inside]))
                start = end
            parts.append(part)
        return replace(
            turn,
            parts=tuple(parts),
            tool_calls=tuple(self._structure(call) for call in turn.tool_calls),
            reasoning_content=self._structure(turn.reasoning_content),
            name=self._structure(turn.name),
            tool_call_id=self._structure(turn.tool_call_id),
        )

    def _structure(self, value: Any) -> Any:
        """Any JSON value, its texts and keys without control tokens."""
        if isinstance(value, str):
            return self._hide(value, [found.span() for found in self._controls.finditer(value)])
        if isinstance(value, dict):
            return {self._structure(k): self._structure(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self._structure(item) for item in value]
        return value

    def _hide(self, text: str, spans: list[tuple[int, int]]) -> str:
        pieces, last = [], 0
        for start, end in spans:
            typed = text[start:end]
            stand_in = self._stand_ins.setdefault(typed, chr(_FIRST + len(self._stand_ins)))
            if stand_in >= MARK:
                raise RowError("reserved_token", "too many different private-use characters")
            self._placed[stand_in] += 1
            pieces += [text[last:start], stand_in]
            last = end
        return "".join([*pieces, text[last:]])
