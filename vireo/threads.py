"""Work in a thread that nobody has to wait for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """`work` in a thread that the end of the program does not wait for."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except (
            StopIteration
        ) as error:  # which a future cannot carry: its reader would wait for ever
            told = RuntimeError("StopIteration")
            told.__cause__ = error
            done.set_exception(told)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="work", daemon=True).start()
    return asyncio.wrap_future(done)
