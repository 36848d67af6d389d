"""A byte-level BPE tokenizer made from scratch, offline, in a few milliseconds."""

from __future__ import annotations

from typing import Any

from vireo.families.tiny.corpus import TEXT

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (
    END_OF_TEXT,
    TURN_START,
    TURN_END,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

VOCAB_SIZE = 380  # 256 bytes, 116 merges, 8 special tokens
# Published checkpoints pad the embedding too: ids without a token exist and must not be sampled.
EMBEDDING_SIZE = 384

# How the Qwen2 tokenizers cut text into words: one digit a word, a space joins the next word.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_tokenizer(chat_template: str, max_length: int) -> Any:
    """A `PreTrainedTokenizerFast` that encodes any text losslessly (no normaliser, 256 bytes).

    The special tokens stand last, as in the published vocabularies.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
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
            vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL_TOKENS])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the training text is too short"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        chat_template=chat_template,
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
