"""The module that is sharded: a Hugging Face model with log-probabilities as its forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vireo.data.nested import nest, with_blank
from vireo.data.ragged import IGNORE, TRAINER_KEYS
from vireo.families import Family
from vireo.models.aligned import align_gated
from vireo.models.attention import packed_rows, use_varlen
from vireo.models.heads import Entropy, Softmax, token_logprobs


class Policy(nn.Module):
    """Wraps a model (`self.hf`) so that everything a rank computes happens inside one forward.

    Sharded parameters are gathered by the forward of the outermost module; a vision tower or a head
    called from outside it would see shards.
    """

    hf: Any  # a transformers model with `model` and `lm_head`

    def __init__(self, hf: nn.Module, family: Family, dummy: dict[str, Tensor] | None):
        super().__init__()
        self.hf, self.family = hf, family
        use_varlen(hf, family)
        align_gated(hf)
        self.dummy = dummy  # one smallest image, for micro-batches without images
        self._nothing: Tensor | None = None
        if dummy is not None and not family.remote:
            self.hf.get_input_embeddings().register_forward_hook(self._add_nothing)

    def forward(
        self, inputs: dict[str, Tensor], softmax: Softmax | None = None, entropy: Entropy = False
    ) -> Tensor:
        """log p of every supervised token, float32 [N], in reading order of `labels`; with
        `entropy` [2, N] (see `token_logprobs`).

        `inputs` is `Batch.pack()` or `Batch.pad()`; `softmax` the distribution that p is of, if not
        the model's own. The tower runs in every micro-batch of a vision
        family: without images it sees a blank one whose output, times zero, is added to the token
        embeddings, where an image's would go. So all ranks run the same collectives in the same
        order, forward and backward (with frozen embeddings too, where only images lead from the
        language model to what trains), and no result depends on which rank had images.
        """
        model_inputs = {n: v for n, v in inputs.items() if n not in TRAINER_KEYS}
        positions, lengths = inputs["positions"], inputs.get("lengths")
        if "attention_mask" in inputs and self.family.positions == "mrope":
            positions = positions[1:]  # the text row is only for packed boundaries
        elif self.family.positions == "1d":
            positions = positions[0]
        model_inputs["position_ids"] = positions
        if self.dummy is not None and "pixel_values" not in inputs:
            dummy = {n: v.to(positions.device) for n, v in self.dummy.items()}
            if self.family.remote:
                model_inputs = with_blank(model_inputs, dummy)
            else:
                self._nothing = 0.0 * self._dummy_features(dummy)
        if self.family.remote:
            model_inputs = self._embedded(model_inputs)
        with packed_rows(None if lengths is None else lengths.tolist(), positions.device):
            out = self._language.model(**model_inputs, use_cache=False)
        rows, columns = (inputs["labels"] != IGNORE).nonzero(as_tuple=True)
        targets = inputs["labels"][rows, columns]
        head, text = self._language.lm_head, self._language.config.get_text_config()
        softcap = getattr(text, "final_logit_softcapping", None)
        hidden_NH = out.last_hidden_state[rows, columns - 1]
        return token_logprobs(hidden_NH, head, targets, softcap, softmax, entropy)

    @torch.no_grad()
    def generate(self, **options: Any) -> Tensor:
        """`transformers`' own generation, inside the outermost module (see the class)."""
        if not self.family.remote:
            return self.hf.generate(**options)
        names = ("input_ids", "attention_mask", *self.family.keys)
        inputs = {name: options.pop(name) for name in names if name in options}
        new = self.hf.llm.generate(**self._embedded(inputs), **options)
        return torch.cat([inputs["input_ids"], new], dim=1)

    @property
    def _language(self) -> Any:
        """The model with `model` and `lm_head`."""
        return self.hf.llm if self.family.remote else self.hf

    def _embedded(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Inputs of the language model, by the code that a checkpoint brings along: what its
        `forward` does before."""
        embeddings, _ = self.hf.get_vllm_embedding(nest(inputs))
        kept = {n: v for n, v in inputs.items() if n in ("attention_mask", "position_ids")}
        return {"inputs_embeds": embeddings, **kept}

    def _add_nothing(self, _module: nn.Module, _inputs: Any, embeddings: Tensor) -> Tensor:
        nothing, self._nothing = self._nothing, None
        return embeddings if nothing is None else embeddings + nothing

    def _dummy_features(self, images: dict[str, Tensor]) -> Tensor:
        out = self.hf.model.get_image_features(**images)
        # All that reaches the language model: some towers show it more than their last layer.
        shown = [out.pooler_output, getattr(out, "deepstack_features", None)]
        return torch.stack([t.float().sum() for t in _tensors(shown)]).sum()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in _tensors(part)]
    return [] if value is None else [value]
