"""Tiny checkpoints, renderers and conversations for the tests of the data path."""

from __future__ import annotations

import atexit
import json
import re
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
import transformers

from vireo import families
from vireo.data.conversation import Conversation, Image, ImageRef, Text, Turn
from vireo.data.ragged import IGNORE, Example
from vireo.data.render import Renderer
from vireo.families.tiny import build
from vireo.models.policy import Policy

torch.set_num_threads(1)
# Those with a tiny checkpoint: not the ones whose code is a part of theirs.
FAMILIES = {name: family for name, family in families.FAMILIES.items() if not family.remote}


@cache
def scratch() -> Path:
    """A folder of this process, gone when it ends."""
    folder = tempfile.mkdtemp(prefix="tiny-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@cache
def tiny(family: str) -> str:
    """The folder of a family's tiny checkpoint, built once per process."""
    return str(build(family, scratch() / family, size="test"))


def with_template(family: str, template: str, name: str, tokens: tuple[str, ...] = ()) -> str:
    """A copy of a tiny checkpoint with another chat template and more control tokens."""
    out = scratch() / f"with-{name}"
    shutil.copytree(tiny(family), out)
    if tokens:
        loaded = transformers.AutoTokenizer.from_pretrained(tiny(family))
        loaded.add_tokens(list(tokens), special_tokens=True)
        loaded.save_pretrained(out)
    (out / "chat_template.jinja").write_text(template)
    return str(out)


@cache
def with_newline_runs(family: str) -> str:
    """A copy of a tiny checkpoint whose tokenizer, as the published ones, joins line ends.

    It reads "\\n\\n" as one token, so a prompt's end and an answer's start can melt into one.
    """
    out = scratch() / f"{family}-newlines"
    shutil.copytree(tiny(family), out)
    file = out / "tokenizer.json"
    data = json.loads(file.read_text())
    vocab = data["model"]["vocab"]
    vocab |= {"ĊĊ": len(vocab), "ĊĊĊ": len(vocab) + 1}  # Ċ stands for the byte 10
    data["model"]["merges"] += [["Ċ", "Ċ"], ["ĊĊ", "Ċ"]]
    for token in data["added_tokens"]:
        token["id"] += 2  # control tokens stand behind the words
    file.write_text(json.dumps(data))
    return str(out)


@cache
def renderer(family: str, **options: Any) -> Renderer:
    return Renderer(tiny(family), **options)


@cache
def policy(family: str, scale: float = 1.0) -> Policy:
    """The tiny model in evaluation, every weight matrix times `scale`.

    A fresh tiny model hardly looks at positions; with larger weights a wrong one shows.
    """
    made = renderer(family)
    auto = getattr(transformers, made.family.auto_class)
    hf = auto.from_pretrained(tiny(family)).eval()
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.dim() > 1:
                parameter *= scale
    return Policy(hf, made.family, made.dummy() if made.family.has_vision else None)


# -- conversations -------------------------------------------------------------------------------


def turn(role: Any, *parts: str | int, **options: Any) -> Turn:
    """Text for a string, an image slot for a number."""
    made = tuple(Text(part) if isinstance(part, str) else Image(part) for part in parts)
    return Turn(role, made, **options)


def user(*parts: str | int) -> Turn:
    return turn("user", *parts)


def assistant(*parts: str | int) -> Turn:
    return turn("assistant", *parts)


def row(*turns: Turn, images: Any = (), **options: Any) -> Conversation:
    return Conversation(turns, tuple(images), **options)


def noise(width: int, height: int, seed: int = 0) -> ImageRef:
    pixels = np.random.RandomState(seed).randint(0, 255, (height, width, 3), dtype=np.uint8)
    return ImageRef(PIL.Image.fromarray(pixels))


CAT = (
    user(0, "What is it?"),
    assistant("A cat."),
    user("Sure?"),
    assistant("Yes."),
)


# -- how a family writes a conversation ----------------------------------------------------------

LLAMA_TURN = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


@dataclass(frozen=True)
class Style:
    """What the tiny checkpoint of a family writes round turns, and in a slot."""

    turn: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")  # control tokens of a turn, each once
    start: str = ""
    opening: str = "<|im_start|>{role}\n"
    end: str = "<|im_end|>"
    after: str = "\n"
    slot: tuple[str, ...] = ()  # control tokens of an image, each once

    def chat(self, *turns: tuple[str, str]) -> str:
        """The text of (role, text) turns, with what carries loss in «»."""
        text = self.start
        for role, said in turns:
            said += self.end
            said = f"«{said}»" if role == "assistant" else said
            text += self.opening.format(role=role) + said + self.after
        return text


LLAMA = Style(
    turn=LLAMA_TURN,
    start="<|begin_of_text|>",
    opening="<|start_header_id|>{role}<|end_header_id|>\n\n",
    end="<|eot_id|>",
    after="",
)
QWEN_VL = Style(slot=("<|vision_start|>", "<|vision_end|>"))
STYLES = {
    "qwen2_vl": QWEN_VL,
    "qwen2_5_vl": QWEN_VL,
    "qwen3": Style(),
    "qwen3_moe": Style(),
    "qwen3_vl": QWEN_VL,
    "qwen3_vl_moe": QWEN_VL,
    "llama": LLAMA,
    "mllama": replace(LLAMA, slot=("<|image|>",)),
    "minicpmv4_6": Style(slot=("<image_id>", "</image_id>", "<image>", "</image>")),
}

# What processors make of one placeholder, slices of a large image included.
SLOT = re.compile(
    r"(<image_id>\d+</image_id>)?<image>(<\|image_pad\|>)+</image>"
    r"(\n?<slice>(<\|image_pad\|>)+</slice>)*|(<\|image_pad\|>)+"
)


# -- what an example says ------------------------------------------------------------------------


def runs(made: Renderer, example: Example) -> list[str]:
    """The text of each run of tokens that carry loss."""
    return [text for text, loss in _pieces(made, example) if loss]


def marked(made: Renderer, example: Example) -> str:
    """The whole text with its supervised runs in «», each image as its placeholder."""
    text = "".join(f"«{text}»" if loss else text for text, loss in _pieces(made, example))
    return SLOT.sub("<|image_pad|>", text)


def controls(made: Renderer, example: Example) -> dict[str, int]:
    """How often each control token stands in the ids, as an id."""
    counts = Counter(example.fields["input_ids"].tolist())
    special = {i: t.content for i, t in made.tokenizer.added_tokens_decoder.items() if t.special}
    return {text: counts[i] for i, text in special.items() if counts[i]}


def _pieces(made: Renderer, example: Example) -> list[tuple[str, bool]]:
    ids, labels = example.fields["input_ids"], example.fields["labels"]
    loss = (labels != IGNORE).tolist()
    assert torch.equal(labels[labels != IGNORE], ids[labels != IGNORE])
    edges = [0, *(i for i in range(1, len(ids)) if loss[i] != loss[i - 1]), len(ids)]
    return [(made.tokenizer.decode(ids[a:b]), loss[a]) for a, b in pairwise(edges)]
