"""Send weights to a server that speaks SGLang's protocol: checked before, counted, confirmed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from vireo.models.load import weight_files
from vireo.rollout import protocol
from vireo.rollout.engine import EngineError
from vireo.threads import in_thread
from vireo.weights.gpu_payload import packed_on_gpu
from vireo.weights.group import join, known, listen
from vireo.weights.named import Shapes, compare, shapes
from vireo.weights.payload import packed
from vireo.weights.source import Broadcast, Folder, Shared, Sizes, Tensors, Weights, sizes_of

Post = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
Bucket = list[tuple[str, Tensor]]
Send = Callable[[Post, Bucket, dict[str, Any]], Awaitable[None]]
T = TypeVar("T")

BUCKET_BYTES = 512 << 20
PARTLY = "the engine may have a part of the new weights: send all again, or start it again"
UNSENT = (
    ". Nothing was sent: the server would answer success and leave it out, or die. What is sent "
    "must be what the checkpoint holds that it was started with"
)
GRACE_S = 10.0  # for the engine to say in its own words why a broadcast broke


@dataclass(frozen=True)
class Pushed:
    """What an engine confirmed. `bytes` of a folder are those of its weight files."""

    tensors: int
    bytes: int
    seconds: float


async def push(
    weights: Weights,
    version: str,
    *,
    sessions: bool,
    post: Post,
    expected: Shapes,
    bucket_bytes: int = BUCKET_BYTES,
) -> Pushed:
    """Give an engine new weights, known to it as `version`.

    sessions: updates stand between a begin and an end (see `protocol.Version`).
    post: a call of the engine, (path, body) -> its answer, of status 200 or 400; raises EngineError
        for any other, EngineGone where none comes.
    expected: names and shapes of the checkpoint that the engine was started with. The server would
        answer success to an unknown name, or die of it, so that is looked at here, before anything
        is sent: InputError.
    bucket_bytes: how much is on its way at once; a larger tensor goes alone.
    EngineError: the engine has a part of the weights, and is of use only after a whole update.
    """
    start = time.monotonic()
    if isinstance(weights, Shared):
        raise ValueError("weights that are shared are not sent")
    if isinstance(weights, Folder):
        found = shapes(weights.path)
        compare(found, expected, more=UNSENT)
        body = {"model_path": os.path.abspath(weights.path), "flush_cache": False}
        await _ask(post, protocol.UPDATE_DISK, body | {"weight_version": version})
        size = sum(file.stat().st_size for file in weight_files(weights.path))
        return Pushed(len(found), size, time.monotonic() - start)
    sizes = weights.sizes or sizes_of(weights.named)
    compare({n: shape for n, (shape, _) in sizes.items()}, expected, more=UNSENT)
    left = set(sizes)
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(weights, Broadcast):
            send = await stack.enter_async_context(_group(post, weights))
        else:
            send = partial(_send_shared, weights.on_gpu)
        if sessions:
            await stack.enter_async_context(_session(post))
        for bucket in _buckets(weights, sizes, bucket_bytes):
            left -= {name for name, _ in bucket}
            last = {} if left else {"weight_version": version}
            await send(post, bucket, {"flush_cache": False, **last})
            bucket.clear()
        if left:
            raise EngineError(f"{min(left)} and {len(left) - 1} more did not come again to be sent")
    return Pushed(len(sizes), sum(size for _, size in sizes.values()), time.monotonic() - start)


def _buckets(weights: Tensors | Broadcast, sizes: Sizes, limit: int) -> Iterator[Bucket]:
    """The tensors a second time, as many at once as `limit` bytes hold. EngineError: others."""
    bucket: Bucket = []
    total = 0
    for name, tensor in weights.named():
        if sizes.get(name) != (tuple(tensor.shape), tensor.nbytes):
            raise EngineError(f"{name} is {tuple(tensor.shape)}, and was {sizes.get(name)} before")
        if bucket and total + tensor.nbytes > limit:
            yield bucket
            bucket, total = [], 0
        bucket.append((name, tensor))
        total += tensor.nbytes
    if bucket:
        yield bucket


async def _ask(post: Post, path: str, body: dict[str, Any]) -> None:
    answer = await post(path, body)
    if answer.get("success") is not True:
        raise EngineError(f"{path}: {answer.get('message') or answer}; {PARTLY}")


@contextlib.asynccontextmanager
async def _session(post: Post) -> AsyncIterator[None]:
    """An update session; one that a client left open when it died is ended before."""
    with contextlib.suppress(EngineError):  # none was open
        await post(protocol.END_UPDATE, {})
    await _ask(post, protocol.BEGIN_UPDATE, {})
    async with _then(post, protocol.END_UPDATE, {}):
        yield


@contextlib.asynccontextmanager
async def _then(post: Post, path: str, body: dict[str, Any]) -> AsyncIterator[None]:
    """A last call, after a failure too, which then counts alone."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(EngineError):
            await post(path, body)
        raise
    await _ask(post, path, body)


async def _send_shared(on_gpu: bool, post: Post, bucket: Bucket, more: dict[str, Any]) -> None:
    on_gpu = on_gpu and all(tensor.is_cuda for _, tensor in bucket)
    with packed_on_gpu(bucket) if on_gpu else packed(bucket) as payloads:
        await _ask(post, protocol.UPDATE_TENSOR, {"serialized_named_tensors": payloads, **more})


@contextlib.asynccontextmanager
async def _group(post: Post, source: Broadcast) -> AsyncIterator[Send]:
    """A group of this process and the engine, which both leave at the end."""
    known(source.backend)
    listener, name = listen(source.address), f"vireo-{secrets.token_hex(8)}"
    port = listener.getsockname()[1]
    body = {"master_address": source.address, "master_port": port, "group_name": name}
    body |= {"rank_offset": 1, "world_size": 2, "backend": source.backend}
    group = await _both(
        _ask(post, protocol.INIT_GROUP, body),
        lambda: join(source.address, port, 0, 2, name, source.backend, listener=listener),
    )

    async def send(post: Post, bucket: Bucket, more: dict[str, Any]) -> None:
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": name,
        }
        await _both(
            _ask(post, protocol.UPDATE_GROUP, body | more),
            lambda: [group.broadcast(tensor) for _, tensor in bucket],
        )

    try:
        async with _then(post, protocol.DESTROY_GROUP, {"group_name": name}):
            yield send
    finally:
        group.close()


async def _both(asking: Coroutine[Any, Any, None], work: Callable[[], T]) -> T:
    """What `work`, which waits for the engine, returns in a thread, once the engine has answered.

    An error of the engine ends the wait for `work`, whose thread ends when the group breaks. An
    error of `work` is told in the engine's own words, if it has any.
    """
    answer, mine = asyncio.ensure_future(asking), in_thread(work)
    both: set[asyncio.Future[Any]] = {answer, mine}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        if not answer.done():
            await asyncio.wait({answer}, timeout=GRACE_S)
        if answer.done():
            answer.result()
        if error := mine.exception():
            raise EngineError(f"{error}; {PARTLY}") from error
        return mine.result()
    finally:
        for future in both:
            if not future.cancel() and not future.cancelled():
                future.exception()  # seen, though another was raised
