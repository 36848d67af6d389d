"""A model without memory, and one forward of it: every matrix product that it computes, and every
byte that it keeps for the backward pass.

The modules are the real ones, on the meta device, so adapters, frozen parts and what autograd
saves are not told again here. Only what reads values is replaced: attention (see watch), and the
tower's own forward, whose layers are called one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vireo.errors import InputError, first_line
from vireo.families import FAMILIES, Family
from vireo.models.build import empty_policy, switch_cache_off
from vireo.models.lora import Lora, add_adapters
from vireo.models.names import freeze, part_of, plain_name, unused_paths
from vireo.plan.watch import NAME, Grid, Load, Trace, Watcher


class Shape:
    """A model without memory, frozen and adapted as a run would have it.

    `frozen` names parts, as `models.build.ModelSpec` has them. InputError: a family whose tower,
    experts or attention are not counted here, by name.
    """

    def __init__(self, config: Any, frozen: frozenset[str] = frozenset(), lora: Lora | None = None):
        self.family = _family(config)
        self.hf = empty_policy(config, self.family).hf
        switch_cache_off(self.hf.config)
        _check(self.hf, self.family)
        if lora is not None:
            add_adapters(self.hf, self.family, lora)
        else:
            freeze(self.hf, self.family, set(frozen))
        self.unused = unused_paths(self.hf, self.family)
        self.names = {id(m): plain_name(name) for name, m in self.hf.named_modules()}
        for module in self.hf.modules():
            if hasattr(getattr(module, "config", None), "_attn_implementation_internal"):
                module.config._attn_implementation_internal = NAME
        for parameter in self.hf.parameters():  # which FSDP casts; buffers stay as they are
            parameter.data = parameter.data.to(torch.bfloat16)

    def part(self, path: str) -> Any:
        return self.hf.get_submodule(self.family.parts[path][0])

    def trace(self, load: Load) -> Trace:
        """One forward of `load`, rows end to end."""
        with self._running(load) as watcher:
            seen = self._look(load) if load.grids or load.tiles else None
            hidden = self._read(load, seen)
            watcher.counting = False  # the head keeps a chunk at a time, and computes it again
            self.hf.lm_head(hidden[:, :1].expand(-1, load.supervised, -1))
        if not all(layer.attends for layer in watcher.trace.layers):
            raise InputError(f"{self.family.name}: attention of this family is not counted here")
        return watcher.trace

    def image_tokens(self, load: Load) -> int:
        """How many tokens of the language model the images of `load` become."""
        with self._running(load):
            return self._look(load).shape[:-1].numel()

    @contextmanager
    def _running(self, load: Load) -> Iterator[Watcher]:
        watcher = Watcher(self.hf, load, self.part_of, self.is_layer, self.wasted)
        try:
            with watcher.watching(), torch.enable_grad(), torch.device("meta"):
                yield watcher
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error):
                raise
            raise InputError(
                f"{self.family.name}: a forward of this model cannot be counted, because it looks "
                f"at values: {first_line(error)}"
            ) from error

    # -- the parts of a forward ------------------------------------------------------------------

    def _read(self, load: Load, seen: Tensor | None) -> Tensor:
        """The language model's last hidden states [1, T, H]; `seen` is what images became."""
        length = sum(load.rows)
        embeddings = self.hf.get_input_embeddings()(torch.empty(1, length, dtype=torch.long))
        if seen is not None and seen.requires_grad:
            embeddings = embeddings + seen.sum()
        places = torch.empty(1, length, dtype=torch.long)
        if self.family.positions == "mrope":
            places = places.expand(3, 1, length)
        return self.part("language")(
            inputs_embeds=embeddings,
            attention_mask=torch.empty(1, 1, 1, 1),  # a finished one, which nothing looks into
            position_ids=places,
            use_cache=False,
        ).last_hidden_state

    def _look(self, load: Load) -> Tensor:
        """What images become for the language model, [tokens, H]."""
        if self.family.grid is None:
            if load.grids or not load.tiles:
                raise InputError(f"{self.family.name}: images are counted in tiles, not grids")
            return self._look_at_tiles(load.tiles)
        if load.tiles:
            raise InputError(f"{self.family.name}: images are counted in grids, not tiles")
        return self._look_at_grids(load.grids)

    def _look_at_grids(self, grids: Sequence[Grid]) -> Tensor:
        tower, config = self.part("vision"), self.part("vision").config
        bounds = _bounds([h * w for t, h, w in grids for _ in range(t)])
        windowed = _bounds([n for grid in grids for n in windows(grid, config)])
        full = getattr(config, "fullatt_block_indexes", None)
        patches = sum(t * h * w for t, h, w in grids)
        size = config.in_channels if hasattr(config, "in_channels") else config.in_chans
        hidden = tower.patch_embed(
            torch.empty(patches, size * config.temporal_patch_size * config.patch_size**2)
        )
        angles = torch.empty(patches, hidden.shape[-1] // config.num_heads)  # float32
        deep = list(getattr(config, "deepstack_visual_indexes", ()))
        for i, block in enumerate(tower.blocks):
            bound = bounds if full is None or i in full else windowed
            hidden = block(hidden, cu_seqlens=bound, position_embeddings=(angles, angles))
            if i in deep:
                tower.deepstack_merger_list[deep.index(i)](hidden)
        return tower.merger(hidden)

    def _look_at_tiles(self, tiles: int) -> Tensor:
        config, tower = self.hf.config, self.part("vision")
        side = config.vision_config.image_size
        height, width = (side, side) if isinstance(side, int) else side
        pixels = torch.empty(tiles, 3, height, width, dtype=torch.bfloat16)
        states = tower(pixel_values=pixels, output_hidden_states=True).hidden_states
        shown = config.vision_feature_layer
        shown = [shown] if isinstance(shown, int) else shown
        features = torch.cat([states[layer] for layer in shown], dim=-1)
        if config.vision_feature_select_strategy == "default":
            features = features[:, 1:]
        projector = self.part("projector")
        wide = next(m.in_features for m in projector.modules() if isinstance(m, nn.Linear))
        return projector(features.reshape(tiles, -1, wide))  # neighbours are joined, or not

    def part_of(self, module: nn.Module) -> str:
        return part_of(self.names[id(module)], self.family) or "language"

    def wasted(self, module: nn.Module) -> bool:
        """Whether nothing reads what a module computes."""
        return f"{self.names[id(module)]}.".startswith(self.unused or ("\0",))

    def is_layer(self, module: nn.Module) -> bool:
        """Whether a module is sharded by itself."""
        layers = {*self.family.decoder_layers, *self.family.vision_layers}
        return type(module).__name__ in layers


def windows(grid: Grid, config: Any) -> list[int]:
    """Patches of each window of an image, as Qwen2.5-VL (arXiv:2502.13923) cuts it: squares of
    `window_size` pixels, smaller at the right and lower edges, frame by frame."""
    t, h, w = grid
    merge = config.spatial_merge_size
    side = getattr(config, "window_size", 0) // merge // config.patch_size
    if not side:
        return [h * w] * t

    def cut(length: int) -> list[int]:
        return [min(side, length - at) for at in range(0, length, side)]

    return [
        rows * columns * merge**2 for rows in cut(h // merge) for columns in cut(w // merge)
    ] * t


def _bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device="cpu").cumsum(0).int()


def _family(config: Any) -> Family:
    """The entry of a family, or one of any text model that has `model`, its layers, and a head."""
    known = FAMILIES.get(config.model_type)
    if known is not None and not known.remote:
        return known
    import transformers

    if known is not None or type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise InputError(f"{config.model_type}: the tower of this family is not counted here")
    with torch.device("meta"):
        hf: Any = transformers.AutoModelForCausalLM.from_config(config)
    if not all(hasattr(hf, name) for name in ("model", "lm_head")) or not hasattr(
        hf.model, "layers"
    ):
        raise InputError(f"{config.model_type}: the layers of this family are not counted here")
    layers = tuple({type(layer).__name__ for layer in hf.model.layers})
    paths = (("language", "model"), ("embeddings", "model.embed_tokens"), ("head", "lm_head"))
    parts: dict[str, tuple[str, ...]] = {part: (path,) for part, path in paths}
    return Family(config.model_type, "AutoModelForCausalLM", layers, parts=parts)


def _check(hf: Any, family: Family) -> None:
    """InputError for what would be left out of the count without a word."""
    if family.has_vision and not (family.can_pack and "language" in family.varlen):
        raise InputError(f"{family.name}: attention of this family is not counted here")
    modules = dict(hf.named_modules())
    if family.has_vision:
        tower = modules.get(family.parts["vision"][0])
        wanted = ("patch_embed", "blocks", "merger") if family.grid else ()
        whole = family.parts["projector"][0] in modules and all(hasattr(tower, n) for n in wanted)
        if not whole or not (family.grid or hasattr(hf.config, "vision_feature_layer")):
            raise InputError(f"{family.name}: the tower of this family is not counted here")
    for path, module in modules.items():
        if isinstance(module, (nn.Linear, nn.Embedding, nn.Conv2d, nn.Conv3d)):
            continue
        for own, parameter in module.named_parameters(recurse=False):
            # Of two dimensions and more a weight is multiplied with, save what is added.
            if parameter.squeeze().dim() > 1 and "embed" not in own:
                raise InputError(
                    f"{family.name}: what {path}.{own} {tuple(parameter.shape)} computes is not "
                    "counted here (experts, and attention of another kind)"
                )
