"""Evaluation: loss on held-out rows, and how good generated answers are.

Used by the trainers (on the sharded policy) and by `vireo eval` (any engine, any reward).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
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
from vireo.rewards import Rewards
from vireo.rollout.buffer import DataBuffer
from vireo.rollout.run import allowed, generate, open_model
from vireo.rollout.sample import Sample
from vireo.settings.rollout import EngineSettings, SamplingSettings
from vireo.training.engine import TrainEngine

GREEDY = SamplingSettings(max_new_tokens=64, temperature=0.0)
MEASURE = "exact_match"


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
    # Ours alone: a model folder's own settings (penalties, sampling) would change the measure.
    greedy = GenerationConfig(
        do_sample=False,
        use_cache=True,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(renderer.stop_ids),
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
    limit: int | None = None,
    batch_size: int = 16,
    output_dir: str | None = None,
    engine: EngineSettings | None = None,
    sampling: SamplingSettings | None = None,
    reward: str = MEASURE,
    **options: Any,
) -> dict[str, Any]:
    """Accuracy of a model or adapter folder on a data file: the share of answers with a `reward` of
    at least 1. Of several answers a row: pass@k. Answers with their images in `output_dir`.

    `batch_size`: rows answered at a time. `options`: the renderer's. InputError: several answers
    that would all be the same.
    """
    from vireo.report.run_folder import write_samples

    engine, sampling = engine or EngineSettings(), sampling or GREEDY
    if sampling.n > 1 and not sampling.temperature:
        raise InputError(f"--n {sampling.n} greedy answers are all the same: give a --temperature")
    exact = reward == MEASURE  # then rows without an answer are left out
    rows = read_rows(eval_file, image_root=image_root, allowed=allowed(engine, prompts=not exact))
    buffer = DataBuffer(prompts=min(len(rows), limit or len(rows)))
    if not buffer.prompts:
        raise InputError(f"{eval_file} has no row to evaluate on")
    renderer = (opened := open_model(model, processor, engine, **options))[1]
    _, seconds = generate(
        opened,
        _Asked(rows),
        buffer,
        engine,
        sampling,
        rewards=Rewards([reward]),
        at_once=-(-batch_size // sampling.n),
    )
    groups = sorted(buffer.get(buffer.waiting), key=lambda group: group[0].group)
    passed = [[(sample.reward or 0.0) >= 1 for sample in group] for group in groups]
    count = len(groups) * sampling.n
    result: dict[str, Any] = {
        "accuracy": sum(map(sum, passed)) / count,
        "rows": len(groups),
        "seconds": round(seconds, 2),
    }
    if not exact:
        result["reward"] = sum(sample.reward or 0.0 for g in groups for sample in g) / count
    if sampling.n > 1:
        ks = sorted({*(2**i for i in range(sampling.n.bit_length())), sampling.n})
        result |= {f"pass@{k}": pass_at(k, passed) for k in ks}
    if output_dir is not None:
        out = Path(output_dir)
        out.mkdir(parents=True, exist_ok=True)
        answers = [_answer(group, right) for group, right in zip(groups, passed)]
        pictures = [renderer.pictures(group[0].conversation) for group in groups]
        write_samples(out / "answers.jsonl", answers, pictures)
        result["answers"] = str(out / "answers.jsonl")
    return result


def pass_at(k: int, passed: Sequence[Sequence[bool]]) -> float:
    """The chance that of `k` answers to a row one passes, mean over the rows, without bias from
    `passed`, the n >= k answers that were sampled: 1 - C(n - c, k) / C(n, k) with c that pass
    (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", section 2.1)."""
    chances = [1 - math.comb(len(row) - sum(row), k) / math.comb(len(row), k) for row in passed]
    return sum(chances) / len(chances)


class _Asked:
    """Rows up to their last answer, which is what a model is asked for."""

    def __init__(self, rows: Sequence[Conversation]):
        self.rows = rows

    def __getitem__(self, i: int) -> Conversation:
        row = self.rows[i]
        ends = [k for k, turn in enumerate(row.turns, 1) if turn.role == "assistant"]
        return replace(row, turns=row.turns[: ends[-1]]) if ends else row


def _answer(group: list[Sample], passed: list[bool]) -> dict[str, Any]:
    """A line of the answers: of several answers to a row, lists of them."""
    row, one = group[0].conversation, len(group) == 1
    said, rewards = [sample.text.strip() for sample in group], [sample.reward for sample in group]
    return {
        "row": row.where,
        "prompt": _question(row),
        "expected": None if group[0].answer is None else group[0].answer.strip(),
        "answer" if one else "answers": said[0] if one else said,
        "correct": passed[0] if one else passed,
        **({} if MEASURE in group[0].rewards else {"reward": rewards[0] if one else rewards}),
    }
