"""Qwen3-VL: a patch-16 tower whose middle layers reach the language model too (DeepStack)."""

from dataclasses import replace

from vireo.families import qwen2_vl

FAMILY = replace(
    qwen2_vl.FAMILY,
    name="qwen3_vl",
    decoder_layers=("Qwen3VLTextDecoderLayer",),
    vision_layers=("Qwen3VLVisionBlock",),
    layer_aliases=(),
    parts={
        **qwen2_vl.FAMILY.parts,
        "projector": ("model.visual.merger", "model.visual.deepstack_merger_list"),
    },
)
