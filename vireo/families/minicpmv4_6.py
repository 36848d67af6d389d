"""MiniCPM-V 4.6: images in slices, merged 16 to 1, before a language model of linear attention."""

from vireo.families.entry import Family, Key

FAMILY = Family(
    name="minicpmv4_6",
    auto_class="AutoModelForImageTextToText",
    decoder_layers=("Qwen3_5DecoderLayer",),
    vision_layers=("MiniCPMV4_6VisionEncoderLayer", "MiniCPMV4_6ViTWindowAttentionMerger"),
    parts={
        "vision": ("model.vision_tower",),
        "projector": ("model.merger",),
        "language": ("model.language_model",),
        "embeddings": ("model.language_model.embed_tokens",),
        "head": ("lm_head",),
    },
    keys={
        "pixel_values": Key("packed", dim=-1),  # [1, 3, 14, patches * 14]
        "target_sizes": Key("packed"),  # [slices, 2]
    },
    placeholder="<|image_pad|>",
    image_tokens=(
        "<|image_pad|>",
        "<|video_pad|>",
        "<image>",
        "</image>",
        "<slice>",
        "</slice>",
        "<image_id>",
        "</image_id>",
    ),
    can_pack=False,
    forms={"embedded": "ids", "sglang": "text", "vllm": "ids"},
    limits=(
        "Rows are padded: the state of linear attention would leak from row to row.",
        "transformers 5.17 cannot run pictures of different sizes together; 5.12 and 5.19 can.",
    ),
)
