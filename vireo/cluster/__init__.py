"""Runs on several GPUs and machines, placed by Ray: the only room that imports it."""
