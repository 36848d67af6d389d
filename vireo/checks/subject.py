"""A model under test: the parts that training uses, and what the properties ask of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vireo.checks.rows import drawn_rows, file_rows, natural_side
from vireo.data.conversation import Conversation
from vireo.data.model_folder import load_processor
from vireo.data.nested import flatten
from vireo.data.packing import micro_batches
from vireo.data.ragged import IGNORE, Batch, Example
from vireo.data.render import Renderer
from vireo.errors import InputError, RowError
from vireo.families import Family
from vireo.models.attention import NAME as VARLEN
from vireo.models.build import ModelSpec, build_policy, empty_policy
from vireo.models.policy import Policy
from vireo.parallel import start

GIB = 1 << 30
CLOSE = 1e-5  # of log-probabilities in float32, where nothing amplifies rounding
ROUNDINGS = 4  # joined rows of 3.8 B parameters were 1 to 2 times that apart
STILL_CLOSE = 0.05  # a row that sees another one is further off


class Recorded:
    """A processor that keeps its last call and can leave keys out of what it returns."""

    def __init__(self, processor: Any):
        self.inner = processor
        self.given: dict[str, Any] = {}
        self.returned: dict[str, Tensor] = {}
        self.without: set[str] = set()

    def __call__(self, **given: Any) -> dict[str, Tensor]:
        self.given, self.returned = given, dict(self.inner(**given))
        return {n: v for n, v in self.returned.items() if n not in self.without}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Subject:
    """One model with the renderer and the policy that a run would have, in float32.

    `rows`: what most properties run on; `drawn`: rows of this module's own, the same for every
    family. Tests put a faulty part in the place of one of these before they run the grid.
    """

    def __init__(self, renderer: Renderer, policy: Policy, rows: list[Conversation] | None = None):
        self.renderer, self.policy = renderer, policy.eval()
        self.processor = Recorded(renderer.processor)
        renderer.processor = self.processor
        # Rows go through the processor, which is looked at.
        self._patches, renderer.patches = renderer.patches, None
        side = natural_side(self.processor)
        self.drawn = drawn_rows(self.family.has_vision, side)
        self.rows = self.drawn if rows is None else rows
        # By the row's identity; the row is held, so that no other one can get it.
        self._examples: dict[int, tuple[Conversation, Example]] = {}
        self._alone: dict[int, tuple[Conversation, Tensor]] = {}

    @property
    def family(self) -> Family:
        return self.renderer.family

    @property
    def every_row(self) -> list[Conversation]:
        return self.drawn if self.rows is self.drawn else [*self.rows, *self.drawn]

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.policy.parameters())

    @property
    def device(self) -> torch.device:
        return next(self.policy.parameters()).device

    def example(self, row: Conversation) -> Example:
        """The row as training renders it, made once."""
        if id(row) not in self._examples:
            self._examples[id(row)] = row, self.renderer.example(row)
        return self._examples[id(row)][1]

    def examples_of(self, row: Conversation) -> list[Example]:
        """The row by each way that the renderer has: the processor, and its own if it has one."""
        made = [self.example(row)]
        if self._patches is not None:
            self.renderer.patches = self._patches
            try:
                made.append(self.renderer.example(row))
            finally:
                self.renderer.patches = None
        return made

    def examples(self, rows: Sequence[Conversation] | None = None) -> list[Example]:
        return [self.example(row) for row in (self.rows if rows is None else rows)]

    @torch.no_grad()
    def logprobs(self, example: Example) -> Tensor:
        """log p of each supervised token of a row by itself, on the CPU."""
        return self.run(Batch.of([example]), packing=False)

    def alone(self, row: Conversation) -> Tensor:
        """`logprobs` of a row, computed once."""
        if id(row) not in self._alone:
            self._alone[id(row)] = row, self.logprobs(self.example(row))
        return self._alone[id(row)][1]

    def run(self, batch: Batch, packing: bool) -> Tensor:
        """The policy's own forward of a micro-batch."""
        batch = batch.to(self.device)
        inputs = batch.pack() if packing else batch.pad(self.renderer.pad_id)
        return self.policy(inputs).cpu()

    def batches(self, examples: Sequence[Example], packing: bool) -> list[Batch]:
        """All rows in as few micro-batches as a run may put them in."""
        can_mix = self.family.can_mix
        return micro_batches(examples, rows=len(examples), can_mix=can_mix, packing=packing)

    @torch.no_grad()
    def joined(self, rows: Sequence[Conversation], packing: bool) -> list[Tensor]:
        """`logprobs` of each row in a micro-batch with the others."""
        examples = [self.example(row) for row in rows]
        found: dict[str, Tensor] = {}
        for batch in self.batches(examples, packing):
            counts = [example.supervised for example in batch.examples()]
            found |= zip(batch.where, self.run(batch, packing).split(counts))
        return [found[example.where] for example in examples]

    @cached_property
    def close(self) -> float:
        """The most that log-probabilities which must be equal may differ by, in float32.

        CLOSE, or for a model that amplifies rounding, as deep ones do, ROUNDINGS times what it
        makes of it: of embeddings and pixels that are off by a last bit, in rows by themselves,
        which nothing that is wrong with joining rows can change.
        """
        generator = torch.Generator().manual_seed(0)

        def blur(value: Tensor) -> Tensor:
            bits = torch.randint(-1, 2, value.shape, generator=generator).to(value.device)
            return value * (1 + bits * torch.finfo(torch.float32).eps)

        largest = 0.0
        embeddings = self.policy.hf.get_input_embeddings()
        handle = embeddings.register_forward_hook(lambda module, given, out: blur(out))
        try:
            for row in self.rows:
                example = self.example(row)
                fields = {
                    name: blur(value)
                    if name in self.family.keys and value.is_floating_point()
                    else value
                    for name, value in example.fields.items()
                }
                moved = self.logprobs(replace(example, fields=fields)) - self.alone(row)
                largest = max(largest, float(moved.abs().max()))
        finally:
            handle.remove()
        return min(max(CLOSE, ROUNDINGS * largest), STILL_CLOSE)

    def place(self, example: Example, supervised: int) -> str:
        """Row, index and text of the n-th supervised token of an example."""
        at = int((example.fields["labels"] != IGNORE).nonzero()[supervised])
        text = self.renderer.tokenizer.decode([int(example.fields["input_ids"][at])])
        return f"{example.where}, token {at} {text!r}"

    def furthest(
        self, pairs: Sequence[tuple[Example, Tensor, Tensor]], limit: float
    ) -> tuple[float, str]:
        """The largest |a - b| over all rows, and the first place where it is above the limit."""
        worst, first = 0.0, ""
        for example, a, b in pairs:
            gap = (a - b).abs().nan_to_num(float("inf"))
            worst = max(worst, float(gap.max()))
            over = (gap > limit).nonzero()
            if len(over) and not first:
                k = int(over[0])
                values = f"{float(a[k]):.4f} and {float(b[k]):.4f}"
                first = f"{self.place(example, k)}: {values}"
        return worst, first

    # -- the same row by transformers alone --------------------------------------------------------

    def plain_processor(self) -> Any:
        """The model's processor as it is on disk, without what the renderer adds to its own."""
        if not hasattr(self, "_plain"):
            trusted = self.family.remote  # or the renderer would not have been made
            self._plain = load_processor(self.family, self.renderer.processor_path, trusted)
        return self._plain

    def plain_inputs(self, row: Conversation) -> dict[str, Tensor]:
        """What the plain processor makes of the row's rendered text and its pictures."""
        template, processor = self.renderer.template, self.plain_processor()
        text = template.render(row.turns, row.tools)
        if template.last_end and not text.rstrip().endswith(template.last_end):
            text += template.last_end
        if not self.family.has_vision:
            return dict(processor([text], add_special_tokens=False, return_tensors="pt"))
        # The tokenizer's start, unless the template has written it: as `apply_chat_template` does.
        start = self.renderer.tokenizer.bos_token
        images = self.renderer.pictures(row)
        nested = self.family.remote
        out = processor(
            text=[text],
            images=[images] if images or nested else None,
            add_special_tokens=not (start and text.startswith(start)),
            return_tensors="pt",
        )
        return flatten(out) if nested else dict(out)

    @contextmanager
    def plain_attention(self) -> Iterator[None]:
        """Every part of the model with transformers' own attention."""
        changed = []
        for module in self.policy.hf.modules():
            config: Any = getattr(module, "config", None)
            if getattr(config, "_attn_implementation_internal", None) == VARLEN:
                config._attn_implementation_internal = "sdpa"
                changed.append(config)
        try:
            yield
        finally:
            for config in changed:
                config._attn_implementation_internal = VARLEN

    @torch.no_grad()
    def plain_forward(self, inputs: dict[str, Tensor], example: Example) -> tuple[float, Tensor]:
        """(the family's own loss, log p of each supervised token) of one row, from `inputs`.

        Where the plain processor's ids are others than the renderer's, which may part an answer
        from its prompt, the renderer's keys with a value a token stand in for the processor's.
        """
        ids, labels = example.fields["input_ids"][None], example.fields["labels"][None]
        if not torch.equal(inputs["input_ids"], ids):
            own = Batch.of([example]).pad(self.renderer.pad_id)
            tokens = {n for n, key in self.family.keys.items() if key.kind == "token"}
            inputs = inputs | {n: own[n] for n in tokens | {"input_ids", "attention_mask"}}
        placed = {n: v.to(self.device) for n, v in inputs.items()}
        with self.plain_attention():
            out = self.policy.hf(**placed, labels=labels.to(self.device), use_cache=False)
        targets = labels[0, 1:].to(self.device)
        kept = targets != IGNORE
        logits = out.logits[0, :-1][kept].float()
        found = logits.log_softmax(-1).gather(-1, targets[kept][:, None])[:, 0]
        return float(out.loss), found.cpu()


def open_subject(
    model: str,
    rows: str | None = None,
    trust_remote_code: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Subject:
    """Load a model folder as a run does; on a GPU if there is one, never sharded.

    InputError: no such model or family, weights that do not fit its config, or no room for them.
    """
    given = None if rows is None else file_rows(rows)
    renderer = Renderer(model, trust_remote_code=trust_remote_code)
    family, parallel = renderer.family, start(shard=False)
    for row in given or ():  # a picture that is not there is no fault of the family
        try:
            renderer.pictures(row)
        except RowError as error:
            raise InputError(f"--rows {rows}: {error.at(row.where)}") from error
    empty = empty_policy(deepcopy(renderer.config), family)  # a model marks the config it has
    parameters = sum(p.numel() for p in empty.parameters())
    needed = 4 * parameters / GIB
    tell(
        f"{family.name}: {parameters / 1e6:,.1f} M parameters, {needed:.2f} GiB in float32 on the "
        f"{parallel.device.type}, and what rows need"
    )
    _check_room(needed, parallel.device)
    dummy = renderer.dummy() if family.has_vision and family.can_mix else None
    policy, _ = build_policy(
        ModelSpec(model, shard=False), renderer.config, family, parallel, dummy
    )
    return Subject(renderer, policy, given)


def _check_room(needed: float, device: torch.device) -> None:
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory / GIB
    else:
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    if needed > room:
        raise InputError(
            f"the weights take {needed:.0f} GiB in float32, and the {device.type} has {room:.0f}: "
            "check a smaller model of the family, or one with fewer layers in its config"
        )
