"""MiniCPM-V 4.0 and 4.5: images in slices, of 64 tokens each, by code in the checkpoint itself."""

from vireo.families.entry import Family, Key

FAMILY = Family(
    name="minicpmv",
    auto_class="AutoModel",
    remote=True,
    decoder_layers=("LlamaDecoderLayer", "Qwen3DecoderLayer"),  # of 4.0, of 4.5
    vision_layers=("SiglipEncoderLayer",),
    parts={
        "vision": ("vpm",),
        "projector": ("resampler",),
        "language": ("llm",),
        "embeddings": ("llm.model.embed_tokens",),
        "head": ("llm.lm_head",),
    },
    keys={
        "pixel_values": Key("packed", dim=-1),  # [3, 14, patches * 14]
        "tgt_sizes": Key("packed"),  # [slices, 2]
        "image_bound": Key("token"),  # the number of the slice a token is of, from 1
    },
    placeholder="(<image>./</image>)",
    written="(<image>./</image>)\n",
    image_tokens=(
        "<unk>",
        "<image>",
        "</image>",
        "<slice>",
        "</slice>",
        "<image_id>",
        "</image_id>",
    ),
    forms={"embedded": "text", "sglang": "text", "vllm": "text"},
    can_pack=False,  # its forward takes slices by their places in a row
    limits=(
        "Not run on a published checkpoint: tested with a stand-in that has the same inputs and "
        "outputs.",
        "Its checkpoint brings its own code, which runs with --trust_remote_code alone.",
        "Rows are padded: its code knows the tokens of an image by their places in a row.",
    ),
)
