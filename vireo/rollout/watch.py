"""Runs a server, and ends it and all that it started when told to, or when its parent is gone.

    python -I watch.py PARENT_PID SECONDS COMMAND...

A process of its own, because nothing inside the parent can act once the parent is killed. The
kernel's own signal for that (PR_SET_PDEATHSIG) will not do there: it comes when the thread that
made the child ends, reaches that child alone, and needs Python code between fork and exec. Nor will
a pipe: other children of the parent may hold its other end. So the parent's id is looked at
instead. But this process may be killed too (Ray kills the children of a worker that it ends): it
has one thread, so the kernel's signal does for that.

SIGTERM ends the server; SECONDS later, at a second SIGTERM, or as soon as the server is gone,
SIGKILL ends what is left of its process group. The exit code is the server's, 128 + N if a signal
N ended it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

STEP_S = 0.1
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def main(parent: int, grace: float, command: list[str]) -> int:
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None)
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    while os.getppid() == parent and not told and not _ended(server.pid):
        time.sleep(STEP_S)
    os.killpg(server.pid, signal.SIGTERM)
    until = time.monotonic() + grace
    while time.monotonic() < until and len(told) < 2 and not _ended(server.pid):
        time.sleep(STEP_S)
    os.killpg(server.pid, signal.SIGKILL)
    code = server.wait()
    return code if code >= 0 else 128 - code


def _ended(pid: int) -> bool:
    """Without taking its exit code: until that is done, its id cannot be another's."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
