"""What one model family needs to say about itself: data only, imported by everything above.

A family's entry holds names (of layers, parts, processor keys) and yes/no answers; it has no code
that runs a model and imports nothing of Vireo.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Kind = Literal["token", "packed", "padded"]
Growth = Literal["fill", "last"]
Places = Literal["1d", "mrope"]
Form = Literal["ids", "text"]


@dataclass(frozen=True)
class Key:
    """How one key of a processor's output behaves when rows are joined.

    token:  values of each token, shape [..., T]; joined along the tokens, padded with `fill`
    packed: rows of any length along one dimension; joined along it, never padded there
    padded: one tensor a row, shapes differ; padded to the largest with `fill`, then stacked

    `dim` is the dimension of the tokens (None: the last) or of the join (None: the first). Rows of
    a packed key, and of a token key whose `dim` is given, may differ in the other dimensions too
    (images of a row, crops of an image): these are padded with `fill`. `grow`: what a token key has
    at the tokens of a response: `fill`, or what it has at the `last` token of the prompt.
    """

    kind: Kind
    fill: int | float = 0
    dim: int | None = None
    grow: Growth = "fill"

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"Key({self.kind!r}): expected one of {', '.join(get_args(Kind))}")

    @property
    def axis(self) -> int:
        """`dim`, or what it is by default."""
        if self.dim is not None:
            return self.dim
        return -1 if self.kind == "token" else 0


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
    # Where the chat template takes text alone: what is put into a turn's text for one image.
    written: str = ""
    expands: bool = True  # the processor puts more tokens in the place of a placeholder
    # Plain text that the processor writes round an expanded image: it joins its neighbours' tokens.
    around: tuple[str, str] = ("", "")
    # Tokens that only the processor may write: banned in sampling, plain text when typed.
    image_tokens: tuple[str, ...] = ()
    positions: Places = "1d"
    can_pack: bool = True
    can_mix: bool = True  # rows with different numbers of images (or none) in one micro-batch
    # Parts whose attention takes sequences of any lengths end to end (see models.attention);
    # the others compute transformers' own, with masks.
    varlen: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()  # module paths that no forward reaches: never trained
    # Its code is a part of the checkpoint, run with --trust_remote_code only. Its inputs are lists,
    # one a row (see data.nested), and its language model, which transformers has, is named `llm`.
    remote: bool = False
    # The tower's layers, by path, where `config.vision_feature_layer` says of which of them the
    # language model sees the output: those above it are never trained either.
    tower_layers: str | None = None
    # What each engine is sent beside the pictures: ids with one placeholder an image, which it
    # expands as the processor does (ids), or text (text). Engines not in `forms`: see `refused`.
    forms: Mapping[str, Form] = field(
        default_factory=lambda: {"embedded": "ids", "sglang": "ids", "vllm": "ids"}
    )
    refused: Mapping[str, str] = field(default_factory=dict)  # by engine, the reason
    # The processor's key of [images, (frames, rows, columns)] in patches, from which an image's
    # final size follows: an engine gets it at that size. None: engines get images as they are.
    grid: str | None = None
    limits: tuple[str, ...] = ()  # what a person should know, one sentence each, for the matrix

    def __post_init__(self) -> None:
        if self.positions not in get_args(Places):
            known = ", ".join(get_args(Places))
            raise ValueError(f"{self.name}: positions {self.positions!r}, expected one of {known}")

    @property
    def has_vision(self) -> bool:
        return bool(self.vision_layers)
