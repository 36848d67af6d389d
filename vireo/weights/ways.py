"""By which way new weights reach the engines of a run."""

from __future__ import annotations

import ipaddress
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from vireo.weights.folder import write_weights
from vireo.weights.source import Broadcast, Folder, Named, Sizes, Tensors, Weights


def way(chosen: str | None, engine: str, urls: Sequence[str], gpus: int = 1) -> str:
    """`shared`, `group` or `disk`: what was `chosen`, or fits `engine` at its `urls` (none: started
    by this process) with `gpus` each."""
    if chosen is not None:
        return chosen
    if engine == "vllm" or gpus > 1:
        return "disk"
    return "shared" if all(map(is_here, urls)) else "group"


def is_here(url: str) -> bool:
    """Whether a URL's host is this machine."""
    host = urlsplit(url).hostname or ""
    return host == address_towards(url) or _is_loopback(host)


def address_towards(url: str) -> str:
    """This machine's address as the host of `url` sees it; no packet is sent. OSError: no way."""
    parts = urlsplit(url)
    kind, _, _, _, place = socket.getaddrinfo(
        parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return probe.getsockname()[0]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def packed(
    how: str,
    named: Named,
    version: str,
    *,
    urls: Sequence[str],
    model: str,
    folder: Path,
    sizes: Sizes | None = None,
    on_gpu: bool = False,
) -> Weights:
    """The tensors of `named` ready to be sent `how`. `disk`: they are written into a folder under
    `folder`, which must be seen by the engines too, and the one of the version before is removed.
    `model`: the folder that engines were started from. `on_gpu`: engines see this process's GPU."""
    if how == "disk":
        out = folder / f"weights-{version}"
        old = [path for path in folder.glob("weights-*") if path != out]
        shutil.rmtree(out, ignore_errors=True)
        write_weights(out, model, named())
        for path in old:
            shutil.rmtree(path)
        return Folder(str(out.resolve()))
    if how == "group":
        return Broadcast(named, sizes, address_towards(urls[0]) if urls else "127.0.0.1")
    return Tensors(named, sizes, on_gpu)
