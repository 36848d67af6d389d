"""The engine that the settings ask for."""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib.util import find_spec
from typing import Any

from vireo.data.render import Renderer
from vireo.rollout import launch
from vireo.rollout.engine import EngineRefused, RolloutEngine
from vireo.rollout.http import Http
from vireo.settings.rollout import EngineSettings

_ALIVE = {"sglang": "/model_info", "vllm": "/health"}


def open_engine(
    settings: EngineSettings,
    model_folder: str,
    renderer: Renderer,
    *,
    device: Any = None,
    dtype: Any = None,
) -> RolloutEngine:
    """The engine, not started yet: in this process, at the URLs given, or one that `start` starts.

    EngineRefused: it does not run the model's family, or is not installed.
    """
    name, family = settings.engine, renderer.family
    server_args = {k.removeprefix(f"{name}-"): v for k, v in settings.server_args.items()}
    urls = {"sglang": settings.sglang_url, "vllm": settings.vllm_url}.get(name) or []
    if server_args and (name == "embedded" or urls):
        raise EngineRefused(
            f"--{name}-{next(iter(server_args))}: only for a server that Vireo starts"
        )
    if name != "embedded" and name not in family.forms:
        reason = family.refused.get(name, "no way is known to send it prompts with images")
        if settings.engine_fallback:
            print(f"note: {family.name} with {name}: {reason}; using embedded", file=sys.stderr)
            name = "embedded"
        elif not urls:  # which may be those of `vireo serve`: the client finds out
            raise EngineRefused(
                f"{family.name} with {name}: {reason}; use --engine embedded or --engine_fallback"
            )
    if name == "embedded":
        from vireo.rollout.embedded import EmbeddedEngine

        return EmbeddedEngine.of_folder(model_folder, renderer, dtype, device)
    if name == "sglang":
        from vireo.rollout.sglang import SglangEngine

        client: Any = SglangEngine
    else:
        from vireo.rollout.vllm import VllmEngine

        client = VllmEngine
    connect = partial(
        Http,
        concurrency=settings.engine_concurrency,
        timeout=settings.engine_timeout,
        retries=settings.engine_retries,
        alive=_ALIVE[name],
    )
    if urls:
        api = settings.engine_api_key or os.environ.get("VIREO_API_KEY")
        admin = settings.engine_admin_key or os.environ.get("VIREO_ADMIN_KEY")
        made = [client(connect(u, api_key=api, admin_key=admin), renderer) for u in urls]
        if len(made) == 1:
            return made[0]
        from vireo.rollout.several import SeveralEngines

        return SeveralEngines(made)
    if find_spec(name) is None:
        raise EngineRefused(
            f"{name} is not installed here: pip install 'vireo-vl[{name}]', give the URL of a "
            f"running server by --{name}_url, or use --engine embedded"
        )
    ours = {} if dtype is None else {"dtype": str(dtype).removeprefix("torch.")}
    if family.remote:  # the renderer runs the same code already
        ours["trust-remote-code"] = ""
    if renderer.processor_path != renderer.model_path:
        ours["tokenizer-path" if name == "sglang" else "tokenizer"] = renderer.processor_path
    port, keys = launch.free_port(), launch.Keys.new()
    if name == "sglang":
        command = launch.sglang_command(model_folder, port, keys, server_args, **ours)
    else:
        command = launch.vllm_command(model_folder, port, keys, server_args, **ours)
    env = launch.SGLANG_ENV if name == "sglang" else launch.VLLM_ENV
    http = connect(f"http://127.0.0.1:{port}", api_key=keys.api, admin_key=keys.admin)
    return client(http, renderer, launch.Server(name, command, env=env, keys=keys))
