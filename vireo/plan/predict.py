"""What a run will need of each GPU, in memory and in time, before it is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vireo.errors import InputError
from vireo.plan.flops import Flops, of_products
from vireo.plan.gpus import Gpu
from vireo.plan.memory import Memory, fullest, recomputed, states
from vireo.plan.trace import Shape
from vireo.plan.watch import Load
from vireo.settings import Settings
from vireo.trainers.build import frozen_parts, lora_of

# What the matrix products of a step reach of the rate of large ones, with all that is none between
# them, and seconds of each micro-batch that do not grow with it (the processor starts some ten
# thousand kernels). Both from the rows of benchmarks/RESULTS.md of one H200, all of one model (see
# tests/test_plan.py).
SHARE, OVERHEAD_S = 0.50, 0.3


@dataclass(frozen=True)
class Rows:
    """The rows of a run, all alike: `tokens` of each, of which `supervised` carry loss (None: all
    that are not an image's), `images` squares of `image_size` pixels (where images are cut into
    tiles: `tiles` each)."""

    tokens: int
    images: int = 0
    image_size: int = 448
    tiles: int = 1
    supervised: int | None = None


@dataclass(frozen=True)
class Plan:
    """What was predicted of one GPU: memory at its fullest, work and seconds of an optimizer step.

    `again`: how many of `layers` decoder layers are recomputed, and operations of it, with the
    head's; `flops` are without them, as flops.step_flops has them.
    """

    gpu: Gpu
    weights: int
    trained: int
    rows: int
    micro_batches: int
    tokens: int
    supervised: int
    image_tokens: int
    again: int
    layers: int
    memory: Memory
    flops: Flops
    repeated: float
    seconds: float

    @property
    def fits(self) -> str:
        used = self.memory.total / (self.gpu.memory_gb * 1e9)
        return "fits" if used <= 0.9 else "fits barely" if used <= 1 else "does not fit"


def predict(config: Any, settings: Settings, gpu: Gpu, gpus: int, rows: Rows) -> Plan:
    """The plan of a run of `settings` on `gpus` of a kind.

    InputError: a model that is not counted (see flops), rows that the settings cannot run.
    """
    if not settings.fsdp.enable or settings.fsdp.mp_dtype == "fp32":
        raise InputError("a plan is of sharded runs in bf16: leave --fsdp_enable and the rest out")
    frozen = frozen_parts(settings)
    lora, _ = lora_of(settings.lora, frozen)
    shape = Shape(config, frozen, lora)
    one = _load(shape, rows, 1)
    image_tokens = shape.image_tokens(one) if rows.images else 0
    text = rows.tokens - image_tokens
    supervised = text - 1 if rows.supervised is None else rows.supervised
    if not 1 <= supervised < max(text, 1):
        raise InputError(
            f"a row has {rows.tokens} tokens (--max_length), {image_tokens} of them of images: "
            f"{supervised} cannot carry loss; raise --max_length, or lower --images, --image_size "
            "or --supervised"
        )
    in_step, at_once = _rows(settings, gpus, rows.tokens)
    trace = shape.trace(_load(shape, rows, at_once, supervised))
    if not trace.trained:
        raise InputError("every part of the model is frozen: nothing would be trained")

    micro_batches = -(-in_step // at_once)
    sharding = settings.fsdp.shard_size or 8 if settings.fsdp.sharding == "hybrid" else gpus
    held = states(trace, min(gpus, sharding), lora is not None)
    budget = (settings.batch.max_tokens_per_gpu or 0) / (at_once * rows.tokens)
    again = recomputed(trace, settings.fsdp.grad_ckpt, budget, gpu.memory_gb * 1e9, held)
    memory = fullest(trace, at_once * supervised, held, again, micro_batches)

    share = in_step / at_once  # of the trace's micro-batch
    flops = of_products(trace.products)
    for of in (flops.forward, flops.backward):
        of.update((part, share * n) for part, n in of.items())
    decoder = [layer for layer in trace.layers if not layer.vision]
    repeated = share * again * sum(layer.again for layer in decoder) / len(decoder)
    repeated += flops.forward["head"]
    seconds = (flops.total + repeated) / (gpu.rate * SHARE) + micro_batches * OVERHEAD_S
    return Plan(
        gpu=gpu,
        weights=trace.weights,
        trained=trace.trained,
        rows=in_step,
        micro_batches=micro_batches,
        tokens=in_step * rows.tokens,
        supervised=supervised,
        image_tokens=image_tokens,
        again=again,
        layers=len(decoder),
        memory=memory,
        flops=flops,
        repeated=repeated,
        seconds=seconds,
    )


def _load(shape: Shape, rows: Rows, count: int, supervised: int = 1) -> Load:
    """`count` rows."""
    images, lengths = count * rows.images, (rows.tokens,) * count
    if images and not shape.family.has_vision:
        raise InputError(f"{shape.family.name}: a text model has no images; leave --images out")
    if not images or shape.family.grid is None:
        return Load(lengths, count * supervised, tiles=images * rows.tiles)
    if rows.tiles != 1:
        raise InputError(
            f"{shape.family.name}: images have grids of patches, not tiles; give --image_size"
        )
    # To whole groups of merged patches, as the family's processor rounds.
    tower = shape.part("vision").config
    cell = tower.patch_size * tower.spatial_merge_size
    side = max(1, round(rows.image_size / cell)) * tower.spatial_merge_size
    return Load(lengths, count * supervised, grids=((1, side, side),) * images)


def _rows(settings: Settings, gpus: int, tokens: int) -> tuple[int, int]:
    """Rows of one GPU in an optimizer step, and those of its largest micro-batch."""
    batch = settings.batch
    if batch.max_tokens_per_gpu is None:
        at_once = batch.per_device_train_batch_size or 1
        in_step = at_once * (batch.grad_accum_steps or 1)
        if batch.global_batch_size is not None:
            in_step = -(-batch.global_batch_size // gpus)
    else:
        at_once = batch.max_tokens_per_gpu // tokens
        assert batch.global_batch_size is not None  # the settings' own rule
        in_step = -(-batch.global_batch_size // gpus)
    if at_once < 1:
        raise InputError(
            f"--max_tokens_per_gpu {batch.max_tokens_per_gpu} has no room for a row of {tokens} "
            "tokens (--max_length): raise it, or lower --max_length"
        )
    return in_step, min(at_once, in_step)
