"""Qwen3-VL with experts: the tower and positions of Qwen3-VL, the language model of Qwen3-MoE."""

from dataclasses import replace

from vireo.families import qwen3_moe, qwen3_vl

FAMILY = replace(
    qwen3_vl.FAMILY,
    name="qwen3_vl_moe",
    decoder_layers=("Qwen3VLMoeTextDecoderLayer",),
    vision_layers=("Qwen3VLMoeVisionBlock",),
    limits=qwen3_moe.FAMILY.limits,
)
