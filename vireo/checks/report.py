"""What a grid found: one `Result` a property, and the `Report` of a model."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["pass", "fail", "cannot"]


class Cannot(Exception):
    """A property has no meaning for this family or these rows; the words say why."""


@dataclass(frozen=True)
class Finding:
    """What a property measured. It holds if nothing is `wrong` and `figure` keeps to `limit`.

    figure: usually a largest difference of log-probabilities. `above`: it must lie above the limit
        (something matters), else it may not. `wrong`: what differs first, and where.
    """

    figure: float | None = None
    limit: float | None = None
    above: bool = False
    wrong: str = ""

    @property
    def holds(self) -> bool:
        if self.figure is None or self.limit is None:
            return not self.wrong
        # A figure that is no number holds in neither direction.
        return self.figure > self.limit if self.above else self.figure <= self.limit


def listed(wrong: list[str]) -> Finding:
    """The finding of a property without a figure: each of its faults in words, none if it holds."""
    shown = wrong[:3] + ([f"and {len(wrong) - 3} more"] if wrong[3:] else [])
    return Finding(wrong="; ".join(shown))


@dataclass(frozen=True)
class Result:
    """One property of one model. `why`: on `fail` what differs and where, on `cannot` the reason"""

    group: str
    name: str
    status: Status
    figure: float | None = None
    limit: float | None = None
    above: bool = False
    why: str = ""

    @property
    def line(self) -> str:
        """`pass    alone = packed   3.1e-07 <= 1e-05`"""
        text = f"{self.status:<8}{self.name:<32}"
        if self.figure is not None:
            sign = ">" if self.above == (self.status == "pass") else "<="
            text += f"{self.figure:.1e} {sign} {self.limit:.2g}  "
        return (text + self.why).rstrip()


@dataclass
class Report:
    """The grid of one model: what was tested, with which versions, and every result."""

    model: str
    family: str
    parameters: int
    device: str
    date: str  # YYYY-MM-DD
    versions: dict[str, str]
    results: list[Result] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        """The names of the properties that do not hold."""
        return [result.name for result in self.results if result.status == "fail"]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
