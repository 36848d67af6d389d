"""The engine that the settings ask for."""

from __future__ import annotations

import json
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
_ENV = {"sglang": launch.SGLANG_ENV, "vllm": launch.VLLM_ENV}
# Where whoever started this process has started the engines too: {"urls": [...], "patience": s}.
PLACED = "VIREO_ENGINES"


def engine_urls(settings: EngineSettings) -> list[str]:
    """Of servers that are there: given, or started for this run by its driver."""
    given = {"sglang": settings.sglang_url, "vllm": settings.vllm_url}.get(settings.engine)
    return given or _placed().get("urls", [])


def _placed() -> dict[str, Any]:
    return json.loads(os.environ.get(PLACED, "{}"))


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
    urls = [] if name == "embedded" else engine_urls(settings)
    ours = name == "serve"
    if ours:  # it speaks SGLang's protocol, and is the embedded engine
        name = "sglang"
    if server_args and (name == "embedded" or urls) and not _placed():
        raise EngineRefused(
            f"--{name}-{next(iter(server_args))}: only for a server that Vireo starts"
        )
    if name != "embedded" and name not in family.forms and not ours:
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
        patience = settings.engine_patience or _placed().get("patience", 0.0)
        if len(made) == 1 and not patience:
            return made[0]
        from vireo.rollout.several import SeveralEngines

        return SeveralEngines(made, patience)
    if find_spec(name) is None and not ours:
        raise EngineRefused(
            f"{name} is not installed here: pip install 'vireo-vl[{name}]', give the URL of a "
            f"running server by --{name}_url, or use --engine embedded"
        )
    port, keys = launch.free_port(), launch.Keys.new()
    command = server_command(settings, renderer, model_folder, port, keys, dtype=dtype)
    http = connect(f"http://127.0.0.1:{port}", api_key=keys.api, admin_key=keys.admin)
    server = launch.Server(settings.engine, command, env=_ENV[name], keys=keys)
    return client(http, renderer, server)


def server_command(
    settings: EngineSettings,
    renderer: Renderer,
    model_folder: str,
    port: int,
    keys: launch.Keys,
    *,
    dtype: Any = None,
    host: str = "127.0.0.1",
    gpus: int = 1,
) -> list[str]:
    """Command line of a server that Vireo starts: of stock SGLang or vLLM, or `vireo serve`."""
    name = settings.engine
    given = {k.removeprefix(f"{name}-"): v for k, v in settings.server_args.items()}
    kind = None if dtype is None else str(dtype).removeprefix("torch.")
    apart = renderer.processor_path != renderer.model_path
    ours: dict[str, str] = {}
    if renderer.family.remote:  # the renderer runs the same code already
        ours["trust-remote-code"] = ""
    if name == "serve":
        if kind:
            ours["dtype"] = {"bfloat16": "bf16", "float32": "fp32"}[kind]
        if apart:
            ours["processor"] = renderer.processor_path
        return launch.serve_command(model_folder, port, keys, given, host=host, **ours)
    if kind:
        ours["dtype"] = kind
    if apart:
        ours["tokenizer-path" if name == "sglang" else "tokenizer"] = renderer.processor_path
    if gpus > 1:
        ours["tp-size" if name == "sglang" else "tensor-parallel-size"] = str(gpus)
    make = launch.sglang_command if name == "sglang" else launch.vllm_command
    return make(model_folder, port, keys, given, host=host, **ours)
