"""A vision-language model of an existing text model: a new vision tower and projector before it.

It is the usual start of pre-alignment. On text alone it computes what the text model computes; what
is new is random, and learns from images while the rest stands still.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from vireo.aside import written_aside
from vireo.data.render import Renderer
from vireo.errors import InputError, first_line
from vireo.families import Family, get_family
from vireo.families.graft import SIZES, builder_of
from vireo.hub import local_folder
from vireo.models.build import give_memory
from vireo.models.layout import save_as_published, some
from vireo.models.load import fill_from_checkpoint
from vireo.models.names import part_of
from vireo.parallel import alone

ROWS = 64  # rows of embeddings come in multiples of it, which GPUs multiply faster
GENERATION = "generation_config.json"

# The line end behind the last tag, which transformers drops, gives what follows a line of its own.
PRELUDE = r"""
{%- set with_images = namespace(messages=[]) -%}
{%- for message in messages -%}
  {%- set turn = namespace(message=message, text='') -%}
  {%- if message.content is defined and message.content is sequence
      and message.content is not string and message.content is not mapping -%}
    {%- for part in message.content -%}
      {%- if part.type == 'text' -%}
        {%- set turn.text = turn.text + part.text -%}
      {%- elif part.type in ['image', 'image_url'] -%}
        {%- set turn.text = turn.text + IMAGE -%}
      {%- else -%}
        {{- raise_exception('this chat template has no content part of type ' ~ part.type) -}}
      {%- endif -%}
    {%- endfor -%}
    {%- set turn.message = dict(message, content=turn.text) -%}
  {%- endif -%}
  {%- set with_images.messages = with_images.messages + [turn.message] -%}
{%- endfor -%}
{%- set messages = with_images.messages %}
""".lstrip()


@dataclass(frozen=True)
class Grafted:
    """What became of a text model: control tokens that it did not have, rows of its embeddings
    before and after, parameters of the tower and the projector."""

    folder: Path
    tokens: tuple[str, ...]
    rows: tuple[int, int]
    parameters: int


def graft(
    lm: str, family: str, out: str | Path, *, tower: str = "published", seed: int = 0
) -> Grafted:
    """Write a model of `family` to the new folder `out`, with the text model `lm` in it.

    lm: folder or Hub name. Its weights keep their values, in the type that its config names, its
        tokens their ids, and its chat template its text (see `with_images`).
    tower: "published", the size that people train with, or "demo", which a CPU can train.
    seed: of the random weights of tower and projector.
    InputError: a text model that the family does not take, that has no chat template, or whose
    tokenizer knows an image token as something else; `out` has files in it.
    """
    out = Path(out)
    if out.is_file() or (out.exists() and any(out.iterdir())):
        raise InputError(f"{out} is not empty; choose a new folder")
    try:
        builder = builder_of(family)
    except LookupError as error:
        raise InputError(f"--family {family}: {error}") from error
    if tower not in SIZES:
        raise InputError(f"--tower {tower}: expected {' or '.join(SIZES)}")
    entry, folder = get_family(family), local_folder(lm)
    text = _text_config(folder, entry, builder.TEXT)
    tokenizer, template = _tokenizer(folder)
    _check_tokens(folder, tokenizer, template, entry)
    known, rows = set(tokenizer.get_vocab()), text.vocab_size
    tokens = [AddedToken(t, special=True, normalized=False) for t in entry.image_tokens]
    tokenizer.add_tokens(tokens, special_tokens=True)
    weights = _text_weights(folder, text, entry)
    largest = max(tokenizer.convert_tokens_to_ids(list(entry.image_tokens)))
    if largest >= rows:
        text.vocab_size = -(-(largest + 1) // ROWS) * ROWS
        _enlarge(weights, text, entry)
    config, processor = builder.make(text, tokenizer, tower)
    processor.chat_template = tokenizer.chat_template = with_images(template, entry)
    hf = _whole(folder, config, weights, seed, entry)
    if not (Path(folder) / GENERATION).exists():
        hf.generation_config = GenerationConfig.from_model_config(text)
    with written_aside(out) as aside:
        save_as_published(hf)
        hf.save_pretrained(aside)
        processor.save_pretrained(aside)
        if (Path(folder) / GENERATION).exists():
            shutil.copy2(Path(folder) / GENERATION, aside)
        Renderer(str(aside))  # whatever training would refuse, it refuses here
    new = [p.numel() for name, p in hf.named_parameters() if _is_new(name, entry)]
    added = tuple(token for token in entry.image_tokens if token not in known)
    return Grafted(out, added, (rows, text.vocab_size), sum(new))


def with_images(template: str, family: Family) -> str:
    """A chat template that takes content as a list of parts too: before `template`, which follows
    as it is, such content becomes a string with the family's placeholder for each image."""
    return PRELUDE.replace("IMAGE", repr(family.placeholder)) + template


def _text_config(folder: str, family: Family, wanted: tuple[str, ...]) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        words = first_line(error)
        raise InputError(f"--lm {folder} is no model that can be read: {words}") from error
    if config.model_type not in wanted:
        raise InputError(
            f"--lm {folder} is a model of type {config.model_type!r}; {family.name} takes a text "
            f"model of type {', '.join(wanted)}"
        )
    config.name_or_path = ""  # it stands in the new config.json: a path of this machine
    return config


def _tokenizer(folder: str) -> tuple[Any, str]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        words = first_line(error)
        raise InputError(f"--lm {folder}: its tokenizer cannot be read: {words}") from error
    if not isinstance(tokenizer.chat_template, str):
        found = "several chat templates" if tokenizer.chat_template else "no chat template"
        raise InputError(
            f"--lm {folder} has {found}, expected one: put it beside the tokenizer as "
            "chat_template.jinja (a base model has none: take its instruct version)"
        )
    return tokenizer, tokenizer.chat_template


def _check_tokens(folder: str, tokenizer: Any, template: str, family: Family) -> None:
    """Raises InputError where an image token already means something else."""
    vocabulary = tokenizer.get_vocab()
    controls = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    roles = {getattr(tokenizer, name): name for name in names}
    for token in family.image_tokens:
        if token in vocabulary and token not in controls:
            what = f"is a word of its tokenizer (id {vocabulary[token]}), not a control token"
        elif token in roles:
            what = f"is its {roles[token]}: give its tokenizer another one"
        elif token in template:
            what = "stands in its chat template"
        else:
            continue
        raise InputError(f"--lm {folder}: {token}, which images need in {family.name}, {what}")


def _text_weights(folder: str, config: Any, family: Family) -> dict[str, Tensor]:
    """The text model's tensors by the names that they have in the family's models."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
    give_memory(model, model, "cpu")
    fill_from_checkpoint(model, folder, alone())
    (language,), (head,) = family.parts["language"], family.parts["head"]
    named = {}
    for name, value in model.state_dict().items():
        base, _, inner = name.partition(".")
        named[f"{language if base == model.base_model_prefix else head}.{inner}"] = value
    return named


def _enlarge(weights: dict[str, Tensor], text: Any, family: Family) -> None:
    """Give embeddings and head `text.vocab_size` rows; new ones are the mean of the old ones."""
    for part in ("embeddings", "head"):
        (path,) = family.parts[part]
        old = weights[f"{path}.weight"]
        mean = old.mean(0, dtype=torch.float32).to(old.dtype)
        more = mean.expand(text.vocab_size - len(old), -1)
        weights[f"{path}.weight"] = torch.cat([old, more])


def _whole(folder: str, config: Any, weights: dict[str, Tensor], seed: int, family: Family) -> Any:
    """The model with these weights; tower and projector get what transformers gives new ones.

    Raises InputError unless the weights are all that is not new.
    """
    dtype = next(iter(weights.values())).dtype
    with torch.device("meta"):
        hf = getattr(transformers, family.auto_class).from_config(config, dtype=dtype)
    give_memory(hf, hf, "cpu")
    try:
        lacking, extra = hf.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as error:  # shapes; its first line says nothing
        words = " ".join(str(error).split())[:300]
        raise InputError(f"--lm {folder} does not fit {family.name}: {words}") from error
    lost = [name for name in lacking if not _is_new(name, family)]
    if wrong := [*lost, *extra]:
        raise InputError(f"--lm {folder} does not fit {family.name}: {some(wrong)}")
    hf.tie_weights()
    for name, module in hf.named_modules():
        module._is_hf_initialized = not _is_new(name, family)
    with torch.random.fork_rng(devices=[]):  # the caller's random state is not ours to move
        torch.random.default_generator.manual_seed(seed)
        hf.initialize_weights()
    return hf


def _is_new(name: str, family: Family) -> bool:
    return part_of(name, family) in ("vision", "projector")
