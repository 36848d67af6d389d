"""Gemma 3: a SigLIP tower pooled to a fixed number of tokens, which see each other both ways."""

from vireo.families.entry import Family, Key

FAMILY = Family(
    name="gemma3",
    auto_class="AutoModelForImageTextToText",
    decoder_layers=("Gemma3DecoderLayer",),
    vision_layers=("SiglipEncoderLayer",),
    parts={
        "vision": ("model.vision_tower",),
        "projector": ("model.multi_modal_projector",),
        "language": ("model.language_model",),
        "embeddings": ("model.language_model.embed_tokens",),
        "head": ("lm_head",),
    },
    keys={
        "pixel_values": Key("packed"),  # [images, 3, height, width]
        # Which tokens are an image's, and so see each other both ways.
        "token_type_ids": Key("token", fill=0),
    },
    placeholder="<start_of_image>",
    around=("\n\n", "\n\n"),
    image_tokens=("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    # Published models have no pooling head; a config may.
    unused=("model.vision_tower.head",),
    # What stands round an image joins the text beside it, so ids alone do not say what to expand.
    forms={"embedded": "text", "sglang": "text", "vllm": "text"},
    limits=("Every image is shown at one size: no crops are made (do_pan_and_scan).",),
)
