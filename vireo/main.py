"""The one place where an error becomes an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from vireo.errors import InputError, VireoError

# A path that a person gave and that cannot be what it is to be, whichever command meets it.
_BAD_PATHS = (FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


def run_main(fn: Callable[[], object], *, debug: bool = False) -> int:
    """Calls `fn` and returns the exit code: its own if it returns an int, otherwise 0.

    An error that a person is meant to read becomes one line (with `debug`, its traceback first) and
    its own exit code. Any other error is a defect and keeps its traceback.
    """
    try:
        code = fn()
    except VireoError as error:
        if debug:
            traceback.print_exc()
        # Ranks that fail together say so one after the other; the first line is rank 0's own.
        rank = os.environ.get("RANK", "0")
        who = "" if rank == "0" else f"rank {rank}: "
        sys.stderr.write(f"{who}error: {' '.join(str(error).split())}\n")  # in one piece
        return error.exit_code
    except _BAD_PATHS as error:
        if debug or error.filename is None:
            raise
        sys.stderr.write(f"error: {error.filename}: {error.strerror}\n")
        return InputError.exit_code
    except BrokenPipeError:  # `vireo settings | head`: nobody reads the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return code if isinstance(code, int) else 0
