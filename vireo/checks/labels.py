"""What of a row carries loss: exactly what the assistant says and its end of turn."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from vireo.checks.report import Cannot, Finding, listed
from vireo.checks.rows import natural_side, picture
from vireo.checks.subject import Subject
from vireo.data.conversation import Conversation, Image, ImageRef, Text, Turn
from vireo.data.ragged import IGNORE, Example
from vireo.errors import RowError

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>")  # which some templates put before an answer


def labels_over_turns(subject: Subject) -> Finding:
    """Several questions and answers, one of a single token."""
    return _check(subject, (_user("Is it red?"), _says("Yes."), _user("Sure?"), _says("7")))


def labels_with_system(subject: Subject) -> Finding:
    """A system turn before the first question."""
    return _check(subject, (_turn("system", "Be brief."), _user("Is it red?"), _says("Yes.")))


def labels_with_images(subject: Subject) -> Finding:
    """Images in the first and in a later question; no image token carries loss."""
    if not subject.family.has_vision:
        raise Cannot("a text family has no images")
    turns = (_user(0, "Red?"), _says("Yes."), _user("And", 1, 2, "?"), _says("No."))
    return _check(subject, turns, images=3)


def labels_with_tools(subject: Subject) -> Finding:
    """A tool call carries loss, what the tool answers does not."""
    call = Turn("assistant", (), tool_calls=(CALL,))
    turns = (_user("Is it cold?"), call, _turn("tool", "It has 3 degrees."), _says("Yes."))
    return _check(subject, turns, tools=(TOOL,))


def _turn(role, *parts: str | int) -> Turn:
    return Turn(role, tuple(Text(p) if isinstance(p, str) else Image(p) for p in parts))


def _user(*parts: str | int) -> Turn:
    return _turn("user", *parts)


def _says(text: str) -> Turn:
    return _turn("assistant", text)


def _check(
    subject: Subject, turns: tuple[Turn, ...], images: int = 0, tools: tuple[dict, ...] = ()
) -> Finding:
    side = natural_side(subject.processor)
    shown = tuple(ImageRef(picture((side, side), seed)) for seed in range(images))
    row = Conversation(turns, shown, tools=tools)
    try:
        example = subject.example(row)
    except RowError as error:
        raise Cannot(error.message) from error
    return listed([*_wrong_texts(subject, example, turns), *_wrong_ids(subject, example)])


def _wrong_texts(subject: Subject, example: Example, turns: tuple[Turn, ...]) -> Iterator[str]:
    answers = [turn for turn in turns if turn.role == "assistant"]
    found = [subject.renderer.tokenizer.decode(ids) for ids in supervised_runs(example)]
    if len(found) != len(answers):
        yield f"{len(found)} runs of tokens carry loss for {len(answers)} answers: {found}"
        return
    template = subject.renderer.template
    for i, (text, turn) in enumerate(zip(found, answers)):
        last = i == len(answers) - 1
        end = template.end_of_turn or (template.last_end if last else None) or ""
        if not text.rstrip().endswith(end):
            yield f"answer {i + 1} ends with {text[-20:]!r}, not with {end!r}"
        said = _EMPTY_THOUGHT.sub("", text.rstrip().removesuffix(end)).strip()
        if turn.tool_calls:
            if not all(word in said for word in ("weather", "city", "Oslo")):
                yield f"answer {i + 1} is {text!r}, expected the call of the tool"
            if "degrees" in said:
                yield f"answer {i + 1} has what the tool said in it: {text!r}"
        elif said != turn.text:
            yield f"answer {i + 1} carries loss on {text!r}, expected {turn.text + end!r}"


def _wrong_ids(subject: Subject, example: Example) -> Iterator[str]:
    ids, labels = example.fields["input_ids"], example.fields["labels"]
    kept = labels != IGNORE
    if not labels[kept].equal(ids[kept]):
        yield "a label is another token than the one at its place"
    config = subject.renderer.config
    image_ids = {getattr(config, "image_token_id", None), *subject.renderer.image_ids}
    for token in sorted(image_ids & set(labels.tolist())):
        yield f"the image token {subject.renderer.tokenizer.decode([token])!r} carries loss"


def supervised_runs(example: Example) -> list[list[int]]:
    """The ids of each run of tokens that carry loss."""
    labels = example.fields["labels"].tolist()
    edges = [
        i for i, _ in enumerate(labels) if i and (labels[i] == IGNORE) != (labels[i - 1] == IGNORE)
    ]
    spans = pairwise([0, *edges, len(labels)])
    return [labels[a:b] for a, b in spans if labels[a] != IGNORE]
