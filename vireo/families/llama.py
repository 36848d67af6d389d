"""Llama 3: text only."""

from vireo.families.entry import Family

FAMILY = Family(
    name="llama",
    auto_class="AutoModelForCausalLM",
    decoder_layers=("LlamaDecoderLayer",),
    parts={
        "language": ("model",),
        "embeddings": ("model.embed_tokens",),
        "head": ("lm_head",),
    },
    varlen=("language",),
)
