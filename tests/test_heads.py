"""Log-probabilities from hidden states: right, and without ever holding full logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vireo.models import heads
from vireo.models.heads import Softmax, token_logprobs

POSITIONS, HIDDEN, VOCABULARY = 640, 8, 1000


class Largest(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operator makes."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.most = max([self.most, *sizes])
        return out


def parts() -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(POSITIONS, HIDDEN, requires_grad=True)
    targets = torch.randint(VOCABULARY, (POSITIONS,))
    return hidden, nn.Linear(HIDDEN, VOCABULARY, bias=False), targets


def run(hidden: torch.Tensor, head: nn.Linear, targets: torch.Tensor) -> list[torch.Tensor]:
    logprobs = token_logprobs(hidden, head, targets)
    logprobs.sum().backward()
    return [logprobs.detach(), hidden.grad, head.weight.grad]


@pytest.mark.parametrize("chunk", [64, 100, 640, 5000])
def test_values_and_gradients_are_those_of_full_logits(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "CHUNK", chunk)
    found = run(*parts())
    hidden, head, targets = parts()
    whole = head(hidden).log_softmax(-1)
    wanted = whole.gather(-1, targets[:, None])[:, 0]
    wanted.sum().backward()
    for one, other in zip(found, (wanted.detach(), hidden.grad, head.weight.grad)):
        assert (one - other).abs().max() < 1e-5 * other.abs().max().clamp(min=1)


def test_no_tensor_of_a_step_is_larger_than_a_chunk_of_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward and backward; the plain way has a tensor of all positions, which the count sees."""
    monkeypatch.setattr(heads, "CHUNK", 64)
    with Largest() as seen:
        run(*parts())
    assert seen.most == 64 * VOCABULARY
    with Largest() as seen:
        hidden, head, targets = parts()
        head(hidden).log_softmax(-1).gather(-1, targets[:, None]).sum().backward()
    assert seen.most == POSITIONS * VOCABULARY


def test_logits_of_one_chunk_at_a_time_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a chunk's logits waits for the backward pass: they are computed again."""
    monkeypatch.setattr(heads, "CHUNK", 64)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        token_logprobs(*parts())
    assert max(kept) < 64 * VOCABULARY


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_another_softmax_is_tempered_and_without_banned_tokens(
    temperature: float, softcap: float | None
) -> None:
    """By hand: softcap, then the ban, then the temperature, then a softmax over what is left."""
    torch.manual_seed(0)
    head = torch.nn.Linear(6, 9, bias=False)
    hidden, targets = torch.randn(5, 6, requires_grad=True), torch.tensor([0, 1, 4, 5, 8])
    got = token_logprobs(hidden, head, targets, softcap, Softmax(temperature, (7, 2)))
    logits = head(hidden)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    kept = [0, 1, 3, 4, 5, 6, 8]
    left = torch.log_softmax(logits[:, kept] / temperature, -1)
    expected = left[range(5), [kept.index(t) for t in targets.tolist()]]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    (gradient,) = torch.autograd.grad(got.sum(), hidden)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("banned", [(), (1, 7, 999)])
def test_entropies_and_their_gradients_are_those_of_full_logits(
    monkeypatch: pytest.MonkeyPatch, banned: tuple[int, ...], softcap: float | None
) -> None:
    monkeypatch.setattr(heads, "CHUNK", 100)
    hidden, head, targets = parts()
    targets[torch.isin(targets, torch.tensor(banned))] = 0
    softmax = Softmax(0.7, banned)
    both = token_logprobs(hidden, head, targets, softcap, softmax, entropy=True)
    alone = token_logprobs(hidden, head, targets, softcap, softmax)
    assert torch.equal(both[0], alone)
    both[1].sum().backward()
    gradients = hidden.grad, head.weight.grad
    hidden.grad = head.weight.grad = None
    logits = head(hidden)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    left = [i for i in range(VOCABULARY) if i not in banned]
    expected = torch.distributions.Categorical(logits=logits[:, left] / 0.7).entropy()
    expected.sum().backward()
    torch.testing.assert_close(both[1], expected, rtol=1e-5, atol=1e-5)
    for got, wanted in zip(gradients, (hidden.grad, head.weight.grad)):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
