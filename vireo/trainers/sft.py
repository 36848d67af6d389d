"""Supervised fine-tuning, top to bottom: rows -> examples -> micro-batches -> steps -> checkpoint.

Shared by the trainers `fsdp_vlm` (vision-language models) and `fsdp` (text models).
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from vireo.data.conversation import Conversation, read_rows
from vireo.data.loader import Plan, StepLoader, StepRows
from vireo.data.mixture import open_mixture
from vireo.data.packing import evened, micro_batches
from vireo.data.ragged import Batch
from vireo.data.stream import open_stream
from vireo.errors import InputError, RowError
from vireo.evaluation import accuracy, held_out_loss, policy_answers
from vireo.parallel import Parallel
from vireo.report.console import memory_gb, progress_bar, step_line
from vireo.settings import Settings
from vireo.trainers import base
from vireo.trainers.idle import idle_settings
from vireo.trainers.refused import Refused
from vireo.trainers.setup import step_size, total_steps
from vireo.trainers.stopping import Stopping
from vireo.training.engine import TrainEngine
from vireo.training.optimizer import schedule

MANY = 100_000  # rows of a stream, all refused, after which no good one is waited for


def run(settings: Settings, *, vision: bool) -> int:
    return base.run(settings, lambda settings, parallel: Sft(settings, parallel, vision))


class Sft(base.Run):
    """The parts of a run and its loop."""

    def __init__(self, settings: Settings, parallel: Parallel, vision: bool):
        super().__init__(settings, parallel)
        data = settings.data
        if vision != self.family.has_vision:
            raise InputError(
                f"{self.model_folder} is a {'text' if vision else 'vision-language'} model "
                f"({self.family.name}): use --trainer {'fsdp' if vision else 'fsdp_vlm'}"
            )
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
            self.check_same(data.eval_file, self.eval_rows)
        done = self.open()
        self.size, notice = step_size(settings.batch, parallel.world, done.get("global_batch"))
        self.plan = self._plan()
        self._check_data_unchanged(done)
        self.make_folder(done)
        self.notices += [notice] if notice else []
        self.notices += idle_settings(settings)
        self.steps = total_steps(settings.optim, self.plan.steps_per_epoch)
        known = [*done.get("skipped", []), *map(str, self.rows.skipped)]
        self.refused = Refused(parallel, data.on_bad_row, known, self.folder.say)

    # -- the loop ----------------------------------------------------------------------------

    def prepare(self) -> None:
        if self.settings.data.validate_rows == "full":
            self.refused.validate(self.renderer, (self.rows, self.eval_rows))

    def last_words(self) -> str:
        return f", {len(self.refused)} rows skipped" if len(self.refused) else ""

    def train(self, engine: TrainEngine, stopping: Stopping) -> int:
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
            checked = self.check(engine, batches)
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
            self.tick()
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
        return self.save(
            engine,
            {
                "rows": self.plan.rows,
                "global_batch": self.size.rows,
                "skipped": list(self.refused.rows),
            },
        )

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
        self.check_same(",".join(files), rows)
        return rows

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
        self.check_unchanged(
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
        )

    def about(self) -> list[str]:
        rows = "rows as they come"
        if not self.settings.data.streaming:
            rows = f"{self.plan.rows} rows an epoch ({len(self.rows.skipped)} skipped at start)"
        return [f"{rows}, {self.size.rows} rows a step, {self.steps} steps"]
