"""Evaluation: loss on held-out rows, and exact match of generated answers.

Used by the trainers (on the sharded policy) and by `vireo eval` (on a plain model).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from vireo.data.conversation import Conversation, read_rows
from vireo.data.loader import StepRows
from vireo.data.packing import micro_batches
from vireo.data.ragged import TRAINER_KEYS, Batch
from vireo.data.render import Renderer
from vireo.errors import InputError, RowError
from vireo.models.build import whole_model
from vireo.models.load import fingerprint
from vireo.models.lora import (
    ADAPTER_CONFIG,
    add_adapters,
    base_of,
    fill_adapters,
    other_base,
    read_adapter,
)
from vireo.models.policy import Policy
from vireo.training.engine import TrainEngine


def answer_rows(
    generate: Callable[..., torch.Tensor],
    renderer: Renderer,
    rows: Sequence[Conversation],
    device: torch.device,
    *,
    max_new_tokens: int,
    batch_size: int = 16,
    **options: Any,
) -> list[dict[str, Any]]:
    """Greedy answers to the last turn of each row: prompt, expected, answer, correct.

    `generate` is transformers' generation. Tokens that only a processor may write are banned.
    """
    tokenizer = renderer.tokenizer
    stops = {tokenizer.eos_token_id, renderer.pad_id}
    if renderer.template.end_of_turn is not None:
        stops.add(tokenizer.convert_tokens_to_ids(renderer.template.end_of_turn))
    # Ours alone: a model folder's own settings (penalties, sampling) would change the measure.
    greedy = GenerationConfig(
        do_sample=False,
        use_cache=True,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(stops),
        pad_token_id=renderer.pad_id,
        suppress_tokens=sorted(renderer.image_ids) or None,
    )
    out: list[dict[str, Any]] = [{} for _ in rows]
    kinds: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        kinds.setdefault(0 if renderer.family.can_mix else len(row.images), []).append(i)
    batches = [k[a : a + batch_size] for k in kinds.values() for a in range(0, len(k), batch_size)]
    for batch in batches:
        prompts = [renderer.prompt(rows[i]) for i in batch]
        inputs = Batch.of([p for p, _ in prompts]).to(device).pad(renderer.pad_id, left=True)
        width = inputs["input_ids"].shape[1]
        inputs = {n: v for n, v in inputs.items() if n not in TRAINER_KEYS}
        ids = generate(**inputs, **options, generation_config=greedy)
        texts = tokenizer.batch_decode(ids[:, width:], skip_special_tokens=True)
        for i, (_, expected), text in zip(batch, prompts, texts):
            out[i] = {
                "row": rows[i].where,
                "prompt": _question(rows[i]),
                "expected": expected.strip(),
                "answer": text.strip(),
                "correct": text.strip() == expected.strip(),
            }
    return out


def _question(row: Conversation) -> str:
    return next((t.text for t in reversed(row.turns) if t.role == "user"), "").strip()


def accuracy(answers: Sequence[dict[str, Any]]) -> float:
    """Share of answers that equal the expected text, white space at the ends aside."""
    return sum(answer["correct"] for answer in answers) / max(1, len(answers))


def held_out_loss(
    engine: TrainEngine,
    steps: Iterable[StepRows],
    batch_rows: int,
    refuse: Callable[[list[RowError]], None],
) -> float | None:
    """Mean loss per unit of token weight over all `steps`, shared out over the ranks; collective.
    None where no row could be used.

    `refuse` is told of rows that could not be read, on every rank at once.
    """
    total = weight = 0.0
    for step in steps:
        refuse(step.refused)
        can_mix = engine.policy.family.can_mix
        sums = engine.evaluate(micro_batches(step.examples, rows=batch_rows, can_mix=can_mix))
        total, weight = total + sums[0], weight + sums[1]
    return total / weight if weight else None


def policy_answers(
    engine: TrainEngine, renderer: Renderer, rows: Sequence[Conversation], max_new_tokens: int
) -> list[dict[str, Any]]:
    """Answers of the policy in training. Every rank answers the same rows: ranks that generated
    from different prompts would run different collectives."""
    engine.policy.eval()
    sharded = engine.parallel.world > 1
    answers = answer_rows(
        engine.policy.generate,
        renderer,
        rows,
        engine.parallel.device,
        max_new_tokens=max_new_tokens,
        **({"synced_gpus": True} if sharded else {}),
    )
    engine.reshard()
    if hasattr(getattr(engine.policy.hf, "model", None), "rope_deltas"):
        engine.policy.hf.model.rope_deltas = None  # generation leaves its offsets behind
    return answers


def evaluate_files(
    *,
    model: str,
    eval_file: str,
    processor: str | None = None,
    image_root: str | None = None,
    image_size: int | None = None,
    image_strategy: str = "longest",
    limit: int | None = None,
    max_new_tokens: int = 64,
    batch_size: int = 16,
    output_dir: str | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Accuracy of a model or adapter folder on a data file; answers with their images in
    `output_dir`."""
    import transformers

    from vireo.hub import local_folder
    from vireo.report.run_folder import write_samples

    folder = local_folder(model)
    processor_folder = local_folder(processor) if processor else None
    adapter = None
    if (Path(folder) / ADAPTER_CONFIG).exists():
        adapter, folder = folder, base_of(folder)
        if processor_folder is None and list(Path(adapter).glob("tokenizer*")):
            processor_folder = adapter
        if notice := other_base(adapter, fingerprint(folder)):
            print(f"note: {notice}", file=sys.stderr)
    renderer = Renderer(
        folder,
        processor_folder,
        image_size=image_size,
        image_strategy=image_strategy,
        trust_remote_code=trust_remote_code,
    )
    rows = read_rows(eval_file, image_root=image_root)
    chosen = [rows[i] for i in range(min(len(rows), limit or len(rows)))]
    if not chosen:
        raise InputError(f"{eval_file} has no row to evaluate on")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    family = renderer.family
    if family.remote:
        hf = whole_model(renderer.config, family, folder, renderer.config.dtype)
    else:
        auto = getattr(transformers, family.auto_class)
        hf = auto.from_pretrained(folder, dtype="auto")
    if adapter is not None:
        add_adapters(hf, family, read_adapter(adapter))
        fill_adapters(hf, adapter)
    hf = hf.to(device).eval()
    started = time.perf_counter()
    answers = answer_rows(
        Policy(hf, family, None).generate if family.remote else hf.generate,
        renderer,
        chosen,
        device,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
    )
    result: dict[str, Any] = {
        "accuracy": accuracy(answers),
        "rows": len(answers),
        "seconds": round(time.perf_counter() - started, 2),
    }
    if output_dir is not None:
        out = Path(output_dir)
        out.mkdir(parents=True, exist_ok=True)
        write_samples(out / "answers.jsonl", answers, [renderer.pictures(row) for row in chosen])
        result["answers"] = str(out / "answers.jsonl")
    return result
