"""SGLang's HTTP protocol, as far as Vireo speaks it: paths, fields and versions, said once.

The client (`sglang.py`), the server (`server.py`) and the weight sync share this file. Facts are of
stock SGLang 0.5.17 to 0.5.23; differences are in `Version`. vLLM's protocol is in `vllm.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from vireo.rollout.engine import EngineRefused
from vireo.rollout.sample import Request

GENERATE = "/generate"
HEALTH = "/health"
MODEL_INFO = "/model_info"
SERVER_INFO = "/server_info"
FLUSH = "/flush_cache"
PAUSE = "/pause_generation"
CONTINUE = "/continue_generation"
ABORT = "/abort_request"
RELEASE = "/release_memory_occupation"
RESUME = "/resume_memory_occupation"
BEGIN_UPDATE = "/begin_weight_update"
END_UPDATE = "/end_weight_update"
UPDATE_DISK = "/update_weights_from_disk"
UPDATE_TENSOR = "/update_weights_from_tensor"
INIT_GROUP = "/init_weights_update_group"
UPDATE_GROUP = "/update_weights_from_distributed"
DESTROY_GROUP = "/destroy_weights_update_group"
CHECKSUM = "/weights_checker"

# Control endpoints: the admin key alone opens them where the server has both keys.
CONTROL = frozenset(
    (
        *(FLUSH, PAUSE, CONTINUE, ABORT, RELEASE, RESUME, BEGIN_UPDATE, END_UPDATE),
        *(UPDATE_DISK, UPDATE_TENSOR, INIT_GROUP, UPDATE_GROUP, DESTROY_GROUP, CHECKSUM),
    )
)
TAGS = ("kv_cache", "weights", "cuda_graph")
BAN = -1e9  # a bias that leaves a token no probability

_KNOWN = re.compile(r"0\.5\.(\d+)(?:\D.*)?")
_OLDEST, _NEWEST = 17, 23  # patches of 0.5


@dataclass(frozen=True)
class Version:
    """What differs between releases."""

    text: str
    sessions: bool = False  # updates stand between BEGIN_UPDATE and END_UPDATE
    spans: bool = False  # meta_info has weight_versions

    @classmethod
    def of(cls, text: str, software: str = "SGLang") -> Version:
        """EngineRefused: a version that was never tried."""
        found = _KNOWN.fullmatch(text)
        if found is None or not _OLDEST <= int(found[1]) <= _NEWEST:
            raise EngineRefused(
                f"{software} {text} is not known to Vireo, which runs 0.5.{_OLDEST} to "
                f"0.5.{_NEWEST}: install one of these"
            )
        patch = int(found[1])
        return cls(text, sessions=patch >= 21, spans=patch >= 19)


def generate_body(request: Request, form: str) -> dict[str, Any]:
    """The body of GENERATE for one request, in the form that `Family.forms` names; images are JSON
    already (see `http.encoded`).

    ValueError: a response cannot go on in the form of text with pictures.
    """
    sampling = request.sampling
    body: dict[str, Any] = {
        "rid": request.rid,
        "sampling_params": {
            "max_new_tokens": request.left,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": list(request.stop_ids),
            **({"sampling_seed": sampling.seed} if sampling.seed is not None else {}),
            **({"logit_bias": {str(i): BAN for i in request.banned}} if request.banned else {}),
        },
        "return_logprob": True,
        "return_prompt_token_ids": True,
    }
    if request.prompt.pictures and form == "text":
        if request.response:
            raise ValueError("a prompt sent as text has no place for tokens of a response")
        body["text"] = request.prompt.text
    else:
        body["input_ids"] = request.prompt.ids + request.response
    if request.prompt.pictures:
        body["image_data"] = b"[%s]" % b", ".join(request.prompt.urls)
    return body
