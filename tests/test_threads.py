"""Work in a thread, and what it raises."""

from __future__ import annotations

import asyncio

import pytest

from vireo.threads import in_thread


def test_what_is_raised_reaches_who_waits_even_a_stop_iteration() -> None:
    async def wait(error: BaseException) -> None:
        def work() -> None:
            raise error

        await asyncio.wait_for(in_thread(work), 5)

    with pytest.raises(KeyError):
        asyncio.run(wait(KeyError("k")))
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        asyncio.run(wait(StopIteration()))
    assert isinstance(caught.value.__cause__, StopIteration)
