"""Trainer `grpo`: reinforcement learning from rewards, on text and on images.

One loop: collect groups -> rewards -> advantages -> log-probs -> updates -> weights to the engine
-> metrics, evaluation, checkpoint.

    vireo train --trainer grpo --model_name_or_path MODEL --prompt_data prompts.jsonl \\
        --reward exact_match --num_rollout 100 --output_dir runs/first
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from vireo.data.mixture import Mixture, open_mixture
from vireo.data.prompt_rows import Columns
from vireo.errors import InputError, RowError
from vireo.parallel import Parallel
from vireo.report.console import memory_gb, others_gb, progress_bar, rollout_line, used_gb
from vireo.rl.advantages import GROUPED
from vireo.rl.figures import rollout_figures
from vireo.rl.learn import Learned, Learner
from vireo.rl.record import Rollouts, replayed
from vireo.rollout.buffer import Group
from vireo.rollout.run import allowed
from vireo.rollout.sample import Sample
from vireo.settings import Settings
from vireo.trainers import base
from vireo.trainers.build import build_reference
from vireo.trainers.generation import Generation, eval_files
from vireo.trainers.idle import idle_rollout_settings, idle_settings
from vireo.trainers.stopping import Stopping
from vireo.training.engine import TrainEngine
from vireo.training.offload import Offload
from vireo.training.optimizer import schedule

BUFFER = "buffer.json"  # in a checkpoint


def run(settings: Settings) -> int:
    return base.run(settings, Grpo)


run.has_rollout = True  # type: ignore[attr-defined]


class Grpo(base.Run):
    """The parts of a run and its loop."""

    def __init__(self, settings: Settings, parallel: Parallel):
        super().__init__(settings, parallel)
        rollout, data = settings.rollout, settings.data
        if data.train_file is not None or data.eval_file is not None:
            raise InputError("--trainer grpo reads --prompt_data and --eval_prompt_data")
        if settings.prompts.prompt_data is None:
            raise InputError("--prompt_data is missing: a data file with prompts")
        if settings.algo.advantage_estimator in GROUPED and rollout.n_samples_per_prompt < 2:
            raise InputError(
                f"--advantage_estimator {settings.algo.advantage_estimator} compares the responses "
                "to a prompt: --n_samples_per_prompt must be 2 or more, found 1"
            )
        check_colocated(settings)
        self.rows = self._open(settings.prompts.prompt_data, data.train_weights)
        replay = rollout.debug_train_only is not None  # which has no engine to evaluate with
        files = {} if replay else eval_files(settings.prompts.eval_prompt_data)
        self.evals = {name: self._open([file]) for name, file in files.items()}
        self.samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
        self.updates = updates_of(settings, self.samples)
        done = self.open()
        self._check_unchanged(done)
        self.make_folder(done)
        self.notices += idle_settings(settings) + idle_rollout_settings(settings)
        self.skipped = done.get("refused", 0)
        self.generation = Generation(
            self,
            self.rows,
            self.evals,
            longest=self._longest(),
            refused=self._refused if data.on_bad_row == "skip" else None,
        )
        epochs = settings.optim.num_epochs or 1
        rows = self.generation.prompts.epoch
        self.steps = rollout.num_rollout or max(1, epochs * rows // rollout.rollout_batch_size)
        if self.start_from is not None and parallel.main:
            self.generation.buffer.load_state(json.loads((self.start_from / BUFFER).read_text()))

    # -- the loop ----------------------------------------------------------------------------

    def train(self, engine: TrainEngine, stopping: Stopping) -> int:
        settings, generation = self.settings, self.generation
        run, optim = settings.run, settings.optim
        learner = self._learner(engine)
        self.rate = schedule(optim.lr_scheduler, self.steps * self.updates, optim.warmup_ratio)
        self.offload = offload_of(settings, engine)
        if self.offload is not None:
            self.offload.away()
        saved, evaluated, stopped = self.step if self.start_from else -1, -1, 0
        bar = progress_bar(self.steps, self.step, self.parallel.main)
        with generation.opened():
            self._engine_rests(generation)
            generation.sync(self.step)  # so that what fails in it fails now
            risen = self._engine_rises(generation)
            if self.evals and self.step < self.steps and self.start_from is None:
                evaluated = self._evaluate()
            while self.step < self.steps:
                clock = time.perf_counter()
                groups = self._collect(stopping)
                if groups is None:
                    stopped = stopping.asked()
                    break
                samples = [sample for group in groups for sample in group]
                seconds = {"generate": time.perf_counter() - clock}
                used = {"generate": used_gb(self.parallel.device)}
                rested = self._engine_rests(generation, used)
                if self.offload is not None:
                    seconds["swap"] = risen + rested
                learned = None
                if not settings.rollout.debug_rollout_only:
                    learned = self._learn(engine, learner, samples)
                used["train"] = used_gb(self.parallel.device)
                self.step += 1
                self.position += len(groups)
                sent = time.perf_counter()
                if learned is not None:
                    generation.sync(self.step)
                seconds |= {} if learned is None else learned.seconds
                seconds["weights"] = time.perf_counter() - sent
                total = time.perf_counter() - clock + risen
                self._log(groups, samples, learned, seconds, used, total)
                bar.update()
                self.tick()
                last = self.step == self.steps and not settings.rollout.debug_rollout_only
                if last or (run.save_steps and self.step % run.save_steps == 0):
                    saved = self._save(engine)
                risen = self._engine_rises(generation)
                if self.evals and run.eval_steps and self.step % run.eval_steps == 0:
                    evaluated = self._evaluate()
                stopped = stopping.asked()
                if stopped:
                    break
            bar.close()
            if self.step == self.started_at and not stopped:
                self.folder.say(f"nothing to do: step {self.step} of {self.steps} is done")
                evaluated = self.step
            elif saved != self.step and not settings.rollout.debug_rollout_only:
                self._engine_rests(generation)
                self._save(engine)
            if self.evals and evaluated != self.step and not stopped:
                self._evaluate()
        return stopped or stopping.asked()

    def _engine_rests(self, generation: Generation, used: dict[str, float] | None = None) -> float:
        """Of colocated runs: from here the device is the trainer's. Seconds that it took; `used`
        gets the memory that is in use when both sleep, and the part of it that is not this
        process's."""
        if self.offload is None:
            return 0.0
        clock = time.perf_counter()
        generation.rest()
        if used is not None:
            used["asleep"] = used_gb(self.parallel.device)
            used["engine_asleep"] = others_gb(self.parallel.device)
        self.offload.back()
        return time.perf_counter() - clock

    def _engine_rises(self, generation: Generation) -> float:
        """And from here the engine's, which has got new weights."""
        if self.offload is None:
            return 0.0
        clock = time.perf_counter()
        self.offload.away()
        generation.rise()
        return time.perf_counter() - clock

    def _collect(self, stopping: Stopping) -> list[Group] | None:
        """The groups of a step, on every rank; None: a signal came first."""
        replay = self.settings.rollout.debug_train_only
        if replay is not None:
            return replayed(replay, self.step + 1)
        return self.generation.collect(lambda: stopping.seen)

    def _learn(self, engine: TrainEngine, learner: Learner, samples: list[Sample]) -> Learned:
        done = self.step * self.updates
        return learner.learn(
            samples,
            self.generation.prompt,
            self.updates,
            lambda number: self.rate(done + number),
            lambda batches: self.check(engine, batches),
        )

    # -- parts -------------------------------------------------------------------------------

    def _log(
        self,
        groups: list[Group],
        samples: list[Sample],
        learned: Learned | None,
        seconds: dict[str, float],
        used: dict[str, float],
        total: float,
    ) -> None:
        """The record of a step, its line, and its samples."""
        if self.step % self.settings.run.logging_steps and self.step != self.steps:
            return
        figures = rollout_figures(groups)
        record: dict[str, Any] = {"step": self.step, **figures}
        if learned is not None:
            record |= learned.stats
            record["lr"] = self.settings.optim.lr * self.rate(self.step * self.updates - 1)
            record["skipped_updates"] = learned.skipped
        record |= self.generation.metrics()
        tokens = sum(len(sample.prompt_ids) + len(sample.response_ids) for sample in samples)
        record |= {f"seconds/{name}": value for name, value in seconds.items()}
        record |= {f"device_gb/{name}": value for name, value in used.items() if value}
        record |= {
            "epoch": self.position / self.generation.prompts.epoch,
            "refused_prompts": self.skipped,
            "seconds": total,
            "tokens": tokens,
            "tokens_per_s": tokens / total,
            "generated_tokens_per_s": figures["response_tokens"] / max(seconds["generate"], 1e-9),
            "memory_gb": memory_gb(self.parallel.device),
        }
        self.folder.metrics(record)
        self.folder.say(rollout_line(record, self.steps))
        if self.parallel.main:
            self.record.write(self.step, samples, learned)

    def _evaluate(self) -> int:
        started = time.perf_counter()
        found = self.generation.evaluate()
        self.folder.metrics({"step": self.step, **found})
        each = "  ".join(f"{n.removeprefix('eval_')} {v:.4f}" for n, v in found.items() if "/" in n)
        self.folder.say(
            f"eval at step {self.step}: reward {found['eval_reward']:.4f} of "
            f"{found['eval_samples']} samples  {each}{'  ' if each else ''}"
            f"{time.perf_counter() - started:.1f} s"
        )
        return self.step

    def _save(self, engine: TrainEngine) -> int:
        state = self.generation.state()

        def buffer(folder: Path) -> None:
            (folder / BUFFER).write_text(json.dumps(state))

        return self.save(
            engine,
            {
                "rows": self.generation.prompts.epoch,
                "global_batch": self.samples // self.updates,
                "refused": self.skipped,
                "skipped": list(map(str, self.rows.skipped)),
            },
            buffer,
        )

    def _learner(self, engine: TrainEngine) -> Learner:
        settings, batch = self.settings, self.settings.batch
        tokenizer = self.renderer.tokenizer
        self.record = Rollouts(self.output, lambda token: tokenizer.decode([token]))
        return Learner(
            engine,
            self.renderer,
            settings.algo,
            temperature=settings.rollout.rollout_temperature,
            longest=settings.rollout.rollout_max_response_len,
            chunk=batch.per_device_train_batch_size or 1,
            budget=batch.max_tokens_per_gpu,
            max_staleness=settings.rollout.oldest,
            reference=build_reference(settings, self.renderer, self.built, self.parallel),
        )

    # -- data --------------------------------------------------------------------------------

    def _open(self, files: list[str], weights: list[float] | None = None) -> Mixture:
        settings, data, prompts = self.settings, self.settings.data, self.settings.prompts
        rows = open_mixture(
            files,
            weights,
            image_root=data.image_root,
            on_bad_row=data.on_bad_row,
            progress=self.parallel.main,
            allowed=allowed(settings.engine, prompts=True),
            columns=Columns.of(prompts.input_key, prompts.label_key, prompts.multimodal_keys),
        )
        if not len(rows):
            raise InputError(f"{','.join(files)}: no row can be used as a prompt")
        self.check_same(",".join(files), rows)
        return rows

    def _longest(self) -> int:
        """Tokens of the longest prompt that leaves room for a response."""
        response = self.settings.rollout.rollout_max_response_len
        room = self.renderer.longest - response
        if room < 1:
            raise InputError(
                f"--rollout_max_response_len {response} leaves no room for a prompt: a row may "
                f"have {self.renderer.longest} tokens (--max_length, --max_tokens_per_gpu)"
            )
        return min(room, self.settings.prompts.max_prompt_len or room)

    def _refused(self, error: RowError) -> None:
        self.skipped += 1
        self.folder.say(f"skipped {error}")

    def _check_unchanged(self, done: dict[str, Any]) -> None:
        if not done:
            return
        if "rollout" not in done["settings"]:
            raise InputError(
                f"{self.start_from} is of another trainer: {done['settings']['trainer']}"
            )
        before, now = done["settings"], self.settings
        self.check_unchanged(
            ("rows, by checksum", done["digest"], self.rows.digest),
            ("--seed", before["run"]["seed"], now.run.seed),
            ("--shuffle", before["data"]["shuffle"], now.data.shuffle),
            ("--train_weights", before["data"]["train_weights"], now.data.train_weights),
        )

    def about(self) -> list[str]:
        rollout, rows = self.settings.rollout, self.generation.prompts.epoch
        return [
            f"{rows} prompts an epoch ({len(self.rows.skipped)} skipped at start), "
            f"{rollout.rollout_batch_size} x {rollout.n_samples_per_prompt} samples a rollout, "
            f"{self.updates} update(s) on each, {self.steps} rollouts"
        ]


def offload_of(settings: Settings, engine: TrainEngine) -> Offload | None:
    """What moves a colocated trainer out of its engine's way; None: nothing has to."""
    rollout = settings.rollout
    if not settings.cluster.colocate or rollout.debug_rollout_only or rollout.debug_train_only:
        return None
    return Offload(engine, settings.cluster.trainer_offload)


def check_colocated(settings: Settings) -> None:
    """InputError: trainer and engine cannot take turns."""
    if not settings.cluster.colocate:
        return
    if settings.engine.engine in ("embedded", "vllm"):
        raise InputError(
            f"--colocate needs an engine whose memory can come and go, and --engine is "
            f"{settings.engine.engine}: use sglang or serve"
        )
    if settings.rollout.max_staleness:
        raise InputError(
            f"--max_staleness {settings.rollout.max_staleness} generates while training, and "
            "--colocate takes turns: leave one out"
        )


def updates_of(settings: Settings, samples: int) -> int:
    """Optimizer steps on the samples of a rollout. InputError: they cannot be shared out."""
    wanted, rows = settings.rollout.num_steps_per_rollout, settings.batch.global_batch_size
    if settings.batch.grad_accum_steps is not None:
        raise InputError("--grad_accum_steps has no meaning with --trainer grpo; leave it out")
    if rows is None:
        steps = wanted or 1
        if samples % steps:
            raise InputError(
                f"--num_steps_per_rollout {steps}: {samples} samples of a rollout cannot be dealt "
                "into as many equal parts"
            )
        return steps
    if samples % rows or (wanted is not None and wanted * rows != samples):
        raise InputError(
            f"--global_batch_size {rows} samples"
            + (f" x --num_steps_per_rollout {wanted}" if wanted else "")
            + f" must make up the {samples} samples of a rollout (--rollout_batch_size x "
            "--n_samples_per_prompt)"
        )
    return samples // rows
