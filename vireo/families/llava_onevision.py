"""LLaVA-OneVision: as LLaVA-NeXT, with a SigLIP tower; only an image alone in its row has crops."""

from dataclasses import replace

from vireo.families import llava_next
from vireo.families.entry import Key

FAMILY = replace(
    llava_next.FAMILY,
    name="llava_onevision",
    decoder_layers=("Qwen2DecoderLayer",),
    vision_layers=("SiglipEncoderLayer",),
    keys={
        **llava_next.FAMILY.keys,
        "batch_num_images": Key("packed"),  # [rows with images]
    },
    image_tokens=("<image>", "<video>"),
    limits=(
        *llava_next.FAMILY.limits,
        "Several images in a row are padded to squares and have no crops.",
        "The published chat template puts a space behind 'assistant' in finished turns, but not in "
        "prompts: here it is left out of both.",
    ),
)
