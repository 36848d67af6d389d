"""Chat templates as text: render turns, and find what the assistant wrote in the result.

Real chat templates carry no marks for the assistant's part, so its span is found from the template
itself: the rendering of the turns before an answer, with the generation prompt, is exactly what the
model sees when it starts to answer; the answer then runs to its end-of-turn token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import jinja2

from vireo.data.conversation import Image, Text, Turn
from vireo.errors import InputError, RowError


class ChatTemplate:
    """A Jinja chat template with the tokenizer whose control tokens it writes.

    `parts`: whether the template takes content as a list of parts (vision) or as one string, in
        which `image` stands for an image.
    `end_of_turn`: the control token behind an answer (None: the template writes none).
    `last_end`: what training adds behind a row's last answer if the template does not write it.
    """

    def __init__(self, template: str, tokenizer: Any, parts: bool, image: str = ""):
        self.template, self.tokenizer, self.parts = template, tokenizer, parts
        self.image = image
        self.end_of_turn: str | None = None
        self.last_end: str | None = None
        self._opener = ""  # what a prompt goes on with where a turn's answer may already begin
        self._respelt = ("", "")  # how rows open an answer, and how prompts do
        self._probe()

    def render(
        self, turns: Sequence[Turn], tools: Sequence[dict] = (), prompt: bool = False
    ) -> str:
        """The text of `turns`; with `prompt`, followed by what opens the assistant's answer."""
        messages = [self._message(turn) for turn in turns]
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=list(tools) or None,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=prompt,
            )
            return self._respell(text)
        except Exception as error:  # a template is a program of its own
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            what = " ".join(str(error).split())[:300]
            raise RowError(
                "template", f"the chat template cannot render it: {kind}{what}"
            ) from error

    def answers(self, turns: Sequence[Turn], tools: Sequence[dict], text: str) -> list[slice]:
        """The span of each assistant turn in `text` (= `render(turns)`), end-of-turn included.

        Raises RowError where a place is not certain, or where a turn is not what the row has.
        """
        spans = []
        for i, start in self.openings(turns, tools, text).items():
            if start is None:
                prompt = self.render(turns[:i], tools, prompt=True)
                pairs = enumerate(zip(prompt, text))
                same = next((k for k, (one, other) in pairs if one != other), len(text))
                raise RowError(
                    "template",
                    f"the chat template rewrites what stands before turn {i + 1} (its prompt goes "
                    f"on with {prompt[same : same + 40]!r}, the row with "
                    f"{text[same : same + 40]!r}), so the answer's place is not certain; give one "
                    "answer a row, with the thoughts that a prompt opens, or another "
                    "--chat_template",
                )
            stop = self._answer_end(turns, i, tools, text, start)
            check_answer(turns, i, text[start:stop])
            spans.append(slice(start, stop))
        check_others(turns, tools, text)
        return spans

    def openings(
        self, turns: Sequence[Turn], tools: Sequence[dict], text: str
    ) -> dict[int, int | None]:
        """Where in `text` each assistant turn begins, by its index; None where that is not certain.

        An answer begins where the prompt for it ends. Some templates open a thought in the prompt,
        and leave it out of answers that a question follows: those begin before it.
        """
        found: dict[int, int | None] = {}
        for i, turn in enumerate(turns):
            if turn.role == "assistant":
                if i == 0:
                    raise RowError("turn_order", "the row begins with an assistant turn")
                before = self.render(turns[:i], tools, prompt=True)
                if not text.startswith(before) and _is_asked_after(turns, i):
                    before = before.removesuffix(self._opener)
                found[i] = len(before) if text.startswith(before) else None
        return found

    def _answer_end(
        self, turns: Sequence[Turn], i: int, tools: Sequence[dict], text: str, start: int
    ) -> int:
        """Where turn `i` ends in `text`: behind its end-of-turn token, or all written for it."""
        whole = text if i == len(turns) - 1 else self.render(turns[: i + 1], tools)
        own = whole[start:] if whole.startswith(text[:start]) else ""
        if self.end_of_turn is not None and self.end_of_turn in own:
            stop = text.find(self.end_of_turn, start) + len(self.end_of_turn)
            # A span that reached into the next turn would not be a part of this turn's own text.
            if stop > start and text[start:stop] in own:
                return stop
        elif text.startswith(whole):
            stop = len(whole)
            if self.end_of_turn is not None:  # written between turns only
                after = re.compile(rf"\s*{re.escape(self.end_of_turn)}").match(text, stop)
                stop = after.end() if after else stop
            return stop
        raise RowError(
            "template",
            f"the chat template ends turn {i + 1} in another way where turns follow, so where the "
            "answer ends is not certain; give one answer a row, or another --chat_template",
        )

    def _message(self, turn: Turn) -> dict[str, Any]:
        said = (part.text if isinstance(part, Text) else self.image for part in turn.parts)
        content: Any = "".join(said)
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
        for key in ("reasoning_content", "name", "tool_call_id"):
            if (value := getattr(turn, key)) is not None:
                message[key] = value
        return message

    def _probe(self) -> None:
        """Learn from two short conversations what the template writes round an answer."""
        probe = "ANSWER-PROBE"
        ask, answer = Turn("user", (Text("q"),)), Turn("assistant", (Text(probe),))
        try:
            last = self.render([ask, answer])
            prompt = self.render([ask], prompt=True)
        except RowError as error:
            raise InputError(f"the model's chat template does not work: {error.message}") from error
        try:
            first, middle = self.render([ask]), self.render([ask, answer, ask])
        except RowError:  # not in every template may a row end with a question
            first, middle = prompt, last
        content = self._message(answer)["content"]
        if probe not in last or probe not in middle:
            raise InputError("the model's chat template leaves out what the assistant says")
        self._respelt = self._respelling(first, prompt, last, probe)
        last, middle = self._respell(last), self._respell(middle)
        if self.parts and (str(content) in last or json.dumps(content) in last):
            raise InputError(
                "the model's chat template takes no images: it writes a list of parts as it is; "
                "name another one with --chat_template"
            )
        self.end_of_turn = self._token_after(last, probe)
        if self.end_of_turn is None:
            # A token between turns ends an answer, too, unless it opens every turn.
            between = self._token_after(middle, probe)
            self.end_of_turn = between if between and between not in first else None
            self.last_end = self.end_of_turn or self.tokenizer.eos_token
            if self.last_end is None:
                raise InputError(
                    "neither the model's chat template nor its tokenizer has a token that ends an "
                    "answer: a model trained so would never stop"
                )
        at = middle.index(probe)
        if prompt[:at] == middle[:at]:
            self._opener = prompt[at:]

    def _respelling(self, first: str, prompt: str, last: str, probe: str) -> tuple[str, str]:
        """How rows open an answer, and how prompts do, if white space is all that differs.

        Rows get the opening of prompts then: it is what an answer is generated behind. Only where
        a control token stands in it, so that no person can have typed it.
        """
        if prompt.startswith(first) and last.startswith(first):
            row, opening = last[len(first) : last.index(probe)], prompt[len(first) :]
            known = any(token in row for token in control_tokens(self.tokenizer))
            if known and row.split() == opening.split() and not row.startswith(opening):
                return row, opening
        return "", ""

    def _respell(self, text: str) -> str:
        """Every opening of an answer as prompts have it; one may be a part of the other."""
        if not all(self._respelt):
            return text
        either = "|".join(re.escape(s) for s in sorted(self._respelt, key=len, reverse=True))
        return re.sub(either, lambda _: self._respelt[1], text)

    def _token_after(self, text: str, probe: str) -> str | None:
        """The control token that follows the probe, if nothing but white space is between."""
        tokens = "|".join(map(re.escape, control_tokens(self.tokenizer)))
        found = re.compile(rf"\s*({tokens})").match(text, text.rindex(probe) + len(probe))
        return found[1] or None if found else None


def check_answer(turns: Sequence[Turn], i: int, rendered: str) -> None:
    """All that turn `i` says must stand in its span, in order: a template may trim, never rewrite.

    Round `<think>` and `</think>` in a text it may trim, too.
    """
    turn, at = turns[i], 0
    thoughts = turn.reasoning_content or ""
    said = [part.text for part in turn.parts if isinstance(part, Text)]
    for text in (thoughts, *said):
        pieces = [text] if text in rendered[at:] else re.split("</?think>", text)
        for piece in pieces:
            for wanted in (piece, piece.strip()):
                found = rendered.find(wanted, at)
                if found >= 0:
                    at = found + len(wanted)
                    break
            else:
                raise _changed(turns, i, text is thoughts or len(pieces) > 1)
    for name in map(_name, turn.tool_calls):
        if not _is_kept(name, rendered):
            what = f"the chat template leaves out the tool call {name!r} of turn {i + 1}: "
            raise RowError("tool_calls", what + "leave the row out, or use a template with tools")


def _is_asked_after(turns: Sequence[Turn], i: int) -> bool:
    return any(turn.role == "user" for turn in turns[i + 1 :])


def _changed(turns: Sequence[Turn], i: int, thoughts: bool) -> RowError:
    what = f"the chat template changes the answer in turn {i + 1}"
    if thoughts and _is_asked_after(turns, i):
        what = (
            f"the chat template leaves out thoughts of turn {i + 1}, as a question follows: let "
            "the row end with that turn, or take the thoughts out of it"
        )
    elif thoughts:
        what += ": it does not write its thoughts; take them out, or use a template that does"
    else:
        what += "; write the answer as it does, or use another --chat_template"
    return RowError("template", what)


def check_others(turns: Sequence[Turn], tools: Sequence[dict], text: str) -> None:
    """What all others say, and the tools, must stand somewhere in the rendered `text`."""
    for i, turn in enumerate(turns):
        for part in turn.parts if turn.role != "assistant" else ():
            if isinstance(part, Text) and not _is_kept(part.text, text):
                what = f"the chat template leaves out or changes what turn {i + 1} ({turn.role}) "
                raise RowError("template", what + "says; use another --chat_template")
    for name in map(_name, tools):
        if not _is_kept(name, text):
            what = f"the chat template leaves out the tool {name!r}: take the tools out, or use "
            raise RowError("tool_calls", what + "a template with tools")


def _name(tool: dict) -> str:
    """The name of a function that is called or offered; empty where it has none."""
    inner = tool.get("function")
    name = (inner if isinstance(inner, dict) else tool).get("name")
    return name if isinstance(name, str) else ""


def _is_kept(said: str, text: str) -> bool:
    """Whether a text stands in another, as it is, trimmed or as JSON."""
    if said in text or (said := said.strip()) in text:
        return True
    return any(json.dumps(said, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True))


def control_tokens(tokenizer: Any) -> list[str]:
    """Every control token of a tokenizer (added, special), the longest first."""
    added = tokenizer.added_tokens_decoder.values()
    return sorted({t.content for t in added if t.special}, key=len, reverse=True)
