"""The one place where an error becomes an exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from vireo.errors import VireoError


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
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return code if isinstance(code, int) else 0
