"""Supervised fine-tuning, top to bottom: rows -> examples -> micro-batches -> steps -> checkpoint.

Shared by the trainers `fsdp_vlm` (vision-language models) and `fsdp` (text models).
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from pathlib import Path
from typing import Any

import torch

from vireo import parallel as parallel_module
from vireo.data.conversation import Conversation, read_rows
from vireo.data.loader import Plan, StepLoader, StepRows
from vireo.data.mixture import open_mixture
from vireo.data.packing import evened, micro_batches
from vireo.data.ragged import Batch
from vireo.data.render import open_renderer
from vireo.data.stream import open_stream
from vireo.errors import InputError, RowError, VireoError
from vireo.evaluation import accuracy, held_out_loss, policy_answers
from vireo.models.lora import summary
from vireo.parallel import Parallel
from vireo.report import trackers
from vireo.report.console import memory_gb, progress_bar, step_line
from vireo.report.run_folder import RunFolder
from vireo.settings import Settings
from vireo.trainers.build import build_engine
from vireo.trainers.idle import idle_settings
from vireo.trainers.refused import Refused
from vireo.trainers.setup import (
    be_deterministic,
    find_checkpoint,
    run_paths,
    step_size,
    total_steps,
)
from vireo.trainers.stopping import Stopping
from vireo.training import checkpoint
from vireo.training.alarms import complaint, look
from vireo.training.engine import TrainEngine
from vireo.training.export import copy_side_files, export
from vireo.training.hub import check_push, push
from vireo.training.optimizer import schedule

MANY = 100_000  # rows of a stream, all refused, after which no good one is waited for


def run(settings: Settings, *, vision: bool) -> int:
    """One run, from settings to the final checkpoint; every rank calls it. Returns the exit code:
    0, or 128 and the number of the signal that ended it early."""
    if settings.run.deterministic:
        be_deterministic()
    parallel = parallel_module.start(
        settings.fsdp.enable, settings.fsdp.sharding, settings.fsdp.shard_size
    )
    try:
        if parallel.main:  # before hours of work, not after
            trackers.choose(settings.run.report_to)
            if settings.run.push_to_hub:
                check_push(settings.run.push_to_hub)
        sft = Sft(settings, parallel, vision)
        with sft.folder:
            return sft.run()
    finally:
        parallel.close()


class Sft:
    """The parts of a run and its loop."""

    def __init__(self, settings: Settings, parallel: Parallel, vision: bool):
        self.settings, self.parallel = settings, parallel
        random.seed(settings.run.seed + parallel.rank)
        torch.manual_seed(settings.run.seed + parallel.rank)
        data = settings.data
        self.renderer = open_renderer(settings)
        self.model_folder = self.renderer.model_path
        self.family = self.renderer.family
        if vision != self.family.has_vision:
            raise InputError(
                f"{self.model_folder} is a {'text' if vision else 'vision-language'} model "
                f"({self.family.name}): use --trainer {'fsdp' if vision else 'fsdp_vlm'}"
            )
        packing = settings.batch.packing
        self.packing = self.family.can_pack if packing is None else packing
        if self.packing and not self.family.can_pack:
            raise InputError(f"{self.family.name} rows cannot be packed: set --packing false")
        if data.train_file is None:
            raise InputError("--train_file is missing")
        self.rows = self._train_rows(data.train_file)
        self.eval_rows: Any = []
        if data.eval_file:
            self.eval_rows = read_rows(
                data.eval_file,
                image_root=data.image_root,
                on_bad_row=data.on_bad_row,
                progress=parallel.main,
            )
            self._check_same(data.eval_file, self.eval_rows)
        self.output, self.saves = run_paths(settings, parallel)
        self.start_from = find_checkpoint(settings, self.saves, parallel)
        done = checkpoint.verify(self.start_from, parallel) if self.start_from else {}
        earlier = self.output / "metrics.jsonl"
        if settings.run.resume is None and parallel.gather(earlier.exists())[0]:
            raise InputError(
                f"{self.output} holds an earlier run (or one that is running): choose another "
                "--output_dir, or go on with --resume auto"
            )
        self.size, notice = step_size(settings.batch, parallel.world, done.get("global_batch"))
        self.plan = self._plan()
        self._check_data_unchanged(done)
        self.folder = RunFolder(self.output, settings, parallel.main, done.get("step"))
        self.notices = [notice] if notice else []
        self.notices += idle_settings(settings)
        self.steps = total_steps(settings.optim, self.plan.steps_per_epoch)
        known = [*done.get("skipped", []), *map(str, self.rows.skipped)]
        self.refused = Refused(parallel, data.on_bad_row, known, self.folder.say)
        self.step, self.position = done.get("step", 0), done.get("position", 0)
        self.started_at, self.saved = self.step, self.start_from

    # -- the loop ----------------------------------------------------------------------------

    def run(self) -> int:
        settings, parallel = self.settings, self.parallel
        if settings.data.validate_rows == "full":
            self.refused.validate(self.renderer, (self.rows, self.eval_rows))
        built = build_engine(
            settings, self.renderer, parallel, packing=self.packing, start_from=self.start_from
        )
        engine, self.adapters, self.compute = built.engine, built.adapters, built.compute
        self.notices += built.notices
        self.folder.begin()
        self._greet(engine)
        with Stopping(parallel) as stopping:
            stopped = self._train(engine, stopping)
            if stopped:
                self.folder.say(
                    f"stopped by {signal.Signals(stopped).name} after step {self.step}, which is "
                    "saved; go on with --resume auto"
                )
            else:
                if settings.run.push_to_hub and parallel.main:
                    self._push(settings.run.push_to_hub)
                skipped = f", {len(self.refused)} rows skipped" if len(self.refused) else ""
                self.folder.say(f"done: {self.step} steps{skipped}, run folder {self.output}")
            self.folder.close()
            parallel.barrier()  # a rank that left would have its launcher end the others
        return 128 + stopped if stopped else 0

    def _train(self, engine: TrainEngine, stopping: Stopping) -> int:
        """The steps; the signal that ended them early, or 0."""
        settings, parallel = self.settings, self.parallel
        optim = settings.optim
        rate = schedule(optim.lr_scheduler, self.steps, optim.warmup_ratio)
        loader = self._loader(
            self.rows, self.plan, start=self.position, stop=self.plan.position(self.steps)
        )
        bar = progress_bar(self.steps, self.step, parallel.main)
        clock = time.perf_counter()
        saved = evaluated = -1
        good, start, stopped = 0, self.position, 0
        for item in loader:
            share = rate(self.step)
            batches = self._micro_batches(item)
            checked = self._check(engine, batches)
            result = engine.step(batches, share)
            self.step, self.position = self.step + 1, item.position
            good += result.rows
            if good == 0 and self.position - start >= min(self.plan.rows, MANY):
                raise InputError(
                    f"--train_file {','.join(settings.data.train_file or ())}: every row was "
                    f"refused; the first: {self.refused.first}"
                )
            now = time.perf_counter()
            seconds, clock = now - clock, now
            record = {
                "step": self.step,
                "loss": result.loss if result.rows else None,  # every row of it was refused
                "lr": optim.lr * share,
                "grad_norm": result.grad_norm,
                "epoch": None if settings.data.streaming else self.position / self.plan.rows,
                "rows": result.rows,
                "tokens": result.tokens,
                "supervised_tokens": result.supervised,
                "images": result.images,
                "skipped_rows": len(self.refused),
                "seconds": seconds,
                "tokens_per_s": result.tokens / seconds,
                "images_per_s": result.images / seconds,
                "memory_gb": memory_gb(parallel.device),
                **checked,
            }
            logged = self.step % settings.run.logging_steps == 0 or self.step == self.steps
            if logged or checked:
                self.folder.metrics(record)
                bar.clear()
                self.folder.say(step_line(record, self.steps))
            bar.update()
            if settings.run.save_steps and self.step % settings.run.save_steps == 0:
                saved = self._save(engine)
            every = settings.run.eval_steps if self.eval_rows else 0
            if every and self.step % every == 0:
                evaluated = self._evaluate(engine)
            clock = time.perf_counter() if self.step in (saved, evaluated) else clock
            stopped = stopping.asked()
            if stopped:
                break
        bar.close()
        if self.step == self.started_at:
            self.folder.say(f"nothing to do: step {self.step} of {self.steps} is done")
            evaluated = parallel.gather(self.folder.last_evaluated())[0]
        elif saved != self.step:
            self._save(engine)
        if self.eval_rows and evaluated != self.step and not stopped:
            self._evaluate(engine)
        return stopped or stopping.asked()

    def _micro_batches(self, item: StepRows) -> list[Batch]:
        """This rank's micro-batches of a step, once every rank knows which rows are refused."""
        self.refused.share(item.refused)
        examples, budget = item.examples, self.settings.batch.max_tokens_per_gpu
        if budget is not None:
            examples = evened(examples, self.parallel, budget)
        return micro_batches(
            examples,
            rows=self.size.chunk,
            budget=budget,
            can_mix=self.family.can_mix,
            packing=self.packing,
        )

    def _check(self, engine: TrainEngine, batches: list[Batch]) -> dict[str, float]:
        """The values of this step's alarms; a failed one is said, or stops the run."""
        run = self.settings.run
        if not run.check_steps or self.step % run.check_steps:
            return {}
        found = look(engine, batches)
        wrong = complaint(found, self.compute)
        if wrong and run.check_action == "stop":
            raise VireoError(f"step {self.step + 1}: {wrong} (--check_action warn goes on)")
        if wrong:
            self.folder.say(f"warning: {wrong}")
        return found

    # -- parts -------------------------------------------------------------------------------

    def _evaluate(self, engine: TrainEngine) -> int:
        run = self.settings.run
        rows = len(self.eval_rows)
        plan = Plan(rows, self.size.chunk * self.parallel.world, self.size.chunk, shuffle=False)
        steps = self._loader(self.eval_rows, plan, start=0, stop=rows)
        loss = held_out_loss(engine, steps, self.size.chunk, self.refused.share)
        record: dict[str, Any] = {"step": self.step, "eval_loss": loss}
        shown_loss = "no row could be used" if loss is None else f"loss {loss:.4f}"
        line = f"eval at step {self.step}: {shown_loss}"
        shown = self._readable(run.eval_samples)
        if shown:
            answers = policy_answers(engine, self.renderer, shown, run.max_new_tokens)
            record["eval_exact_match"] = accuracy(answers)
            line += f"  exact match {accuracy(answers):.3f} of {len(answers)}"
            if self.parallel.main:
                pictures = [self.renderer.pictures(row) for row in shown]
                self.folder.samples(self.step, answers, pictures)
        self.folder.metrics(record)
        self.folder.say(line)
        return self.step

    def _save(self, engine: TrainEngine) -> int:
        started = time.perf_counter()
        name = self.settings.model.vlm_model_name_or_path
        path = checkpoint.save(
            self.saves,
            engine.policy,
            engine.optimizer,
            self.parallel,
            {
                "step": self.step,
                "position": self.position,
                "rows": self.plan.rows,
                "digest": self.rows.digest,
                "global_batch": self.size.rows,
                "skipped": list(self.refused.rows),
                "adapters": self.adapters,
                "run_folder": str(self.output.resolve()),
                "base_model": None if name == self.model_folder else name,  # a Hub name
                "settings": self.settings.model_dump(mode="json", by_alias=True),
            },
            self._write_hf,
            full=self.settings.fsdp.checkpoint == "full",
        )
        self.saved = path
        if self.parallel.main:
            try:
                checkpoint.prune(self.saves, self.settings.run.keep_checkpoints)
            except OSError as error:  # the run can do without; the next save tries again
                self.folder.say(f"warning: an older checkpoint cannot be removed: {error}")
        self.folder.say(f"saved {path} in {time.perf_counter() - started:.1f} s")
        return self.step

    def _push(self, repo: str) -> None:
        folder = self.output / f"export-step-{self.step}"
        if not folder.exists():
            assert self.saved is not None
            trust = self.settings.model.trust_remote_code
            export(self.saved, folder, repo=repo, trust_remote_code=trust)
        self.folder.say(f"pushed to {push(folder, repo, self.settings.run.hub_private)}")

    def _write_hf(self, out: Path) -> None:
        """The small files of the model folder, with the chat template that was trained on."""
        copy_side_files(Path(self.model_folder), Path(self.renderer.processor_path), out)
        (out / "chat_template.json").unlink(missing_ok=True)  # an older form, read before the other
        (out / "chat_template.jinja").write_text(self.renderer.template.template)

    def _loader(self, rows: Any, plan: Plan, start: int, stop: int) -> StepLoader:
        return StepLoader(
            rows,
            self.renderer,
            plan,
            rank=self.parallel.rank,
            world=self.parallel.world,
            start=start,
            stop=stop,
            workers=self.settings.data.num_workers,
        )

    # -- data --------------------------------------------------------------------------------

    def _train_rows(self, files: list[str]) -> Any:
        """The rows to train on: all looked at now, or a stream of them."""
        settings, data = self.settings, self.settings.data
        if not data.streaming:
            rows: Any = open_mixture(
                files,
                data.train_weights,
                image_root=data.image_root,
                on_bad_row=data.on_bad_row,
                progress=self.parallel.main,
            )
        elif settings.optim.max_steps is None or settings.optim.num_epochs is not None:
            raise InputError("--streaming needs --max_steps, not --num_epochs: it has no epochs")
        elif data.validate_rows == "full":
            raise InputError("--streaming and --validate full exclude each other; leave one out")
        else:
            rows = open_stream(
                files,
                data.train_weights,
                image_root=data.image_root,
                seed=settings.run.seed,
                shuffle=data.shuffle,
                buffer=data.shuffle_buffer,
                on_bad_row=data.on_bad_row,
            )
        self._check_same(",".join(files), rows)
        return rows

    def _check_same(self, file: str, rows: Any) -> None:
        seen = self.parallel.gather(rows.digest)
        for rank, other in enumerate(seen):
            if other != seen[0]:
                raise InputError(
                    f"{file}: rank {rank} sees other rows than rank 0: every rank must read the "
                    "same file"
                )

    def _plan(self) -> Plan:
        data, size = self.settings.data, self.size
        if data.streaming:
            return Plan.endless(size.rows, size.chunk)
        seed = self.settings.run.seed
        return Plan.mixed(self.rows.files, size.rows, size.chunk, seed, data.shuffle)

    def _readable(self, count: int) -> list[Conversation]:
        """The first `count` evaluation rows whose prompts rank 0 can make, on every rank."""
        found: list[int] = []
        for i in range(len(self.eval_rows) if self.parallel.main else 0):
            if len(found) == count:
                break
            with contextlib.suppress(RowError):
                self.renderer.prompt(self.eval_rows[i])
                found.append(i)
        return [self.eval_rows[i] for i in self.parallel.gather(found)[0]]

    def _check_data_unchanged(self, done: dict[str, Any]) -> None:
        """A position in the data means the same rows only with the same file, order and seed."""
        if not done:
            return
        before = done["settings"]
        data = self.settings.data
        for what, old, new in (
            ("--streaming", before["data"]["streaming"], data.streaming),
            ("--train_weights", before["data"]["train_weights"], data.train_weights),
            *(
                [("--shuffle_buffer", before["data"]["shuffle_buffer"], data.shuffle_buffer)]
                * data.streaming
            ),
            ("rows", done["rows"], self.plan.rows),
            ("rows, by checksum", done["digest"], self.rows.digest),
            ("--seed", before["run"]["seed"], self.settings.run.seed),
            ("--shuffle", before["data"]["shuffle"], data.shuffle),
        ):
            if old != new:
                raise InputError(
                    f"{self.start_from} was trained with {what} {old}, found {new}: the position "
                    "in the data would mean other rows; resume with the same file and settings"
                )

    def _greet(self, engine: TrainEngine) -> None:
        policy = engine.policy
        total = sum(p.numel() for p in policy.parameters())
        trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
        say = self.folder.say
        say(f"run folder {self.output}, checkpoints in {self.saves}")
        say(
            f"{self.family.name}: {total:,} parameters, {trained:,} trained; "
            f"{self.parallel.world} rank(s) on {self.parallel.device.type}; "
            f"rows {'packed' if self.packing else 'padded'}"
        )
        rows = "rows as they come"
        if not self.settings.data.streaming:
            rows = f"{self.plan.rows} rows an epoch ({len(self.rows.skipped)} skipped at start)"
        say(f"{rows}, {self.size.rows} rows a step, {self.steps} steps")
        if self.adapters is not None:
            modules = self.adapters["modules"]
            say(f"adapters of rank {self.adapters['r']} on {len(modules)} linear modules:")
            say(f"  {summary(modules)}")
        for error in self.rows.skipped[:5]:
            say(f"skipped {error}")
        if self.start_from is not None:
            say(f"resumed from {self.start_from} at step {self.step}")
        for notice in self.notices:
            say(f"note: {notice}")
