"""What one model family needs to say about itself: data only, imported by everything above.

A family's entry holds names (of layers, parts, processor keys) and yes/no answers; it has no code
that runs a model and imports nothing of Vireo.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Key:
    """How one key of a processor's output behaves when rows are joined.

    token:  one value a token, shape [T]; joined along the tokens, padded with `fill`
    packed: rows of any length along `dim`, shape [n, ...]; joined along `dim`, never padded
    padded: one tensor a row, shapes differ; padded to the largest with `fill`, then stacked
    """

    kind: Literal["token", "packed", "padded"]
    fill: int | float = 0
    dim: int = 0


@dataclass(frozen=True)
class Family:
    """One model family (`name` is the `model_type` of config.json)."""

    name: str
    auto_class: str  # a transformers Auto class that loads it, e.g. AutoModelForImageTextToText
    decoder_layers: tuple[str, ...]  # class names, sharded and recomputed one by one
    vision_layers: tuple[str, ...] = ()
    # Names of an older layout, seen in published commands, that mean this family's decoder layer.
    layer_aliases: tuple[str, ...] = ()
    # Module paths in memory of each part: vision, projector, language, embeddings, head.
    # The longest matching path wins, so a projector may live inside the tower.
    parts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # Processor outputs besides input_ids and attention_mask.
    keys: dict[str, Key] = field(default_factory=dict)
    placeholder: str | None = None  # what the chat template writes for one image
    # Tokens that only the processor may write: banned in sampling, plain text when typed.
    image_tokens: tuple[str, ...] = ()
    positions: Literal["1d", "mrope"] = "1d"
    can_pack: bool = True
    can_mix: bool = True  # text-only rows and image rows in one micro-batch

    @property
    def has_vision(self) -> bool:
        return bool(self.vision_layers)
