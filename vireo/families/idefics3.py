"""Idefics3, and the first SmolVLM models: as SmolVLM."""

from dataclasses import replace

from vireo.families import smolvlm

FAMILY = replace(smolvlm.FAMILY, name="idefics3", vision_layers=("Idefics3EncoderLayer",))
