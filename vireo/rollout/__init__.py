"""Rollouts: prompts in, samples out, from an engine in the process or behind a server.

`VLMRolloutEngine` is the bridge that most code wants: `await engine.generate(images, prompt)`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["VLMRolloutEngine"]


def __getattr__(name: str) -> Any:  # torch is imported when it is needed
    if name in __all__:
        from vireo.rollout.bridge import VLMRolloutEngine

        return VLMRolloutEngine
    raise AttributeError(name)
