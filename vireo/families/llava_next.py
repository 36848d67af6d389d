"""LLaVA-NeXT (LLaVA 1.6): as LLaVA 1.5, with crops of an image beside the whole of it."""

from dataclasses import replace

from vireo.families import llava
from vireo.families.entry import Key

FAMILY = replace(
    llava.FAMILY,
    name="llava_next",
    vision_layers=("CLIPEncoderLayer",),
    parts={
        **llava.FAMILY.parts,
        "projector": ("model.multi_modal_projector", "model.image_newline"),
    },
    keys={
        "pixel_values": Key("packed"),  # [images, most crops, 3, height, width]
        "image_sizes": Key("packed"),  # [images, 2], of which the model counts the crops
    },
    forms={"embedded": "ids", "sglang": "text", "vllm": "ids"},
    refused={},
    limits=llava.FAMILY.limits[:1],
)
