"""The generating half of an RL run: prompts and an engine on the main rank, samples on all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch

from vireo.data.endless import Endless
from vireo.data.mixture import Mixture
from vireo.data.prompt import Prompt
from vireo.errors import InputError, RowError, VireoError
from vireo.models.build import empty_policy
from vireo.rewards import Rewards
from vireo.rl.figures import rollout_figures
from vireo.rollout.bridge import VLMRolloutEngine
from vireo.rollout.buffer import DataBuffer, Group
from vireo.rollout.engine import RolloutEngine
from vireo.rollout.manager import Prompts, RolloutManager
from vireo.rollout.open import engine_urls, open_engine
from vireo.rollout.sample import Sample, Sampling
from vireo.rollout.session import RolloutSession
from vireo.trainers.base import Run
from vireo.weights.named import Names, shapes
from vireo.weights.source import Shared, Sizes, Tensors, Weights, sizes_of
from vireo.weights.trained import for_engine
from vireo.weights.ways import packed, way


class Generation:
    """Used by `with`, after the model is built. Every rank calls its methods; those but `prompt`
    are collective.

    With one rank, the embedded engine and no staleness, the engine computes with the very weights
    in training; elsewhere it has its own, which `sync` sends.
    """

    def __init__(
        self,
        run: Run,
        rows: Mixture,
        evals: dict[str, Mixture],
        *,
        longest: int,
        refused: Callable[[RowError], None] | None,
    ):
        settings = run.settings
        self.run, self.evals, self.longest, self.refused = run, evals, longest, refused
        self.prompts = Endless(rows, settings.run.seed, settings.data.shuffle)
        rollout, rewards = settings.rollout, settings.rewards
        self.size, self.n = rollout.rollout_batch_size, rollout.n_samples_per_prompt
        self.at_once = rollout.over_sampling_batch_size or self.size
        self.sampling = Sampling(
            max_new_tokens=rollout.rollout_max_response_len,
            temperature=rollout.rollout_temperature,
            top_p=rollout.rollout_top_p,
            top_k=rollout.rollout_top_k,
            seed=settings.run.seed,
        )
        self.buffer = DataBuffer(
            max_staleness=rollout.oldest,
            filters=rollout.dynamic_sampling_filter or (),
            go_on=rollout.partial_rollout,
            version="0",
        )
        if rewards.reward is None:
            raise InputError("--reward is missing: what a response is worth; `vireo rewards`")
        self.rewards = Rewards(
            rewards.reward,
            rewards.reward_weights,
            timeout=rewards.reward_timeout,
            url=rewards.reward_url,
        )
        self.ahead = rollout.max_staleness
        embedded = settings.engine.engine == "embedded"
        self.shared = embedded and run.parallel.world == 1 and not self.ahead
        self.replay = rollout.debug_train_only is not None  # then nothing is generated
        self.session: RolloutSession | None = None
        self._asked: dict[str, Prompt] = {}  # by group, of the samples of this step
        self._sizes: Sizes | None = None  # of what is sent, always the same

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        if not self.run.parallel.main or self.replay:
            yield
            return
        bridge = VLMRolloutEngine(self._engine(), self.run.renderer)
        with RolloutSession(bridge, self.buffer, ahead=self.ahead) as self.session:
            self.session.manager = self._manager(
                self.buffer, self.prompts, self.n, refused=self.refused, keep=2 * self.at_once
            )
            yield

    def collect(self, stop: Callable[[], object]) -> list[Group] | None:
        """The groups of the next step, on every rank; None: it is to stop."""

        def get() -> list[Group] | None:
            assert self.session is not None
            return self.session.collect(self.size, self.at_once - self.size, stop=stop)

        self._asked.clear()
        groups = self._on_main(get)
        if self.shared:
            self.run.built.engine.reshard()
        return groups

    def prompt(self, sample: Sample) -> Prompt:
        """What a collected sample answers: made once for its group, on this rank."""
        if sample.group not in self._asked:
            kept = None if self.session is None else self.session.prompt(sample.group)
            made = kept or self.run.renderer.rollout(sample.conversation)
            self._asked[sample.group] = made
        return self._asked[sample.group]

    def sync(self, version: int) -> None:
        """The engine, if there is one, gets the weights as they are now."""
        if self.replay:
            return
        weights = self._weights(version)

        def send() -> None:
            assert self.session is not None
            self.session.update(weights, str(version))

        self._on_main(send)

    def rest(self) -> None:
        """The engine gives its memory to the trainer, until `sync` and `rise`."""

        def rest() -> None:
            assert self.session is not None
            self.session.rest()

        self._on_main(rest)

    def rise(self) -> None:
        """The engine, which has new weights, generates again."""

        def rise() -> None:
            assert self.session is not None
            self.session.rise()

        self._on_main(rise)

    def evaluate(self) -> dict[str, float]:
        """Mean rewards on the held-out prompts: `eval_reward` over all of them, and by file and
        reward where there are several."""

        def answer() -> dict[str, float]:
            assert self.session is not None
            found: dict[str, float] = {}
            every: list[Group] = []
            n = self.run.settings.rollout.n_samples_per_eval_prompt
            for name, rows in self.evals.items():
                buffer = DataBuffer(prompts=len(rows), version="0")
                self.session.fill(self._manager(buffer, rows, n))
                groups = buffer.get(buffer.waiting)
                every += groups
                if len(self.evals) > 1:
                    found[f"eval_reward/{name}"] = rollout_figures(groups)["reward"]
            figures = rollout_figures(every)
            names = [n for n in figures if n.startswith("reward/")]
            if len(names) > 1:
                found |= {f"eval_{name}": figures[name] for name in names}
            return found | {
                "eval_reward": figures["reward"],
                "eval_response_length": figures["response_length/mean"],
                "eval_truncated": figures["truncated"],
                "eval_samples": figures["samples"],
            }

        figures = self._on_main(answer)
        if self.shared:
            self.run.built.engine.reshard()
        return figures

    def state(self) -> dict[str, Any]:
        """The buffer's, on the main rank."""
        if self.session is None:
            return self.buffer.state() if self.replay else {}
        return self.session.state()

    def metrics(self) -> dict[str, float]:
        found = {} if self.session is None else self.session.metrics()
        return {f"buffer/{name}": value for name, value in found.items()}

    # -- parts -------------------------------------------------------------------------------

    def _engine(self) -> RolloutEngine:
        run = self.run
        engine, device = run.built.engine, run.parallel.device
        if self.shared:
            from vireo.rollout.embedded import EmbeddedEngine

            return EmbeddedEngine(
                engine.policy,
                run.renderer,
                device,
                shares_weights=True,
                autocast=engine.autocast,
            )
        return open_engine(
            run.settings.engine,
            run.model_folder,
            run.renderer,
            device=device,
            dtype=run.built.compute,
        )

    def _manager(
        self, buffer: DataBuffer, prompts: Prompts, n: int, **options: Any
    ) -> RolloutManager:
        assert self.session is not None
        return RolloutManager(
            self.session.rollouts,
            buffer,
            prompts,
            self.sampling,
            n,
            at_once=self.at_once,
            rewards=self.rewards,
            longest=self.longest,
            fetch=self.run.settings.engine.allow_image_urls,
            **options,
        )

    def _weights(self, version: int) -> Weights:
        if self.shared:
            return Shared()
        run, built = self.run, self.run.built
        scale = None if built.adapters is None else built.adapters["alpha"] / built.adapters["r"]
        names, like = self._names

        def named() -> Iterator[tuple[str, torch.Tensor]]:
            return for_engine(built.engine.policy, names, built.compute, like, scale)

        source = named
        if run.parallel.world > 1:
            # Gathering is collective and is done once; sending, to each engine, is not.
            kept = [(name, value.cpu()) for name, value in named() if run.parallel.main]
            source = lambda: iter(kept)  # noqa: E731
        if not run.parallel.main or run.settings.engine.engine == "embedded":
            return Tensors(source)
        engine, cluster = run.settings.engine, run.settings.cluster
        urls = engine_urls(engine)
        self._sizes = self._sizes or sizes_of(source)
        return packed(
            way(engine.weight_sync, engine.engine, urls, cluster.rollout_num_gpus_per_engine),
            source,
            str(version),
            sizes=self._sizes,
            # Of an engine elsewhere it is not known whether it sees this process's GPU.
            on_gpu=run.parallel.world == 1 and (cluster.colocate or not urls),
            urls=urls,
            model=run.model_folder,
            folder=run.output,
        )

    @cached_property
    def _names(self) -> tuple[Names, list[str]]:
        """For every sync: names of the model, and those of the engine's checkpoint."""
        run = self.run
        plain = empty_policy(run.renderer.config, run.family).hf
        return Names(plain, run.family), list(shapes(run.model_folder))

    def _on_main(self, call: Callable[[], Any]) -> Any:
        """What `call` returns on the main rank, on every rank; what it raises ends all of them."""
        parallel = self.run.parallel
        error: Exception | None = None
        result = None
        if parallel.main:
            try:
                result = call()
            except Exception as raised:
                error = raised
        if parallel.world == 1 and error is None:
            return result
        said = None if error is None else f"{type(error).__name__}: {error}"
        said, result = parallel.gather((said, result))[0]
        if error is not None:
            raise error
        if said is not None:
            raise VireoError(f"the main rank ended: {said}")
        return result


def eval_files(given: list[str] | None) -> dict[str, str]:
    """Name -> file of --eval_prompt_data, in which a name may stand before each file."""
    found: dict[str, str] = {}
    name: str | None = None
    for word in given or []:
        is_file = "/" in word or "." in word
        if not is_file:
            if name is not None:
                raise InputError(f"--eval_prompt_data: expected the file of {name}, found {word}")
            name = word
            continue
        key = name or word.rpartition("/")[2].partition(".")[0]
        if key in found:
            raise InputError(f"--eval_prompt_data: two files are called {key}; name them NAME,FILE")
        found[key], name = word, None
    if name is not None:
        raise InputError(f"--eval_prompt_data: {name} has no file behind it")
    return found
