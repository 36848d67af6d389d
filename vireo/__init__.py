"""Vireo: post-training for vision-language models on Hugging Face models with PyTorch FSDP2."""

__version__ = "0.1.0"
