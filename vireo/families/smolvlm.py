"""SmolVLM: tiles of a picture beside the whole of it, shuffled to fewer tokens, before a Llama."""

from vireo.families.entry import Family, Key

FAMILY = Family(
    name="smolvlm",
    auto_class="AutoModelForImageTextToText",
    decoder_layers=("LlamaDecoderLayer",),
    vision_layers=("SmolVLMEncoderLayer",),
    parts={
        "vision": ("model.vision_model",),
        "projector": ("model.connector",),
        "language": ("model.text_model",),
        "embeddings": ("model.text_model.embed_tokens",),
        "head": ("lm_head",),
    },
    # The model takes tiles of zeros for padding and drops them.
    keys={
        "pixel_values": Key("packed", dim=1),  # [1, tiles, 3, height, width]
        "pixel_attention_mask": Key("packed", dim=1),  # [1, tiles, height, width]
    },
    placeholder="<image>",
    # Not in every checkpoint: some write where a tile stands, and <global-img>, as plain text.
    image_tokens=(
        "<image>",
        "<fake_token_around_image>",
        "<global-img>",
        *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    ),
    varlen=("language",),
    forms={"embedded": "ids", "sglang": "text", "vllm": "ids"},
    limits=(
        "A tile whose pixels are all exactly the processor's mean is taken for padding and refused "
        "by the model; with the published mean of 0.5 there is none.",
    ),
)
