"""`vireo plan`: the prediction as a small table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vireo.data.model_folder import load_config
from vireo.errors import InputError
from vireo.nearest import nearest
from vireo.plan.flops import PARTS
from vireo.plan.gpus import GPUS, REACHED
from vireo.plan.predict import OVERHEAD_S, SHARE, Plan, Rows, predict
from vireo.settings import load_settings


def plan(
    *,
    gpus: int = 1,
    gpu: str = "h200",
    images: int | None = None,
    image_size: int = 448,
    tiles: int = 1,
    supervised: int | None = None,
    **flags: Any,
) -> Plan:
    """Predict a run of the trainer's `flags` by name, and print the prediction.

    Of a model only its config is read. `images` of a row: one by default, where the model sees.
    InputError: a GPU, a model or settings that cannot be planned.
    """
    if images is not None and images < 0:
        raise InputError(f"--images: found {images}, expected 0 or more")
    if gpu not in GPUS:
        near = nearest(gpu, list(GPUS))
        hint = f"did you mean {near}?" if near else f"there are {', '.join(GPUS)}"
        raise InputError(f"--gpu {gpu}: no such GPU; {hint}")
    settings = load_settings([f"--{name}={value}" for name, value in flags.items()])
    assert settings.data.max_length is not None  # which the command requires
    model = settings.model
    config, family = load_config(model.vlm_model_name_or_path, model.trust_remote_code)
    rows = Rows(
        tokens=settings.data.max_length,
        images=int(family.has_vision) if images is None else images,
        image_size=image_size,
        tiles=tiles,
        supervised=supervised,
    )
    found = predict(config, settings, GPUS[gpu], gpus, rows)
    print("\n".join(_text(found, gpus)))
    return found


def _text(plan: Plan, gpus: int) -> Iterator[str]:
    gpu, memory = plan.gpu, plan.memory
    yield f"{plan.weights:,} parameters, {plan.trained:,} trained, on {gpus} x {gpu.name}"
    of_images = f", {plan.image_tokens:,} of images" if plan.image_tokens else ""
    yield (
        f"an optimizer step of one GPU: {plan.rows:,} rows of {plan.tokens // plan.rows:,} tokens"
        f"{of_images} ({plan.supervised:,} with loss), in {plan.micro_batches:,} "
        f"micro-batch{'es' * (plan.micro_batches > 1)}; {plan.again} of {plan.layers} decoder "
        "layers recomputed"
    )
    yield ""
    yield "memory at its fullest              GB"
    for name, count in (
        ("weights", memory.weights),
        ("moments of AdamW", memory.moments),
        ("gradients", memory.gradients),
        ("gathered weights in bf16", memory.gathered),
        ("activations", memory.activations),
        ("head, or the layer at work", memory.working),
    ):
        yield f"  {name:<28}{count / 1e9:>7.1f}"
    yield f"  {'together':<28}{memory.total / 1e9:>7.1f}  of {gpu.memory_gb}: {plan.fits}"
    yield ""
    yield "work of a step, 1e12 operations   forward backward"
    flops = plan.flops
    for part in PARTS:
        if flops.forward[part]:
            there, back = flops.forward[part] / 1e12, flops.backward[part] / 1e12
            yield f"  {part:<30}{there:>9.2f}{back:>9.2f}"
    yield f"  {'recomputed':<30}{'':>9}{plan.repeated / 1e12:>9.2f}"
    yield ""
    yield (
        f"a step: {plan.seconds:.2f} s, {plan.tokens / plan.seconds:,.0f} tokens/s a GPU, "
        f"{flops.total / plan.seconds / gpu.rate:.0%} of {gpu.rate / 1e12:,.0f}e12 operations/s "
        f"({'measured' if gpu.name == 'h200' else f'{REACHED:.0%} of the data sheet, assumed'})"
    )
    yield (
        f"({SHARE:.0%} of that rate, and {OVERHEAD_S} s a micro-batch, as runs measured on one "
        "H200 have it; no wait for other GPUs or for data is in it)"
    )
