"""Each example's own positions, computed before rows are joined, by the family's own function."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from torch import Tensor

from vireo.families import Family


class Positions:
    """Positions [R, T] of one row: R = 1 (text) or 4 (M-RoPE: row 0 the text positions).

    Row 0 counts 0, 1, ... in every family: where it restarts in a packed sequence, transformers
    finds the boundary of a row. Rows 1 to 3 are the family's `get_rope_index`, run on a model of
    the same class without weights (it reads the config alone).
    """

    def __init__(self, config: Any, family: Family):
        self.index = None
        if family.positions == "mrope":
            auto = getattr(transformers, family.auto_class)
            with torch.device("meta"):
                model = auto.from_config(config)
            self.index = model.model.get_rope_index
            self.accepts = set(inspect.signature(self.index).parameters)

    def __call__(self, fields: dict[str, Tensor]) -> Tensor:
        ids = fields["input_ids"]
        text = torch.arange(ids.shape[-1])
        if self.index is None:
            return text[None]
        if "image_grid_thw" not in fields:
            return text.expand(4, -1).contiguous()
        extra = {n: v for n, v in fields.items() if n in self.accepts and n.endswith("grid_thw")}
        spatial, _ = self.index(
            ids[None], mm_token_type_ids=fields["mm_token_type_ids"][None], **extra
        )
        return torch.cat([text[None], spatial[:, 0].to(text.dtype)])
