"""The body of GENERATE, read as stock SGLang reads it: prompts, images, sampling parameters.

What stock has and this does not is refused by name; what stock does not know is passed over.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from typing import Any

from vireo.data.conversation import ImageRef
from vireo.data.prompt import Prompt
from vireo.data.references import fetched, is_data_url, web_url
from vireo.errors import InputError
from vireo.rollout.protocol import BAN
from vireo.rollout.sample import Request, Sampling, new_rid

_MISSING: Any = object()
_BANS = BAN / 10  # from this bias on a token has no probability in float32
_HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair: JSON can say it, no text has it
_PARAMS: dict[str, tuple[Any, Any]] = {  # sampling parameters: default and type
    **{"n": (1, int), "max_new_tokens": (128, int), "temperature": (1.0, int | float)},
    **{"top_p": (1.0, int | float), "top_k": (-1, int), "sampling_seed": (None, int)},
    **{"stop_token_ids": ([], list), "ignore_eos": (False, bool), "logit_bias": ({}, dict)},
    **{"skip_special_tokens": (True, bool), "spaces_between_special_tokens": (True, bool)},
    **{"no_stop_trim": (False, bool), "repetition_penalty": (1.0, int | float)},
}
_STOCK_PARAMS = (
    *("stop", "stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "custom_params"),
    *("min_p", "frequency_penalty", "presence_penalty", "min_new_tokens", "stream_interval"),
)
_STOCK_FIELDS = (
    *("stream", "input_embeds", "video_data", "audio_data", "lora_path", "logprob_start_len"),
    *("top_logprobs_num", "token_ids_logprob", "custom_logit_processor", "return_hidden_states"),
    *("return_sampling_mask", "return_routed_experts"),
)
_NOTHING: tuple = (None, False, 0, -1, "", [], {})  # values of them that ask for nothing


class Schema(InputError):
    """A field is missing or of another type: stock has a shape of its own for this error."""


class Stopped(Exception):
    """Ends a request with a status: stock's code fails on it (500), or it was aborted before it
    began (499)."""

    def __init__(self, status: int, why: str):
        super().__init__(why)
        self.status = status


def field(body: dict[str, Any], name: str, kind: type, default: Any = _MISSING) -> Any:
    """A field of a body. Schema: it is of another type, or has no default and is missing."""
    value = body.get(name)
    if value is None and default is not _MISSING:
        return default
    if not _is(value, kind):
        raise Schema(f"{name}: found {str(value)[:80]!r}, expected {kind.__name__}")
    return value


def texts(body: dict[str, Any], name: str) -> list[str]:
    found = field(body, name, list)
    if not all(map(_is_text, found)):
        raise Schema(f"{name}: expected a list of texts")
    return found


@dataclass
class Asked:
    """One prompt (text or ids) of a body, and one response for each of `rids`.

    `images`: as they came; `params`: sampling_params with their defaults.
    """

    prompt: str | list[int]
    images: list[Any]
    params: dict[str, Any]
    rids: list[str]
    logprobs: bool

    def requests(
        self, prompt: Prompt, stop_ids: tuple[int, ...], words: int, limit: int
    ) -> list[Request]:
        """InputError: with the response it is longer than `limit`, or a bias cannot be had."""
        params, used, most = self.params, len(prompt.expanded), self.params["max_new_tokens"]
        most = max(0, limit - used) if most is None else most
        if used + most > limit:
            raise InputError(
                f"{used} tokens of the prompt and max_new_tokens {most} are more than the "
                f"model's {limit}"
            )
        for name, bias in params["logit_bias"].items():
            if not name.isdecimal() or int(name) >= words:
                raise InputError(f"logit_bias: {name!r} is no token id below {words}")
            if not _is(bias, int | float) or not bias <= _BANS:
                raise InputError(f"logit_bias {bias!r}: only bans, {_BANS:g} or less, are built")
        banned = tuple(sorted(map(int, params["logit_bias"])))
        stops = () if params["ignore_eos"] else {*stop_ids, *params["stop_token_ids"]}
        sampling = Sampling(
            max_new_tokens=most,
            temperature=params["temperature"] if params["temperature"] >= 1e-6 else 0.0,
            top_p=params["top_p"],
            top_k=min(max(0, params["top_k"]), words),
            seed=params["sampling_seed"],
        )
        rest = (tuple(sorted(stops)), banned, self.rids[0])
        return [Request(prompt, sampling, *rest, rid=rid) for rid in self.rids]


def read(body: dict[str, Any]) -> tuple[list[Asked], bool]:
    """The prompts of a body, and whether its answer is a list.

    InputError: stock answers 400 as well, or what is asked for is not built. Stopped.
    """
    _refuse(body, _STOCK_FIELDS)
    texts, ids = body.get("text"), body.get("input_ids")
    if (texts is None) == (ids is None):
        raise InputError("exactly one of text and input_ids has to be given")
    right = _is_text if ids is None else _is_ids
    single = right(texts if ids is None else ids)
    prompts: Any = texts if ids is None else ids
    prompts = [prompts] if single else prompts
    if not isinstance(prompts, list) or not prompts or not all(map(right, prompts)):
        raise Schema("text, input_ids: expected one that is not empty, or a list of such")
    params, count = body.get("sampling_params") or {}, len(prompts)
    every = [_params(p) for p in (params if isinstance(params, list) else [params] * count)]
    n = every[0]["n"]
    if len(every) != count or any(each["n"] != n for each in every):
        raise InputError("sampling_params: expected one for each prompt, with the same n in all")
    logprobs = body.get("return_logprob")
    if not isinstance(logprobs, list):
        logprobs = [logprobs] * count
    elif n > 1 or len(logprobs) != count:
        raise InputError("return_logprob: expected one value, or one for each prompt where n is 1")
    images = _images(body.get("image_data"), count, many := not single or n > 1)
    rids = _rids(body.get("rid"), count, n, single)
    parts = zip(prompts, images, every, rids, logprobs)
    return [Asked(*part[:4], bool(part[4])) for part in parts], many


def image_ref(image: Any, allow_urls: bool) -> ImageRef:
    """An image of a body. InputError: it is a path, or a URL without leave."""
    if not isinstance(image, str):
        raise InputError(f"image_data: found {type(image).__name__}, expected a data URL or base64")
    if is_data_url(image):
        return ImageRef(image)
    if allow_urls and web_url(image):
        return fetched(ImageRef(image))
    if re.match(r"\s*([a-z][a-z0-9+.-]*:|/)", image, re.IGNORECASE):
        raise InputError(
            f"image_data: {image[:100]!r} is a URL or a path, which this server does not open: "
            "send a data URL (with --allow_image_urls it fetches http and https)"
        )
    try:
        return ImageRef(base64.b64decode(image, validate=True))
    except ValueError as error:
        raise InputError(f"image_data: {image[:100]!r} is no base64: {error}") from error


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and isinstance(value, bool) == (kind is bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and not _HALF.search(value)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(_is(token, int) for token in value)


def _refuse(given: dict[str, Any], stock: tuple[str, ...]) -> None:
    for name in stock:
        value = given.get(name)
        if value not in _NOTHING or (name == "logprob_start_len" and value == 0):  # the whole
            raise InputError(f"{name} {str(value)[:80]}: vireo serve does not have it")


def _params(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise Schema("sampling_params: expected an object, or a list of objects")
    _refuse(given, _STOCK_PARAMS)
    params = {name: default for name, (default, _) in _PARAMS.items()}
    for name, value in given.items():
        if name not in _PARAMS and name not in _STOCK_PARAMS:
            raise Stopped(500, f"SamplingParams has no argument {name!r}")
        if value is None and name != "max_new_tokens":
            continue
        if name in _PARAMS and value is not None and not _is(value, _PARAMS[name][1]):
            raise Stopped(500, f"{name} {value!r} is of a wrong type")
        params[name] = value
    most, seed = params["max_new_tokens"], params["sampling_seed"]
    if not all(_is(stop, int) for stop in params["stop_token_ids"]):
        raise Stopped(500, f"stop_token_ids {params['stop_token_ids']} are no token ids")
    for name, right, expected in (
        ("n", params["n"] >= 1, "at least 1"),
        ("max_new_tokens", most is None or most >= 0, "at least 0"),
        ("temperature", 0 <= params["temperature"] <= 1e30, "a finite number of at least 0"),
        ("top_p", 0 < params["top_p"] <= 1, "above 0 and at most 1"),
        ("top_k", params["top_k"] >= 1 or params["top_k"] == -1, "-1 (all) or at least 1"),
        ("sampling_seed", seed is None or 0 <= seed < 2**63, "0 to 2^63 - 1"),
        ("repetition_penalty", params["repetition_penalty"] == 1, "1: no other is built"),
    ):
        if not right:
            raise InputError(f"{name}: found {params[name]}, expected {expected}")
    return params


def _images(given: Any, prompts: int, many: bool) -> list[list[Any]]:
    """The images of each prompt; `many`: they come as a list of prompts."""
    if given is None or given == []:
        return [[]] * prompts
    if not isinstance(given, list):
        return [[given]] * prompts
    if not many:
        return [given]
    nested = isinstance(given[0], list)  # the first decides for all
    if len(given) != prompts or (nested and not all(isinstance(own, list) for own in given)):
        raise InputError(
            f"image_data: expected an image or a list of images for each of {prompts} prompts, "
            f"found {len(given)}; [] is none, several images of one prompt are [[a, b]]"
        )
    return given if nested else [[image] for image in given]


def _rids(given: Any, prompts: int, n: int, single: bool) -> list[list[str]]:
    """The names of each prompt's responses, as stock makes them."""
    if given is None:
        return [[new_rid() for _ in range(n)] for _ in range(prompts)]
    if isinstance(given, str):
        given = [given] if single else [f"{given}_{i}" for i in range(prompts)]
    right = isinstance(given, list) and len(given) == prompts and all(map(_is_text, given))
    if not right or len(set(given)) < prompts:
        raise InputError(f"rid: expected a text, or {prompts} different ones; found {given}")
    return [[name] if n == 1 else [f"{name}_{new_rid()}" for _ in range(n)] for name in given]
