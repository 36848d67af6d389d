"""Qwen3: text only."""

from vireo.families.entry import Family

FAMILY = Family(
    name="qwen3",
    auto_class="AutoModelForCausalLM",
    decoder_layers=("Qwen3DecoderLayer",),
    parts={
        "language": ("model",),
        "embeddings": ("model.embed_tokens",),
        "head": ("lm_head",),
    },
    varlen=("language",),
)
