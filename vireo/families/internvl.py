"""InternVL (2.5, 3, 3.5): images in tiles, merged 4 to 1, before a Qwen or Llama decoder."""

from vireo.families.entry import Family, Key

FAMILY = Family(
    name="internvl",
    auto_class="AutoModelForImageTextToText",
    decoder_layers=(
        "Qwen2DecoderLayer",
        "Qwen3DecoderLayer",
        "Qwen3MoeDecoderLayer",
        "LlamaDecoderLayer",
    ),
    vision_layers=("InternVLVisionLayer",),
    parts={
        "vision": ("model.vision_tower",),
        "projector": ("model.multi_modal_projector",),
        "language": ("model.language_model",),
        "embeddings": ("model.language_model.embed_tokens",),
        "head": ("lm_head",),
    },
    keys={"pixel_values": Key("packed")},  # [tiles of all images, 3, height, width]
    placeholder="<IMG_CONTEXT>",
    image_tokens=("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
    varlen=("language",),
    forms={"embedded": "ids", "sglang": "text", "vllm": "ids"},
    tower_layers="model.vision_tower.encoder.layer",
)
