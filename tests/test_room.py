"""How many rows are generated together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers

from tests.tiny_models import FAMILIES, tiny
from vireo.rollout.room import CPU_ROWS, MOST, rows_at_once

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def config(**changes: int) -> SimpleNamespace:
    sizes = {"num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2}
    sizes |= {"hidden_size": 2048, "intermediate_size": 11008, "vocab_size": 151_936}
    text = SimpleNamespace(**(sizes | changes))
    return SimpleNamespace(get_text_config=lambda: text)


def test_rows_of_a_3b_shape() -> None:
    # Numbers of a token: 2 x 36 layers x 2 heads x 128 = 18,432 are kept, and 4 x 2,048 +
    # 3 x 11,008 = 41,216 computed; 2 bytes each, 1,000 tokens: 119,296,000 bytes. Probabilities:
    # 16 x 151,936 = 2,430,976 bytes.
    row = 119_296_000 + 2_430_976
    assert rows_at_once(config(), 2, 1000, GPU, free=2 * 100 * row) == 100
    assert rows_at_once(config(), 2, 1000, GPU, free=2 * 100 * row - 2) == 99


def test_at_least_one_and_no_more_than_a_step_gains_from() -> None:
    assert rows_at_once(config(), 2, 1000, GPU, free=0) == 1
    assert rows_at_once(config(), 2, 10, GPU, free=10**12) == MOST
    assert rows_at_once(config(), 2, 1000, CPU) == CPU_ROWS


@pytest.mark.parametrize("name", FAMILIES)
def test_every_familys_sizes_are_read(name: str) -> None:
    made = transformers.AutoConfig.from_pretrained(tiny(name))
    assert 1 < rows_at_once(made, 4, 100, GPU, free=10**8) <= MOST
