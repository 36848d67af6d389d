"""Reinforcement learning: what is computed of samples."""
