"""The bridge between training and inference: pictures and a prompt in, a checked Sample out."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

from vireo.data.conversation import Conversation, Image, ImageRef, Text, Turn
from vireo.data.prompt import Prompt
from vireo.data.render import Renderer
from vireo.errors import InputError
from vireo.rollout.contract import check
from vireo.rollout.engine import RolloutEngine
from vireo.rollout.sample import Request, Sample, Sampling


class VLMRolloutEngine:
    """An engine behind the renderer of the trainer, so that both see the same ids and pixels.

    Every response is checked (`vireo.rollout.contract`) before it becomes a `Sample`. `weights`:
    versions that responses may come from (None: any).

        async with VLMRolloutEngine(engine, renderer) as rollouts:
            sample = await rollouts.generate(picture, "What is this?")
    """

    def __init__(
        self, engine: RolloutEngine, renderer: Renderer, *, weights: Container[str] | None = None
    ):
        self.engine, self.renderer, self.weights = engine, renderer, weights
        self.words = renderer.config.get_text_config().vocab_size
        self._made = 0

    async def __aenter__(self) -> VLMRolloutEngine:
        await self.engine.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.engine.close()

    async def generate(
        self,
        images: Any,
        prompt: str | Conversation,
        *,
        sampling: Sampling | None = None,
        image_root: str | None = None,
    ) -> Sample:
        """One response. `images`: one or a list of PIL images, encoded bytes, `Path` objects, or
        texts, which are paths inside `image_root` (default: the current folder); None for none.
        `prompt`: the user's text, to stand behind the images, or a whole Conversation.

        RowError: an image or the prompt is refused. ContractError: the response is.
        """
        row = prompt if isinstance(prompt, Conversation) else _asked(images, prompt, image_root)
        made = await asyncio.to_thread(self.renderer.rollout, row)
        self._made += 1
        return (await self.samples(made, sampling or Sampling(), group=f"{self._made:08d}"))[0]

    async def samples(
        self, prompt: Prompt, sampling: Sampling, n: int = 1, *, group: str
    ) -> list[Sample]:
        """`n` responses to one prompt, whose images were prepared once. With a seed, each has its
        own, made from it, the group and its number."""
        new = [self.new(prompt, sampling, group, index) for index in range(n)]
        return await asyncio.gather(*(self.fill(prompt, sample) for sample in new))

    def new(self, prompt: Prompt, sampling: Sampling, group: str, index: int) -> Sample:
        """A sample that has no response yet."""
        if prompt.row is None:
            raise ValueError("a prompt without its row makes no sample")
        seed = None if sampling.seed is None else own_seed(sampling.seed, group, index)
        return Sample(
            group,
            index,
            prompt.row,
            prompt_ids=prompt.expanded,
            answer=prompt.answer,
            sampling=replace(sampling, seed=seed),
        )

    async def fill(self, prompt: Prompt, sample: Sample) -> Sample:
        """`sample` with its response, or with more of it if it has a part of one.

        A prompt that an engine takes as text has no place for a part of a response: it begins
        again there. ContractError names the sample.
        """
        if sample.response_ids and self._as_text(prompt):
            sample = replace(sample, response_ids=[], logprobs=[], mask=[], spans=[])
        request = Request(
            prompt,
            sample.sampling,
            self.renderer.stop_ids,
            self.renderer.banned_ids,
            group=sample.group,
            response=list(sample.response_ids),
        )
        got = await self.engine.generate(request)
        check(sample.name, request, got, self.words, self.weights)
        ids = sample.response_ids + got.ids
        return replace(
            sample,
            response_ids=ids,
            logprobs=sample.logprobs + got.logprobs,
            mask=sample.mask + [1] * len(got.ids),
            finish=got.finish,
            spans=_joined(sample.spans, got.spans),
            status="partial" if got.finish == "abort" else "done",
            text=self.renderer.tokenizer.decode(ids, skip_special_tokens=True),
        )

    def _as_text(self, prompt: Prompt) -> bool:
        form = self.renderer.family.forms.get(self.engine.form)
        return bool(prompt.pictures) and form == "text" and self.engine.form != "embedded"


def own_seed(seed: int, group: str, index: int) -> int:
    """The seed of one sample, 0 to 2^31 - 1: the same in every process and on every engine."""
    digest = hashlib.sha256(f"{seed}/{group}/{index}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def _joined(before: list[tuple[str, int]], after: list[tuple[str, int]]) -> list[tuple[str, int]]:
    spans = list(before)
    for version, count in after:
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1] + count)
        elif count:
            spans.append((version, count))
    return spans


def _asked(images: Any, text: str, root: str | None) -> Conversation:
    given = (
        []
        if images is None
        else list(images)
        if isinstance(images, Sequence) and not (isinstance(images, (str, bytes)))
        else [images]
    )
    refs = []
    for image in given:
        if isinstance(image, str) and image.split(":")[0] in ("http", "https"):
            raise InputError(f"image {image[:100]}: images by URL are not fetched; give its bytes")
        inside = os.path.abspath(root or ".") if isinstance(image, str) else None
        refs.append(ImageRef(os.fspath(image) if isinstance(image, os.PathLike) else image, inside))
    parts: tuple[Text | Image, ...] = (*(Image(i) for i in range(len(refs))), Text(text))
    return Conversation((Turn("user", parts),), tuple(refs))
