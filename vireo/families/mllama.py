"""Llama-3.2-Vision: a tiled tower that some decoder layers attend to; one token an image."""

from vireo.families.entry import Family, Key

FAMILY = Family(
    name="mllama",
    auto_class="AutoModelForImageTextToText",
    decoder_layers=("MllamaSelfAttentionDecoderLayer", "MllamaCrossAttentionDecoderLayer"),
    vision_layers=("MllamaVisionEncoderLayer",),
    parts={
        "vision": ("model.vision_model",),
        "projector": ("model.multi_modal_projector",),
        "language": ("model.language_model",),
        "embeddings": ("model.language_model.embed_tokens",),
        "head": ("lm_head",),
    },
    keys={
        "pixel_values": Key("padded"),  # [images, tiles, 3, height, width]
        "aspect_ratio_ids": Key("padded"),  # [images]
        "aspect_ratio_mask": Key("padded"),  # [images, tiles]
        "cross_attention_mask": Key("token", dim=0, grow="last"),  # [T, images, tiles]
    },
    placeholder="<|image|>",
    expands=False,
    image_tokens=("<|image|>",),
    can_pack=False,
    # A token that nothing is shown to (all of a text row, and those before a row's first image)
    # attends to all images of the micro-batch's shape alike, so only rows with the same number of
    # images have the values that they have alone.
    can_mix=False,
    forms={"embedded": "ids", "sglang": "ids"},
    refused={"vllm": "vLLM has not had this model since 0.10.2"},
    limits=("Rows are padded: a token may attend to the images of every row of a sequence.",),
)
