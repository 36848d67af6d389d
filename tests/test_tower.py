"""Images through the tower one at a time."""

from __future__ import annotations

import pytest
import torch

from tests.tiny_models import noise, policy, renderer, row, user
from vireo.data.ragged import Batch
from vireo.errors import InputError
from vireo.models.tower import image_by_image
from vireo.rl.score import score

WITH_GRIDS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


def given(family: str, *sizes: tuple[int, int]) -> dict[str, torch.Tensor]:
    images = [noise(*size, seed=i) for i, size in enumerate(sizes)]
    prompt = renderer(family).rollout(row(user(*range(len(images)), "What?"), images=images))
    inputs = Batch.of([prompt.example]).pack()
    return {n: inputs[n] for n in ("pixel_values", "image_grid_thw")}


@pytest.mark.parametrize("family", WITH_GRIDS)
def test_what_the_tower_makes_of_an_image_does_not_depend_on_others(family: str) -> None:
    model = policy(family).hf.model
    sizes = (56, 56), (84, 56), (112, 84)
    before = model.get_image_features(**given(family, *sizes))
    with torch.no_grad(), image_by_image(policy(family)):
        parted = model.get_image_features(**given(family, *sizes))
        alone = model.get_image_features(**given(family, sizes[0]))
    assert parted.pooler_output[0].equal(alone.pooler_output[0])
    layers = zip(
        getattr(parted, "deepstack_features", None) or [],
        getattr(alone, "deepstack_features", None) or [],
        strict=True,
    )
    assert all(one[0].equal(other[0]) for one, other in layers)
    for one, other in zip(parted.pooler_output, before.pooler_output, strict=True):
        assert (one - other).abs().max() <= 1e-5
    again = model.get_image_features(**given(family, *sizes))  # the model is as it was
    assert "get_image_features" not in vars(model)
    assert len(again.pooler_output) == len(sizes)


@pytest.mark.parametrize("family", WITH_GRIDS)
def test_responses_are_scored_as_with_all_images_at_once(family: str) -> None:
    from tests.ranks.mismatch import pairs

    some = pairs(renderer(family))
    together = score(policy(family), renderer(family), some)
    with image_by_image(policy(family)):
        parted = score(policy(family), renderer(family), some)
    assert (torch.cat(together) - torch.cat(parted)).abs().max() <= 1e-5


def test_images_without_a_grid_cannot_be_parted() -> None:
    with pytest.raises(InputError, match="gemma3"), image_by_image(policy("gemma3")):
        pass
