"""Memory of a process that makes one large tensor after another."""

from __future__ import annotations

import ctypes

# Numbers of glibc's mallopt (malloc.h).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3


def keep_heap() -> None:
    """Let glibc keep freed memory. It would give large blocks back to the system, and the next one
    would come page by page, each of them cleared: a third of a loader's time. Elsewhere: nothing.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return
    set_option(_MMAP_THRESHOLD, 32 << 20)  # glibc takes no more
    set_option(_TRIM_THRESHOLD, 1 << 30)
    set_option(_TOP_PAD, 64 << 20)
