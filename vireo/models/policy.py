"""The module that is sharded: a Hugging Face model with log-probabilities as its forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vireo.data.ragged import IGNORE, TRAINER_KEYS
from vireo.families import Family
from vireo.models.attention import Attention
from vireo.models.heads import token_logprobs


class Policy(nn.Module):
    """Wraps a model (`self.hf`) so that everything a rank computes happens inside one forward.

    Sharded parameters are gathered by the forward of the outermost module; a vision tower or a head
    called from outside it would see shards.
    """

    hf: Any  # a transformers model with `model` and `lm_head`

    def __init__(self, hf: nn.Module, family: Family, dummy: dict[str, Tensor] | None):
        super().__init__()
        self.hf, self.family = hf, family
        self.attention = Attention(hf, family)
        self.dummy = dummy  # one smallest image, for micro-batches without images
        self._nothing: Tensor | None = None
        if dummy is not None:
            self.hf.get_input_embeddings().register_forward_hook(self._add_nothing)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """log p of every supervised token, float32 [N], in reading order of `labels`.

        `inputs` is `Batch.pack()` or `Batch.pad()`. The tower runs in every micro-batch of a vision
        family: without images it sees a blank one whose output, times zero, is added to the token
        embeddings, where an image's would go. So all ranks run the same collectives in the same
        order, forward and backward (with frozen embeddings too, where only images lead from the
        language model to what trains), and no result depends on which rank had images.
        """
        model_inputs = {n: v for n, v in inputs.items() if n not in TRAINER_KEYS}
        positions, lengths = inputs["positions"], inputs.get("lengths")
        self.attention.packed(None if lengths is None else lengths.tolist(), positions.device)
        if "attention_mask" in inputs and self.family.positions == "mrope":
            positions = positions[1:]  # the text row is only for packed boundaries
        elif self.family.positions == "1d":
            positions = positions[0]
        if self.dummy is not None and "pixel_values" not in inputs:
            self._nothing = 0.0 * self._dummy_features(inputs["input_ids"].device)
        hidden = self.hf.model(
            **model_inputs, position_ids=positions, use_cache=False
        ).last_hidden_state
        rows, columns = (inputs["labels"] != IGNORE).nonzero(as_tuple=True)
        targets = inputs["labels"][rows, columns]
        return token_logprobs(hidden[rows, columns - 1], self.hf.lm_head, targets)

    def generate(self, **options: Any) -> Tensor:
        """`transformers`' own generation, inside the outermost module (see the class)."""
        self.attention.packed(None, self.hf.device)
        return self.hf.generate(**options)

    def _add_nothing(self, _module: nn.Module, _inputs: Any, embeddings: Tensor) -> Tensor:
        nothing, self._nothing = self._nothing, None
        return embeddings if nothing is None else embeddings + nothing

    def _dummy_features(self, device: torch.device) -> Tensor:
        assert self.dummy is not None
        images = {n: v.to(device) for n, v in self.dummy.items()}
        out = self.hf.model.get_image_features(**images)
        # All that reaches the language model: some towers show it more than their last layer.
        shown = [out.pooler_output, getattr(out, "deepstack_features", None)]
        return torch.stack([t.float().sum() for t in _tensors(shown)]).sum()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in _tensors(part)]
    return [] if value is None else [value]
