"""A byte-level BPE tokenizer made from scratch, offline, in a few milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vireo.families.tiny.corpus import TEXT


@dataclass(frozen=True)
class Tokens:
    """The control tokens of a family's tokenizer."""

    special: tuple[str, ...]  # all of them, in the order of their ids
    end_of_turn: str
    end_of_text: str  # it pads, too
    start_of_text: str | None = None  # put before any text, unless told not to
    # Names by which a processor asks its tokenizer for tokens, as in `tokenizer.image_token`.
    named: dict[str, str] = field(default_factory=dict)


CHATML = Tokens(
    special=(
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ),
    end_of_turn="<|im_end|>",
    end_of_text="<|endoftext|>",
)
LLAMA = Tokens(
    special=(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
    ),
    end_of_turn="<|eot_id|>",
    end_of_text="<|end_of_text|>",
    start_of_text="<|begin_of_text|>",
)

VOCAB_SIZE = 380  # 256 bytes, merges, and the control tokens
# Published checkpoints pad the embedding too: ids without a token exist and must not be sampled.
EMBEDDING_SIZE = 384

# How the Qwen2 tokenizers cut text into words: one digit a word, a space joins the next word.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_tokenizer(chat_template: str, max_length: int, tokens: Tokens = CHATML) -> Any:
    """A `PreTrainedTokenizerFast` that encodes any text losslessly (no normaliser, 256 bytes).

    The special tokens stand last, as in the published vocabularies.
    """
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXT.splitlines(keepends=True),
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE - len(tokens.special),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in tokens.special])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the training text is too short"
    start = tokens.start_of_text
    if start is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", special_tokens=[(start, tokenizer.token_to_id(start))]
        )
    first = {start, tokens.end_of_text} if start is not None else {tokens.end_of_text}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **({"bos_token": start} if start is not None else {}),
        eos_token=tokens.end_of_turn,
        pad_token=tokens.end_of_text,
        additional_special_tokens=[t for t in tokens.special if t not in first],
        **({"extra_special_tokens": tokens.named} if tokens.named else {}),
        chat_template=chat_template,
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
