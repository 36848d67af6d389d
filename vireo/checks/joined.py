"""A row's log-probabilities alone, beside others in a micro-batch, and by the family's own loss."""

from __future__ import annotations

from vireo.checks.report import Cannot, Finding
from vireo.checks.subject import Subject
from vireo.data.conversation import Conversation
from vireo.errors import RowError, first_line


def rows_render(subject: Subject) -> Finding:
    """The renderer makes an example of every row: slots, lengths, ids and labels align."""
    for row in subject.every_row:
        try:
            subject.example(row)
        except RowError as error:
            return Finding(wrong=str(error))
        except Exception as error:  # a wrong entry can make the renderer raise anything
            return Finding(wrong=f"{row.where}: {type(error).__name__}: {first_line(error)}")
    return Finding()


def rows_run(subject: Subject) -> Finding:
    """Each row alone has finite log-probabilities; its image tokens are as many as its features."""
    for row in subject.every_row:
        try:
            finite = subject.alone(row).isfinite()
        except Exception as error:  # a model's forward, which may raise anything
            return Finding(wrong=f"{row.where}: {type(error).__name__}: {first_line(error)}")
        if not finite.all():
            place = subject.place(subject.example(row), int((~finite).nonzero()[0]))
            return Finding(wrong=f"{place}: no finite log-probability")
    return Finding()


def padded_is_alone(subject: Subject) -> Finding:
    """Rows of one padded micro-batch (of each kind, where kinds cannot mix) do not change."""
    return _compare(subject, packing=False)


def packed_is_alone(subject: Subject) -> Finding:
    """Rows end to end in one sequence have what each has alone, by padding's own attention."""
    if not subject.family.can_pack:
        raise Cannot("the entry says that this family's rows are padded, never packed")
    return _compare(subject, packing=True)


def _compare(subject: Subject, packing: bool) -> Finding:
    rows = subject.rows
    together = subject.joined(rows, packing)
    pairs = [
        (subject.example(row), subject.alone(row), other) for row, other in zip(rows, together)
    ]
    worst, first = subject.furthest(pairs, subject.close)
    return Finding(worst, subject.close, wrong=first)


def own_loss(subject: Subject) -> Finding:
    """A row's loss is that of the family's own `forward(labels=...)`, run on what the plain
    processor returns, with transformers' own positions and attention."""
    if subject.family.remote:
        raise Cannot("the checkpoint's own code takes no labels")
    pairs, apart = [], 0.0
    for row in subject.rows:
        example, ours = subject.example(row), subject.alone(row)
        loss, plain = subject.plain_forward(subject.plain_inputs(row), example)
        apart = max(apart, abs(loss + float(ours.mean())))
        pairs.append((example, ours, plain))
    worst, first = subject.furthest(pairs, subject.close)
    return Finding(max(worst, apart), subject.close, wrong=first)


def image_rows(subject: Subject, rows: list[Conversation]) -> list[Conversation]:
    """The rows that have images. Cannot: the family has no vision, or no row has any."""
    if not subject.family.has_vision:
        raise Cannot("a text family has no images")
    found = [row for row in rows if row.images]
    if not found:
        raise Cannot("no row has an image")
    return found
