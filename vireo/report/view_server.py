"""The page of `vireo view` over HTTP, for this machine alone."""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web
from aiohttp.typedefs import Handler

from vireo.report.view import Pictures, Run
from vireo.report.view_page import page
from vireo.serving import bound, told_to_stop

HOST = "127.0.0.1"


def serve(run: Run, port: int) -> None:
    """Until SIGTERM or SIGINT. InputError: the port cannot be had."""
    with bound(HOST, port) as sock:
        asyncio.run(_until_stopped(run, sock))


async def _until_stopped(run: Run, sock: socket.socket) -> None:
    stop = told_to_stop()
    runner = web.AppRunner(app(run), access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    try:
        await web.SockSite(runner, sock).start()
        url = f"http://{HOST}:{sock.getsockname()[1]}/"
        print(f"{run.name} at {url} (Ctrl-C ends it)", flush=True)
        await stop.wait()
    finally:
        await runner.cleanup()


def app(run: Run) -> web.Application:
    """GET /: the page. /news?at=: metrics since then, and the steps. /step/N: its groups."""

    async def root(_request: web.Request) -> web.Response:
        found = await asyncio.to_thread(run.news)
        steps = run.steps()
        data = found | {"name": run.name, "live": True, "steps": steps, "total": len(steps)}
        return web.Response(text=page(data), content_type="text/html")

    async def news(request: web.Request) -> web.Response:
        found = await asyncio.to_thread(run.news, request.query.get("at", ""))
        return web.json_response(found | {"steps": run.steps()})

    async def step(request: web.Request) -> web.Response:
        number, pictures = int(request.match_info["step"]), Pictures()
        if number not in run.steps():
            raise web.HTTPNotFound
        found = await asyncio.to_thread(run.step, number, pictures)
        return web.json_response(found | {"pictures": pictures.urls})

    made = web.Application(middlewares=[_local])
    made.add_routes([web.get("/", root), web.get("/news", news)])
    made.add_routes([web.get(r"/step/{step:[0-9]{1,9}}", step)])
    return made


@web.middleware
async def _local(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses a page elsewhere whose name was pointed at this machine."""
    if request.host.rpartition(":")[0] not in (HOST, "localhost"):
        raise web.HTTPForbidden(text="only as 127.0.0.1 or localhost")
    answer = await handler(request)
    answer.headers["Cache-Control"] = "no-store"
    return answer
