"""The errors a person is meant to read: one line that names what was found and how to mend it."""

from __future__ import annotations


class VireoError(Exception):
    """A failed run (exit code 1)."""

    exit_code = 1


class InputError(VireoError):
    """A bad setting, file or model: the person can mend it (exit code 2)."""

    exit_code = 2


class RowError(InputError):
    """One row of a data file is refused.

    `reason` is a short stable word (`placeholder_count`, `missing_image`, ...: docs/data.md lists
    them). `message` says what was found, what was expected and the fix. `where` (file, line, row
    index, id) is filled in by the reader, so that code which sees only a part of a row can raise.
    """

    def __init__(self, reason: str, message: str, where: str = ""):
        self.reason, self.message, self.where = reason, message, where
        super().__init__(reason, message, where)  # picklable: crosses loader workers

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.message} [{self.reason}]"

    def at(self, where: str) -> RowError:
        """The same error with its place in the data, unless it has one already."""
        return self if self.where else RowError(self.reason, self.message, where)


def first_line(error: BaseException) -> str:
    """The first line of an error's own words, for a message of one line."""
    return (str(error).strip() or repr(error)).splitlines()[0]
