"""Loss curves of Vireo beside TRL's SFTTrainer: same model, rows, order and rate; fp32 on the CPU.

    python benchmarks/trl_loss.py [--plot docs/images/trl-loss.png] [--differences] [--golden]

Trains a text model and a vision-language model with both programs, 50 steps each, and prints a
table. Exit code 1 if a token, label or pixel differs, or the losses of any step by more than 1e-4.
`--differences` measures what is known to differ, `--golden` writes TRL's losses for the tests.
Needs TRL 1.16: pip install -e ".[trl]"
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import os
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # both before torch and the hub's client are imported
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from trl_cases import (
    ACCUMULATION,
    CLIP,
    GOLDEN,
    LR,
    MICRO_BATCH,
    SHORT,
    TEXT,
    TOLERANCE,
    VLM,
    Case,
    train_vireo,
    write_case,
)


@dataclass
class Seen:
    """What TRL gave the model, micro-batch by micro-batch, and what it logged, step by step."""

    rows: list[tuple[list[int], list[int]]] = field(default_factory=list)  # ids and labels
    pixels: list[Any] = field(default_factory=list)
    micro: list[tuple[float, int]] = field(default_factory=list)  # sum of token losses, tokens
    logs: list[dict[str, float]] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        return [log["loss"] for log in self.logs]


@dataclass(frozen=True)
class Way:
    """How TRL gets the eight rows of a step.

    `count`: tell it the step's number of tokens where the model's class says not to.
    """

    label: str
    rows: int = MICRO_BATCH
    micro_batches: int = ACCUMULATION
    count: bool = False


AS_IT_COMES = Way("2 x 4 rows")
WHOLE = Way("1 x 8 rows", MICRO_BATCH * ACCUMULATION, 1)
COUNTED = Way("2 x 4 rows, told the tokens of the step", count=True)


def train_trl(case: Case, way: Way, model: Path, data: Path, output: Path) -> Seen:
    """SFTTrainer on the rows in the file's order; the subclass only looks on."""
    import datasets
    from trl import SFTConfig, SFTTrainer

    seen = Seen()

    class Watched(SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            for ids, labels, mask in zip(
                inputs["input_ids"], inputs["labels"], inputs["attention_mask"].bool()
            ):
                seen.rows.append((ids[mask].tolist(), labels[mask].tolist()))
            seen.pixels.append(inputs.get("pixel_values"))
            tokens = int((inputs["labels"] != -100).sum())
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            divisor = tokens if num_items_in_batch is None else int(num_items_in_batch)
            seen.micro.append((loss.item() * divisor, tokens))
            return loss

    rows = json.loads(data.read_text())
    columns: dict[str, list[Any]] = {"messages": [row["messages"] for row in rows]}
    if case.trainer == VLM.trainer:
        columns["images"] = [[str(data.parent / n) for n in row["images"]] for row in rows]
    dataset = datasets.Dataset.from_dict(columns)
    if "images" in columns:
        dataset = dataset.cast_column("images", datasets.List(datasets.Image()))
    arguments = SFTConfig(
        output_dir=str(output),
        max_steps=case.steps,
        per_device_train_batch_size=way.rows,
        gradient_accumulation_steps=way.micro_batches,
        train_sampling_strategy="sequential",
        learning_rate=LR,
        lr_scheduler_type=case.schedule,
        warmup_steps=case.warmup,
        weight_decay=case.weight_decay,
        max_grad_norm=CLIP,
        assistant_only_loss=True,
        max_length=None,  # 1024 by default, where longer rows are cut
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = Watched(model=str(model), args=arguments, train_dataset=dataset)
    if way.count:
        trainer.model_accepts_loss_kwargs = True
    trainer.train()
    seen.logs = [log for log in trainer.state.log_history if "loss" in log]
    return seen


@dataclass
class Pair:
    """One case, trained by both."""

    case: Case
    way: Way
    vireo: list[dict[str, Any]]
    trl: Seen

    @property
    def differences(self) -> list[float]:
        return [abs(a["loss"] - b) for a, b in zip(self.vireo, self.trl.losses, strict=True)]

    def worst(self, ours: str, theirs: str) -> float:
        """Largest difference of a number that both log for each step."""
        return max(abs(a[ours] - b[theirs]) for a, b in zip(self.vireo, self.trl.logs))

    def parts(self) -> list[list[tuple[float, int]]]:
        """TRL's micro-batches of each step."""
        parts = iter(self.trl.micro)
        return [[next(parts) for _ in range(-(-r["rows"] // self.way.rows))] for r in self.vireo]

    def off_mean(self) -> float:
        """How far TRL's logged losses are from the mean over all tokens of the step, at most."""
        means = [sum(part[0] for part in p) / sum(part[1] for part in p) for p in self.parts()]
        return max(abs(mean - loss) for mean, loss in zip(means, self.trl.losses))


class Bench:
    """Trains in one folder; Vireo once a case."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.made: dict[Case, tuple[Path, Path, list[dict[str, Any]]]] = {}

    def pair(self, case: Case, way: Way) -> Pair:
        with contextlib.redirect_stdout(io.StringIO()):  # both say something at each step
            if case not in self.made:
                home = self.folder / str(len(self.made))
                model, data = write_case(case, home)
                self.made[case] = model, data, train_vireo(case, model, data, home / "run")
            model, data, records = self.made[case]
            return Pair(case, way, records, train_trl(case, way, model, data, self.folder / "trl"))

    def check(self, pair: Pair) -> list[str]:
        """What is not the same, in words: tokens, labels, pixels, counts, losses."""
        import torch

        from vireo.data.conversation import read_rows
        from vireo.data.render import Renderer

        model, data, records = self.made[pair.case]
        renderer, rows = Renderer(str(model)), read_rows(str(data))
        examples = [renderer.example(rows[i]).fields for i in range(len(rows))]
        faults, at = [], 0
        for ids, labels in pair.trl.rows:
            mine = examples[at % len(examples)]
            if (mine["input_ids"].tolist(), mine["labels"].tolist()) != (ids, labels):
                faults.append(f"row {at % len(examples)} has other tokens or labels in TRL")
            at += 1
        if at != sum(record["rows"] for record in records):
            faults.append(f"TRL trained on {at} rows")
        mine = [e["pixel_values"] for e in examples if "pixel_values" in e]
        theirs = [pixels for pixels in pair.trl.pixels if pixels is not None]
        if mine and not torch.equal(_of_length(mine, theirs), torch.cat(theirs)):
            faults.append("pixels differ")
        for step, difference in enumerate(pair.differences, 1):
            if not difference <= TOLERANCE:
                faults.append(f"step {step}: losses differ by {difference:.1e}")
        return [f"{pair.case.name}, {pair.way.label}: {fault}" for fault in faults]


def _of_length(epoch: list[Any], wanted: list[Any]) -> Any:
    """The pixels of the epoch's pictures over and over, as many as `wanted` has."""
    import torch

    one = torch.cat(epoch)
    length = sum(len(pixels) for pixels in wanted)
    return one.repeat(-(-length // len(one)), 1)[:length]


def line(pair: Pair) -> str:
    norm, rate = pair.worst("grad_norm", "grad_norm"), pair.worst("lr", "learning_rate")
    first, last = pair.vireo[0]["loss"], pair.vireo[-1]["loss"]
    return (
        f"| {pair.case.name} | {pair.way.label} | {first:.3f} to {last:.3f} "
        f"| {max(pair.differences):.1e} | {norm:.1e} | {rate:.1e} | {pair.off_mean():.1e} |"
    )


HEAD = (
    "| rows | TRL's step | loss | largest difference of a loss | of a gradient norm | of a rate "
    "| TRL's own loss from its token mean |\n|" + " --- |" * 7
)


def measured_differences(bench: Bench) -> None:
    """What is known to differ, and by how much."""
    print("\n| what | TRL's step | largest difference of a loss |\n| --- | --- | --- |")
    for what, case, way in (
        ("pictures and accumulation", VLM, AS_IT_COMES),
        ("steps without a picture", replace(VLM, blind_steps=True), WHOLE),
        ("warm-up of 5 steps", replace(TEXT, warmup=5), AS_IT_COMES),
        ("pictures and weight decay 0.1", replace(VLM, weight_decay=0.1), WHOLE),
    ):
        print(
            f"| {what} | {way.label} | {max(bench.pair(case, way).differences):.1e} |", flush=True
        )


def write_golden(bench: Bench, pairs: list[Pair]) -> None:
    """TRL's own losses of as many steps as the tests train."""
    for long in pairs:
        short = bench.pair(replace(long.case, steps=SHORT), long.way)
        runs = {}
        for pair in (short, long):
            tokens = [sum(part[1] for part in parts) for parts in pair.parts()]
            runs[str(pair.case.steps)] = {"losses": pair.trl.losses, "supervised_tokens": tokens}
        golden = {"made_by": versions(), "step": long.way.label, "runs": runs}
        path = GOLDEN / f"trl_{long.case.name}.json"
        path.write_text(json.dumps(golden, indent=1) + "\n")
        print(f"wrote {path}")


def versions() -> dict[str, str]:
    names = ("trl", "transformers", "accelerate", "torch")
    return {name: importlib.metadata.version(name) for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path, help="PNG file to draw the curves in")
    parser.add_argument("--differences", action="store_true", help="measure what differs, too")
    parser.add_argument("--golden", action="store_true", help="write the losses of the tests")
    given = parser.parse_args()
    try:
        import trl  # noqa: F401
    except ImportError as error:
        print(f'this needs TRL 1.16: pip install -e ".[trl]" ({error})', file=sys.stderr)
        return 2
    import torch
    from datasets.utils import disable_progress_bars
    from transformers.utils import logging

    torch.set_num_threads(1)
    disable_progress_bars()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    print(", ".join(f"{name} {version}" for name, version in versions().items()), flush=True)
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        pairs, faults = [], []
        for case, way in ((TEXT, AS_IT_COMES), (VLM, WHOLE), (VLM, COUNTED)):
            pairs.append(bench.pair(case, way))
            faults += bench.check(pairs[-1])
            print(line(pairs[-1]), flush=True)
        if given.differences:
            measured_differences(bench)
        if given.plot:
            from loss_plot import draw

            draw(pairs[0], pairs[1], bench.pair(VLM, AS_IT_COMES), given.plot)
        if given.golden and not faults:
            write_golden(bench, pairs[:2])
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
