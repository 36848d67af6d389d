"""Qwen3-MoE: text only; a router sends each token to a few of many experts."""

from dataclasses import replace

from vireo.families import qwen3

FAMILY = replace(
    qwen3.FAMILY,
    name="qwen3_moe",
    decoder_layers=("Qwen3MoeDecoderLayer",),
    limits=(
        "LoRA reaches neither the experts, whose weights are fused in memory, nor the router.",
        "The router's balancing loss is not added, as in the family's own default.",
        "Every rank computes all experts on its own tokens: there is no expert parallelism.",
    ),
)
