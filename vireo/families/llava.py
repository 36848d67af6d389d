"""LLaVA 1.5: a CLIP tower (SigLIP in LLaVA-Interleave), a projector of two layers, a decoder."""

from vireo.families.entry import Family, Key

FAMILY = Family(
    name="llava",
    auto_class="AutoModelForImageTextToText",
    decoder_layers=(
        *("LlamaDecoderLayer", "MistralDecoderLayer"),
        *("Qwen2DecoderLayer", "Qwen3DecoderLayer"),
    ),
    vision_layers=("CLIPEncoderLayer", "SiglipEncoderLayer"),
    parts={
        "vision": ("model.vision_tower",),
        "projector": ("model.multi_modal_projector",),
        "language": ("model.language_model",),
        "embeddings": ("model.language_model.embed_tokens",),
        "head": ("lm_head",),
    },
    keys={"pixel_values": Key("packed")},  # [images, 3, height, width]
    placeholder="<image>",
    image_tokens=("<image>",),
    varlen=("language",),
    # Both belong to the tower's own summary of an image, which the language model never sees.
    unused=("model.vision_tower.post_layernorm", "model.vision_tower.head"),
    tower_layers="model.vision_tower.encoder.layers",
    forms={"embedded": "ids", "vllm": "ids"},
    refused={"sglang": "SGLang shows such a model the first image of a request alone"},
    limits=(
        "The published chat templates write the images of a turn before its text.",
        "Pixtral, which has the same model type and a processor of its own, is not supported.",
    ),
)
