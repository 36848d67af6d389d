"""What a model must notice: its own positions, the pixels, and which picture stands where."""

from __future__ import annotations

from torch import Tensor

from vireo.checks.joined import image_rows
from vireo.checks.report import Cannot, Finding
from vireo.checks.rows import picture, with_images
from vireo.checks.subject import Subject
from vireo.data.conversation import Conversation
from vireo.data.ragged import Example

VISIBLE = 1e-3  # what a fault must change a log-probability by, 100 times what rounding does


def positions_matter(subject: Subject) -> Finding:
    """1-D positions in the place of the family's own change log-probabilities of image rows."""
    if subject.family.positions == "1d":
        raise Cannot("the family's positions are 1-D")
    largest, flat = 0.0, True
    for row in image_rows(subject, subject.drawn):
        example = subject.example(row)
        positions = example.fields["positions"]
        one = positions[:1].expand_as(positions).contiguous()
        flat &= one.equal(positions)
        found = subject.logprobs(_with(example, positions=one))
        largest = max(largest, _change(found, subject.alone(row)))
    wrong = "the renderer's positions are 1-D" if flat else _UNSEEN
    return Finding(largest, _visible(subject), above=True, wrong=wrong)


def pixels_matter(subject: Subject) -> Finding:
    """Pixels that fade to nothing change the log-probabilities of every row with images.

    Not to zeros, which is padding to some towers.
    """
    smallest, where = float("inf"), ""
    for row in image_rows(subject, subject.rows):
        example = subject.example(row)
        pixels = {
            name: example.fields[name] * 1e-3
            for name, key in subject.family.keys.items()
            if key.kind != "token" and example.fields[name].is_floating_point()
        }
        change = _change(subject.logprobs(_with(example, **pixels)), subject.alone(row))
        if change < smallest:
            smallest, where = change, f"{row.where}: {_UNSEEN}"
    return Finding(smallest, _visible(subject), above=True, wrong=where)


def order_of_images_matters(subject: Subject) -> Finding:
    """Two pictures of one size in each other's place change the row's log-probabilities."""
    for row in image_rows(subject, subject.rows):
        shown = subject.renderer.pictures(row)
        sizes = [image.size for image in shown]
        for b in range(1, len(shown)):
            a = sizes.index(sizes[b])
            if a < b:
                shown[a], shown[b] = shown[b], shown[a]
                return _against(subject, row, with_images(row, shown))
    raise Cannot("no row has two images of one size")


def images_are_told_apart(subject: Subject) -> Finding:
    """Another picture of the same size in the place of a row's last one changes the row."""
    row = max(image_rows(subject, subject.rows), key=lambda row: len(row.images))
    shown = subject.renderer.pictures(row)
    shown[-1] = picture(shown[-1].size, seed=1000)
    return _against(subject, row, with_images(row, shown))


_UNSEEN = "a fault of this kind would not be noticed; on random weights, train them a little first"


def _visible(subject: Subject) -> float:
    return max(VISIBLE, subject.close)


def _against(subject: Subject, row: Conversation, changed: Conversation) -> Finding:
    change = _change(subject.logprobs(subject.renderer.example(changed)), subject.alone(row))
    return Finding(change, _visible(subject), above=True, wrong=f"{row.where}: {_UNSEEN}")


def _with(example: Example, **fields: Tensor) -> Example:
    return Example(example.fields | fields, example.keys, example.images, example.where)


def _change(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
