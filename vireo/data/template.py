"""Chat templates as text: render turns, and find what the assistant wrote in the result.

Real chat templates carry no marks for the assistant's part, so its span is found from the template
itself: the rendering of the turns before an answer, with the generation prompt, is exactly what the
model sees when it starts to answer; the answer then runs to its end-of-turn token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jinja2

from vireo.data.conversation import Image, Text, Turn
from vireo.errors import InputError, RowError


class ChatTemplate:
    """A Jinja chat template with the tokenizer whose control tokens it writes.

    `parts`: whether the template takes content as a list of parts (vision) or as one string.
    """

    def __init__(self, template: str, tokenizer: Any, parts: bool):
        self.template, self.tokenizer, self.parts = template, tokenizer, parts
        self.end_of_turn = self._find_end_of_turn()

    def render(
        self, turns: Sequence[Turn], tools: Sequence[dict] = (), prompt: bool = False
    ) -> str:
        """The text of `turns`; with `prompt`, followed by what opens the assistant's answer."""
        messages = [self._message(turn) for turn in turns]
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=list(tools) or None,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise RowError("template", f"the chat template cannot render it: {error}") from error

    def answers(self, turns: Sequence[Turn], tools: Sequence[dict], text: str) -> list[slice]:
        """The span of each assistant turn in `text` (= `render(turns)`), end-of-turn included."""
        spans = []
        for i, start in self.openings(turns, tools, text).items():
            if start is None:
                raise RowError(
                    "template",
                    f"the chat template rewrites what stands before turn {i + 1}, so the answer's "
                    "place is not certain; give one answer a row, or another --chat_template",
                )
            stop = self._answer_end(turns[: i + 1], tools, text, start)
            self._check_kept(turns[i], text[start:stop], i)
            spans.append(slice(start, stop))
        return spans

    def openings(
        self, turns: Sequence[Turn], tools: Sequence[dict], text: str
    ) -> dict[int, int | None]:
        """Where in `text` each assistant turn begins, by its index; None where that is not certain.

        An answer begins where the prompt for it ends.
        """
        found: dict[int, int | None] = {}
        for i, turn in enumerate(turns):
            if turn.role == "assistant":
                if i == 0:
                    raise RowError("turn_order", "the row begins with an assistant turn")
                before = self.render(turns[:i], tools, prompt=True)
                found[i] = len(before) if text.startswith(before) else None
        return found

    def _answer_end(
        self, turns: Sequence[Turn], tools: Sequence[dict], text: str, start: int
    ) -> int:
        """Where the last of `turns` ends in `text`, with all that the template writes for it."""
        if self.end_of_turn is not None:
            at = text.find(self.end_of_turn, start)
            if at < 0:
                raise RowError("template", f"no {self.end_of_turn} after the assistant's answer")
            return at + len(self.end_of_turn)
        whole = self.render(turns, tools)
        if not text.startswith(whole):
            raise RowError("template", f"the chat template joins turn {len(turns)} and the next")
        return len(whole)

    @staticmethod
    def _check_kept(turn: Turn, rendered: str, index: int) -> None:
        """Every word of the answer must stand in its span: a template may trim, never rewrite."""
        at = 0
        for part in turn.parts:
            if isinstance(part, Text):
                for wanted in (part.text, part.text.strip()):
                    found = rendered.find(wanted, at)
                    if found >= 0:
                        at = found + len(wanted)
                        break
                else:
                    raise RowError(
                        "template", f"the chat template changes the answer in turn {index + 1}"
                    )

    def _message(self, turn: Turn) -> dict[str, Any]:
        content: Any = turn.text
        if self.parts:
            content = [
                {"type": "image"}
                if isinstance(part, Image)
                else {"type": "text", "text": part.text}
                for part in turn.parts
            ]
        message: dict[str, Any] = {"role": turn.role, "content": content}
        if turn.tool_calls:
            message["tool_calls"] = list(turn.tool_calls)
        return message

    def _find_end_of_turn(self) -> str | None:
        """The control token that the template writes after an answer (None: it writes none)."""
        probe = "ANSWER-PROBE"
        turns = [Turn("user", (Text("q"),)), Turn("assistant", (Text(probe),))]
        try:
            text = self.render(turns)
        except RowError as error:
            raise InputError(f"the model's chat template does not work: {error.message}") from error
        tail = text[text.rindex(probe) + len(probe) :]
        found = re.match(
            r"\s*(" + "|".join(map(re.escape, control_tokens(self.tokenizer))) + ")", tail
        )
        return found.group(1) or None if found else None


def control_tokens(tokenizer: Any) -> list[str]:
    """Every control token of a tokenizer (added, special), the longest first."""
    added = tokenizer.added_tokens_decoder.values()
    return sorted({t.content for t in added if t.special}, key=len, reverse=True)
