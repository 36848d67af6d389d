"""How large the tiny models are, and how a test changes that."""

from __future__ import annotations

from typing import Any

MAX_POSITIONS = 4096
# About 1/sqrt(width), which the usual 0.02 is at a width of 2,000. At 0.02 a tiny model learns half
# as fast, and hardly notices wrong positions (by 3e-4 in a log-probability, against 1e-1 here), so
# that a test of them would prove nothing.
INITIALIZER_RANGE = 0.1

# Heads of 32 in the language model: the smallest that serving engines have kernels for.
TEXT: dict[str, dict[str, Any]] = {
    "demo": {
        "initializer_range": INITIALIZER_RANGE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "test": {
        "initializer_range": INITIALIZER_RANGE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}
VISION: dict[str, dict[str, Any]] = {
    "demo": {
        "initializer_range": INITIALIZER_RANGE,
        "hidden_size": 96,
        "intermediate_size": 192,
        "depth": 3,
        "num_heads": 4,
    },
    "test": {
        "initializer_range": INITIALIZER_RANGE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "depth": 2,
        "num_heads": 2,
    },
}


def override(defaults: dict[str, Any], changes: dict[str, Any], config_class: type) -> dict:
    """`defaults` with `changes`; TypeError for a name the config class does not have.

    Transformers keeps unknown fields without a word, so a misspelt one would change nothing.
    """
    for name in changes:
        if not hasattr(config_class, name):
            raise TypeError(f"{config_class.__name__} has no field {name!r}")
    return {**defaults, **changes}
