"""Qwen2-VL: a patch-14 tower, 2x2 merged patches, M-RoPE positions."""

from vireo.families.entry import Family, Key

FAMILY = Family(
    name="qwen2_vl",
    auto_class="AutoModelForImageTextToText",
    decoder_layers=("Qwen2VLDecoderLayer",),
    vision_layers=("Qwen2VLVisionBlock",),
    # The language model was once a plain Qwen2; published wrap lists still say so.
    layer_aliases=("Qwen2DecoderLayer",),
    parts={
        "vision": ("model.visual",),
        "projector": ("model.visual.merger",),
        "language": ("model.language_model",),
        "embeddings": ("model.language_model.embed_tokens",),
        "head": ("lm_head",),
    },
    keys={
        "pixel_values": Key("packed"),  # [patches, 3 * 2 * 14 * 14]
        "image_grid_thw": Key("packed"),  # [images, 3]
        # Which tokens belong to an image; left out, positions are silently wrong.
        "mm_token_type_ids": Key("token", fill=0),
    },
    placeholder="<|vision_start|><|image_pad|><|vision_end|>",
    image_tokens=(
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ),
    positions="mrope",
    varlen=("language", "vision"),
    grid="image_grid_thw",
)
