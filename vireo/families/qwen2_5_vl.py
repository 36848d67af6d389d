"""Qwen2.5-VL: as Qwen2-VL, with windowed attention and a gated MLP in the vision tower."""

from dataclasses import replace

from vireo.families import qwen2_vl

FAMILY = replace(
    qwen2_vl.FAMILY,
    name="qwen2_5_vl",
    decoder_layers=("Qwen2_5_VLDecoderLayer",),
    vision_layers=("Qwen2_5_VLVisionBlock",),
    layer_aliases=(),
)
