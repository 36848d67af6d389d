"""The client of one vLLM server, and vLLM's protocol as far as it speaks it (facts of 0.32).

Control endpoints exist with VLLM_SERVER_DEV_MODE=1 only, and stay open whatever key a server has:
who reaches its port can change its weights. Those that Vireo starts listen on loopback.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vireo.data.conversation import Text, Turn
from vireo.data.render import Renderer
from vireo.rollout.calls import Call, Calls
from vireo.rollout.engine import (
    EngineError,
    EngineRefused,
    Health,
    PauseMode,
    RolloutEngine,
    State,
    Tag,
)
from vireo.rollout.http import Http
from vireo.rollout.launch import Server
from vireo.rollout.protocol import BAN
from vireo.rollout.sample import Generation, Request
from vireo.weights.source import Folder, Weights

GENERATE = "/inference/v1/generate"
SERVER_INFO = "/server_info?config_format=json"
ABORT = "/abort_requests"
NAME = "generate-tokens-"  # stands before a request's id, in answers and for ABORT
# A pause that clears the caches takes their tokens from frozen requests: a retract.
PAUSE: dict[PauseMode, str] = {
    "abort": "/pause?mode=abort",
    "in_place": "/pause?mode=keep&clear_cache=false",
    "retract": "/pause?mode=keep&clear_cache=true",
}
# To empty caches of old weights. Requests that are frozen go back to the queue, for theirs.
RESET = "/reset_{}_cache?reset_running_requests=true"
_SETTINGS = ("logprobs_mode", "model", "multimodal_config", "enable_sleep_mode", "max_model_len")
_KNOWN = re.compile(r"0\.32\.\d+(?:\D.*)?")
_ROUNDING = 1e-6  # a log-probability may be above 0 by so much
_NOT_FINITE = -9999.0  # what vLLM writes for such a log-probability


def generate_body(request: Request, rid: str, seeds: bool = True) -> dict[str, Any]:
    """The body of GENERATE: ids with one placeholder an image, which the server expands; images
    are JSON already (see `http.encoded`).

    `stop_ids` alone stop, not those of the model's folder. A response that goes on is drawn with
    other random numbers than its beginning was.
    """
    sampling, done = request.sampling, len(request.response)
    parts = [b'{"type": "image_url", "url": %s}' % url for url in request.prompt.urls]
    return {
        "request_id": rid,
        "token_ids": request.prompt.ids + request.response,
        "content_parts": b"[%s]" % b", ".join(parts),
        "return_token_ids": True,
        "sampling_params": {
            "max_tokens": request.left,
            "temperature": sampling.temperature,
            "logprobs": 0,  # of the token itself
            "stop_token_ids": list(request.stop_ids),
            "ignore_eos": True,
            "detokenize": False,
            "logit_bias": {str(i): BAN for i in request.banned},
            **({"seed": sampling.seed + done} if seeds and sampling.seed is not None else {}),
        },
    }


class VllmEngine(RolloutEngine):
    """Requests go to `http`'s server, which `server` starts if given; it has `renderer`'s model.
    `seeds`: they are sent. On a CPU one kills the server once a prompt is computed in two steps."""

    form = "vllm"

    def __init__(self, http: Http, renderer: Renderer, server: Server | None = None):
        super().__init__()
        self.http, self.renderer, self.server = http, renderer, server
        self._calls = Calls()
        self._versions: list[str] = []  # of all weights that the server had
        self._software = ""

    async def start(self) -> None:
        await self.close()
        await self.http.open()
        if self.server is not None:
            await self.server.start(self.http)
            self.http.note = self.server.last_words
        version = (await self._call("/version", None, "version"))["version"]
        self._software = f"vLLM {version}"
        if not _KNOWN.fullmatch(str(version)):
            raise EngineRefused(f"{self._software} is not known to Vireo, which runs vLLM 0.32")
        await self._check()
        self.state, self.weights = State(), await self._version()
        self._versions = [self.weights]
        self.http.hold(False)
        await self._call("/resume", {})  # an earlier client may have left it paused, or
        if (await self._call("/is_sleeping", None, "is_sleeping"))["is_sleeping"]:
            raise self._refused("its weights: it was left asleep, without them")

    async def _check(self) -> None:
        """EngineRefused: the server was started without what rollouts need, or with another model:
        its config is compared where its folder can be read here, its tokenizer in any case."""
        render, family = self.renderer, self.renderer.family
        if family.forms.get("vllm") != "ids":
            why = family.refused.get("vllm", "it takes no text with pictures")
            raise EngineRefused(f"{family.name} with vLLM: {why}; use --engine embedded")
        status, info = await self.http.get(SERVER_INFO, also=(404,))
        if status == 404:
            raise self._refused("VLLM_SERVER_DEV_MODE=1 in its environment")
        if (await self.http.post(GENERATE, {}, also=(400, 403)))[0] == 403:
            raise self._refused("--enable-scale-out")
        config = self.http.fields(SERVER_INFO, info, "vllm_config")["vllm_config"]
        config = self.http.fields(SERVER_INFO, config, "model_config", "device_config")
        model = self.http.fields(SERVER_INFO, config["model_config"], *_SETTINGS)
        self._device, self._sleeps = config["device_config"]["device"], model["enable_sleep_mode"]
        self.seeds = self._device != "cpu"
        self._longest = int(model["max_model_len"])  # tokens of prompt and response
        mode, folder, vision = (model[name] for name in _SETTINGS[:3])
        if mode != "processed_logprobs":  # others know neither temperature nor banned tokens
            raise self._refused(f"--logprobs-mode processed_logprobs (it has {mode})")
        if family.has_vision and (not vision or vision["language_model_only"]):
            raise self._refused("the vision tower (it runs a text model)")
        file, wanted = Path(folder, "config.json"), render.config.model_type
        found = json.loads(file.read_text())["model_type"] if file.exists() else wanted
        if found != wanted:
            raise self._refused(f"{render.model_path} ({folder} is of type {found}, not {wanted})")
        text = render.template.render([Turn("user", (Text("."),))], prompt=True)
        asked = {"prompt": text + (family.placeholder or ""), "add_special_tokens": False}
        answer = await self._call("/tokenize", asked, "tokens")
        if answer["tokens"] != render.tokenizer.encode(asked["prompt"], add_special_tokens=False):
            raise self._refused(f"{render.model_path} ({folder} has another tokenizer)")

    def _refused(self, need: str, what: str = "answer rollouts") -> EngineRefused:
        return EngineRefused(f"{self.http.url} cannot {what}: start it with {need}")

    async def close(self) -> None:
        self._calls.close()
        await self.http.close()
        if self.server is not None:
            await self.server.close()

    # -- requests -----------------------------------------------------------------------------

    async def generate(self, request: Request) -> Generation:
        """EngineRefused: `top_p` or `top_k`, or more tokens than the server has room for."""
        sampling, started = request.sampling, time.perf_counter()
        if sampling.temperature and (sampling.top_p < 1 or sampling.top_k):
            raise EngineRefused(
                f"top_p {sampling.top_p}, top_k {sampling.top_k}: vLLM's log-probabilities are of "
                "what these leave, a trainer's of all tokens; use 1 and 0, or another --engine"
            )
        if (length := len(request.prompt.expanded) + sampling.max_new_tokens) > self._longest:
            need = f"--max-model-len {length} or more, or lower --max_new_tokens"
            raise self._refused(need, f"hold {length} tokens of prompt and response")
        got = await self._calls.run(request.rid, lambda call: self._ask(request, call))
        got = got or Generation([], [], "abort", [])
        got.seconds = time.perf_counter() - started
        return got

    async def _ask(self, request: Request, call: Call) -> Generation:
        async def body(arrived: bool) -> dict[str, Any]:
            if arrived:
                await self._call(ABORT, {"request_ids": [NAME + call.left()]})
            await call.begin(request.rid, self.state, self._versions)
            return generate_body(request, call.sent, self.seeds)

        return self._generation(call, (await self.http.post(GENERATE, body))[1])

    def _generation(self, call: Call, answer: Any) -> Generation:
        """The answer, read strictly. EngineError: it is not what this request must get."""
        problem, expected = "", self._versions[call.first :]
        try:
            (choice,) = answer["choices"]
            ids, finish, told = choice["token_ids"], choice["finish_reason"], answer["request_id"]
            scored = [(c["token_id"], float(c["logprob"])) for c in choice["logprobs"]["content"]]
            spans = [(s["version"], s["end"] - s["start"]) for s in choice["weight_versions"]]
            prompt_ids = answer["prompt_token_ids"]
        except (KeyError, TypeError, ValueError):
            problem = f"has another shape: {self.http.quote(answer)}"
        else:
            if told != NAME + call.sent:
                problem = f"is one to {told}"
            elif [token for token, _ in scored] != ids:
                problem = f"has {len(scored)} log-probabilities of other tokens"
            elif finish not in ("stop", "length", "abort"):
                problem = f"finished by {finish!r}"
            elif wrong := [v for _, v in scored if not _NOT_FINITE < v <= _ROUNDING]:
                problem = f"has a log-probability of {wrong[0]}"
            elif sum(count for _, count in spans) != len(ids):
                problem = f"has weight versions {spans} of {len(ids)} tokens"
            elif other := [version for version, _ in spans if version not in expected]:
                problem = f"is of weights {other[0]!r}, expected one of {expected}"
        if problem:
            raise EngineError(f"{self.http.url}: the answer to request {call.sent} {problem}")
        logprobs = [min(value, 0.0) for _, value in scored]
        return Generation(ids, logprobs, finish, spans, prompt_ids, choice.get("stop_reason"))

    # -- control ------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "abort") -> None:
        first = self.state.name == "running"
        self.state.pause()
        self.http.hold(True)
        await self._call(PAUSE[mode], {})
        if mode == "abort" and first:  # what arrives behind the pause is ended by another one
            await self._calls.end(lambda _: self._call(PAUSE[mode], {}))

    async def resume(self) -> None:
        self.state.resume()
        await self._call("/resume", {})
        self.http.hold(False)

    async def abort(self, rids: Sequence[str] | None = None) -> None:
        async def end(sent: list[str]) -> None:
            await self._call(ABORT, {"request_ids": [NAME + rid for rid in sent]})

        await self._calls.end(end, rids)

    async def sleep(self, tags: Sequence[Tag] = ("kv_cache", "weights")) -> None:
        if not self._sleeps:  # it would say that it sleeps, and keep everything
            need = "--enable-sleep-mode (--vllm-enable-sleep-mode where Vireo starts it)"
            raise self._refused(need, "give memory back")
        new = set(tags) - self.state.released
        if "cuda_graph" in new or new == {"weights"}:
            raise EngineRefused(f"{', '.join(tags)}: vLLM gives back kv_cache, or that and weights")
        if self.state.sleep(tags):
            path = "/sleep?level=2" if "weights" in new else "/release_kv_cache_memory"
            await self._call(path, {})

    async def wake(self, tags: Sequence[Tag] = ("kv_cache", "weights")) -> None:
        if back := self.state.wake(tags):
            path = "/wake_up?" + "&".join(f"tags={tag}" for tag in back)
            answer = await self._call(path, {}, "status")
            if answer["status"] == "awake":  # then it goes on by itself
                await self._call(PAUSE["in_place"], {})

    async def update_weights(self, weights: Weights, version: str) -> None:
        """Of a Folder, which the server must be able to read. EngineRefused: anything else, or a
        server on a CPU, where layers may go on with packed copies of the old weights."""
        from vireo.hub import local_folder
        from vireo.weights.named import compare, shapes

        if not isinstance(weights, Folder):
            raise EngineRefused(f"vLLM takes new weights as a Folder, not {type(weights).__name__}")
        if self._device == "cpu":
            what = "change its weights: on a CPU it may go on with old ones"
            raise self._refused("the new model, or use --engine embedded", what)
        # The server says nothing about a tensor that is lacking, and dies of a wrong shape.
        compare(shapes(weights.path), shapes(local_folder(self.renderer.model_path)))
        before, touched, done = self.state.name, False, False
        self.state.begin_update()
        try:
            if before == "running":
                await self._calls.answered()
                await self._call(PAUSE["in_place"], {})
            touched = True
            self._versions.append(version)
            place = {"weights_path": os.path.abspath(weights.path)}
            await self._call("/collective_rpc", {"method": "reload_weights", "kwargs": place})
            prefix = await self._call(RESET.format("prefix"), {}, "success")
            for cache in ("mm", "encoder"):
                await self._call(RESET.format(cache), {})
            await self._call("/update_weight_version", {"new_version": version})
            if (found := await self._version()) != version or not prefix["success"]:
                raise EngineError(f"{self.http.url}: weights {found!r}, prefix cache: {prefix}")
            if before == "running":
                await self._call("/resume", {})
            self.weights, done = version, True
        finally:
            self.state.end_update(done or (not touched and before != "resumed"))

    async def health(self) -> Health:
        try:
            weights = await self._version()
        except EngineError as error:
            return Health(False, self.state.name, self.weights, self._software, str(error))
        return Health(self.state.name == "running", self.state.name, weights, self._software)

    async def _version(self) -> str:
        return str((await self._call("/weight_info", None, "weight_version"))["weight_version"])

    async def _call(self, path: str, body: dict[str, Any] | None, *names: str) -> Any:
        """The answer of a control endpoint, which must be an object with these fields, if any."""
        answer = (await self.http.post(path, body, control=True))[1]
        return self.http.fields(path, answer, *names) if names else answer
