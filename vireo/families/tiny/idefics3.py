"""A tiny Idefics3."""

from __future__ import annotations

from typing import Any

from vireo.families.idefics3 import FAMILY
from vireo.families.tiny.sizes import MAX_POSITIONS
from vireo.families.tiny.smolvlm import (
    END,
    TOKENS_PER_TILE,
    config_fields,
    image_options,
    spoken,
)
from vireo.families.tiny.tokenizer import Tokens, make_tokenizer

START = "<|begin_of_text|>"
TOKENS = Tokens(
    special=(START, "<|end_of_text|>", *FAMILY.image_tokens, END),
    end_of_turn=END,
    end_of_text="<|end_of_text|>",
    start_of_text=START,
)


def make(text: dict, text_changes: dict, vision: dict, vision_changes: dict) -> tuple[Any, Any]:
    """The config and the processor. Pictures as in SmolVLM, tokens as in Llama 3."""
    from transformers import Idefics3Config, Idefics3ImageProcessor, Idefics3Processor
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig

    template = spoken(START)
    processor = Idefics3Processor(
        image_processor=Idefics3ImageProcessor(**image_options()),
        tokenizer=make_tokenizer(template, MAX_POSITIONS, TOKENS),
        image_seq_len=TOKENS_PER_TILE,
        chat_template=template,
    )
    fields = config_fields(
        processor.tokenizer, text, text_changes, vision, vision_changes, Idefics3VisionConfig
    )
    return Idefics3Config(**fields), processor
