"""What every HTTP server here needs: a bound socket, and a signal to end by."""

from __future__ import annotations

import asyncio
import signal
import socket

from vireo.errors import InputError, first_line


def bound(host: str, port: int) -> socket.socket:
    """A socket at that address (port 0: a free one). InputError: it is taken, or not ours."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise InputError(
            f"{host}:{port} cannot be opened: {first_line(error)}; --port 0 finds a free port"
        ) from error
    return sock


def told_to_stop() -> asyncio.Event:
    """Set once SIGTERM or SIGINT comes; in the running event loop."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop
