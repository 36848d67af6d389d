"""The next token of every row of a batch, and its log-probability.

Shape legend: B rows, V words of the vocabulary, N tokens of the longest response.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vireo.rollout.sample import Request


class Sampler:
    """Draws as `Sampling` says, each row as if it were alone.

    A seeded row has its own random numbers, one for each place of its response: `starts` says how
    many tokens each row has already, so a response that goes on goes on as it would have. `top_p`
    keeps the fewest tokens that reach this share of the whole distribution, whatever `top_k` cuts
    off, as SGLang does.
    """

    def __init__(self, requests: Sequence[Request], starts: Sequence[int], device: torch.device):
        every = [request.sampling for request in requests]
        longest = max(sampling.max_new_tokens for sampling in every)
        numbers_BN = torch.zeros(len(every), longest, dtype=torch.float64)
        for numbers, sampling, start in zip(numbers_BN, every, starts):
            source = torch.Generator()
            source.seed() if sampling.seed is None else source.manual_seed(sampling.seed)
            most = sampling.max_new_tokens
            drawn = torch.rand(most, generator=source, dtype=torch.float64)
            numbers[: most - start] = drawn[start:]
        sets: dict[tuple[int, ...], int] = {}
        columns = {
            "numbers": numbers_BN,
            "banned": torch.tensor([sets.setdefault(r.banned, len(sets)) for r in requests]),
            "drawn": torch.tensor([s.temperature > 0 for s in every]),
            "temperature": torch.tensor([s.softmax_temperature for s in every]),
            "top_k": torch.tensor([s.top_k or torch.iinfo(torch.int64).max for s in every]),
        }
        # Of a whole distribution no token falls out, however its sum is rounded.
        shares = [s.top_p if s.top_p < 1 else 2.0 for s in every]
        columns["top_p"] = torch.tensor(shares, dtype=torch.float64)
        self._rows = {name: column.to(device) for name, column in columns.items()}
        self._sets, self._banned = list(sets), torch.empty(0)
        self._draws = any(s.temperature for s in every)
        self._cuts = any(s.top_p < 1 or s.top_k for s in every)
        self._step = 0

    def __call__(self, logits_BV: Tensor) -> tuple[Tensor, Tensor]:
        """(token, its log-probability in float32) of every row, [B] each."""
        logits_BV = logits_BV.float()
        if any(self._sets):
            if not self._step:
                self._banned = logits_BV.new_zeros(len(self._sets), logits_BV.shape[1]).bool()
                for banned_V, ids in zip(self._banned, self._sets):
                    banned_V[list(ids)] = True
            banned = self._banned if len(self._sets) == 1 else self._banned[self._rows["banned"]]
            logits_BV = logits_BV.masked_fill(banned, -torch.inf)
        logits_BV = logits_BV / self._rows["temperature"][:, None]
        tokens_B = logits_BV.argmax(-1)
        if self._draws:
            tokens_B = torch.where(self._rows["drawn"], self._drawn(logits_BV, tokens_B), tokens_B)
        self._step += 1
        chosen_B = logits_BV.gather(-1, tokens_B[:, None])[:, 0]
        return tokens_B, chosen_B - logits_BV.logsumexp(-1)

    def select(self, rows: Tensor) -> None:
        """Keep the rows at these places, in that order."""
        self._rows = {name: column.index_select(0, rows) for name, column in self._rows.items()}

    def _drawn(self, logits_BV: Tensor, likeliest_B: Tensor) -> Tensor:
        """The token at which the sum of probabilities passes the row's number."""
        p_BV = logits_BV.double().softmax(-1)
        if self._cuts:
            p_BV = self._cut(p_BV)
        sums_BV = p_BV.cumsum(-1)
        passed_B1 = self._rows["numbers"][:, self._step, None] * sums_BV[:, -1:]
        tokens_B1 = torch.searchsorted(sums_BV, passed_B1, right=True).clamp(max=p_BV.shape[1] - 1)
        # Sums are rounded: their last bit could name a token that has no probability.
        possible_B1 = p_BV.gather(-1, tokens_B1) > 0
        return torch.where(possible_B1, tokens_B1, likeliest_B[:, None])[:, 0]

    def _cut(self, p_BV: Tensor) -> Tensor:
        """Probabilities of the tokens that top-k and top-p keep, zero for the others."""
        sorted_BV, order_BV = torch.sort(p_BV, dim=-1, descending=True, stable=True)
        before_BV = sorted_BV.cumsum(-1) - sorted_BV
        rank_V = torch.arange(p_BV.shape[1], device=p_BV.device)
        kept_BV = before_BV < self._rows["top_p"][:, None]
        kept_BV &= rank_V < self._rows["top_k"][:, None]
        return torch.zeros_like(p_BV).scatter(-1, order_BV, sorted_BV * kept_BV)
