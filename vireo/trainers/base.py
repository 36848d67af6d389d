"""What every run has: a model, a renderer, folders, checkpoints, a beginning and an end."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from vireo import parallel as parallel_module
from vireo.data.ragged import Batch
from vireo.data.render import open_renderer
from vireo.errors import InputError, VireoError
from vireo.models.lora import summary
from vireo.parallel import Parallel
from vireo.report import trackers
from vireo.report.profile import profiled
from vireo.report.run_folder import RunFolder
from vireo.settings import Settings
from vireo.trainers.build import Built, build_engine
from vireo.trainers.setup import be_deterministic, find_checkpoint, run_paths
from vireo.trainers.stopping import Stopping
from vireo.training import checkpoint
from vireo.training.alarms import complaint, look
from vireo.training.engine import TrainEngine
from vireo.training.export import copy_side_files, export
from vireo.training.hub import check_push, push

R = TypeVar("R", bound="Run")


def run(settings: Settings, make: Callable[[Settings, Parallel], Run]) -> int:
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
        made = make(settings, parallel)
        with made.folder:
            return made.run()
    finally:
        parallel.close()


class Run:
    """A trainer's run. `step` counts its steps; `built` is there once the model is."""

    rows: Any  # the training data: its length, `digest` and `skipped`
    steps: int
    built: Built
    tick: Callable[[], None]  # to be called at the end of each step

    def __init__(self, settings: Settings, parallel: Parallel):
        self.settings, self.parallel = settings, parallel
        random.seed(settings.run.seed + parallel.rank)
        torch.manual_seed(settings.run.seed + parallel.rank)
        self.renderer = open_renderer(settings)
        self.model_folder = self.renderer.model_path
        self.family = self.renderer.family
        packing = settings.batch.packing
        self.packing = self.family.can_pack if packing is None else packing
        if self.packing and not self.family.can_pack:
            raise InputError(f"{self.family.name} rows cannot be packed: set --packing false")
        self.notices: list[str] = []

    def open(self) -> dict[str, Any]:
        """Finds the folders, and the checkpoint to go on from; its progress, {} for a new run."""
        settings, parallel = self.settings, self.parallel
        self.output, self.saves = run_paths(settings, parallel)
        self.start_from = find_checkpoint(settings, self.saves, parallel)
        done = checkpoint.verify(self.start_from, parallel) if self.start_from else {}
        earlier = self.output / "metrics.jsonl"
        if settings.run.resume is None and parallel.gather(earlier.exists())[0]:
            raise InputError(
                f"{self.output} holds an earlier run (or one that is running): choose another "
                "--output_dir, or go on with --resume auto"
            )
        self.step, self.position = done.get("step", 0), done.get("position", 0)
        self.started_at, self.saved = self.step, self.start_from
        return done

    def make_folder(self, done: dict[str, Any]) -> None:
        self.folder = RunFolder(self.output, self.settings, self.parallel.main, done.get("step"))

    def run(self) -> int:
        settings, parallel = self.settings, self.parallel
        self.prepare()
        self.built = build_engine(
            settings, self.renderer, parallel, packing=self.packing, start_from=self.start_from
        )
        self.notices += self.built.notices
        self.folder.begin()
        self._greet(self.built.engine)
        with Stopping(parallel) as stopping:
            with self._profiled() as self.tick:
                stopped = self.train(self.built.engine, stopping)
            if stopped:
                self.folder.say(
                    f"stopped by {signal.Signals(stopped).name} after step {self.step}, which is "
                    "saved; go on with --resume auto"
                )
            else:
                if settings.run.push_to_hub and parallel.main:
                    self._push(settings.run.push_to_hub)
                self.folder.say(
                    f"done: {self.step} steps{self.last_words()}, run folder {self.output}"
                )
            self.folder.close()
            parallel.barrier()  # a rank that left would have its launcher end the others
        return 128 + stopped if stopped else 0

    def _profiled(self) -> contextlib.AbstractContextManager[Callable[[], None]]:
        if not self.settings.run.profile:
            return contextlib.nullcontext(lambda: None)
        rank, device = self.parallel.rank, self.parallel.device
        return profiled(self.output / "profile", rank, device, self.folder.say)

    # -- a trainer's own -----------------------------------------------------------------------

    def prepare(self) -> None:
        """Before the model is built."""

    def train(self, engine: TrainEngine, stopping: Stopping) -> int:
        """The steps, `tick` at the end of each; the signal that ended them early, or 0."""
        raise NotImplementedError

    def about(self) -> list[str]:
        """Lines about data and steps, for the person."""
        return []

    def last_words(self) -> str:
        return ""

    # -- shared --------------------------------------------------------------------------------

    def check(self, engine: TrainEngine, batches: list[Batch]) -> dict[str, float]:
        """The values of this step's alarms; a failed one is said, or stops the run."""
        run = self.settings.run
        if not run.check_steps or self.step % run.check_steps:
            return {}
        found = look(engine, batches)
        wrong = complaint(found, self.built.compute)
        if wrong and run.check_action == "stop":
            raise VireoError(f"step {self.step + 1}: {wrong} (--check_action warn goes on)")
        if wrong:
            self.folder.say(f"warning: {wrong}")
        return found

    def save(
        self,
        engine: TrainEngine,
        progress: dict[str, Any],
        more: Callable[[Path], None] | None = None,
    ) -> int:
        """A checkpoint of this step; the step. `progress`: what the trainer adds to its record;
        `more` writes other files of its own into it."""
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
                "digest": self.rows.digest,
                "adapters": self.built.adapters,
                "run_folder": str(self.output.resolve()),
                "base_model": None if name == self.model_folder else name,  # a Hub name
                "settings": self.settings.model_dump(mode="json", by_alias=True),
                **progress,
            },
            self._write_hf,
            full=self.settings.fsdp.checkpoint == "full",
            more=more,
        )
        self.saved = path
        if self.parallel.main:
            try:
                checkpoint.prune(self.saves, self.settings.run.keep_checkpoints)
            except OSError as error:  # the run can do without; the next save tries again
                self.folder.say(f"warning: an older checkpoint cannot be removed: {error}")
        self.folder.say(f"saved {path} in {time.perf_counter() - started:.1f} s")
        return self.step

    def check_same(self, file: str, rows: Any) -> None:
        seen = self.parallel.gather(rows.digest)
        for rank, other in enumerate(seen):
            if other != seen[0]:
                raise InputError(
                    f"{file}: rank {rank} sees other rows than rank 0: every rank must read the "
                    "same file"
                )

    def check_unchanged(self, *values: tuple[str, Any, Any]) -> None:
        """(what, before, now) of all that gives a position in the data its meaning."""
        for what, old, new in values:
            if old != new:
                raise InputError(
                    f"{self.start_from} was trained with {what} {old}, found {new}: the position "
                    "in the data would mean other rows; resume with the same file and settings"
                )

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
        for line in self.about():
            say(line)
        if self.built.adapters is not None:
            modules = self.built.adapters["modules"]
            say(f"adapters of rank {self.built.adapters['r']} on {len(modules)} linear modules:")
            say(f"  {summary(modules)}")
        for error in self.rows.skipped[:5]:
            say(f"skipped {error}")
        if self.start_from is not None:
            say(f"resumed from {self.start_from} at step {self.step}")
        for notice in self.notices:
            say(f"note: {notice}")
