"""From the samples of a rollout to optimizer steps: log-probs, advantages, updates.

The log-probabilities before the first update ("old"), the reference's and those of the updates are
computed in the same micro-batches: other shapes of the same rows move bfloat16 ratios away from 1.
So where a rollout has one update, its forward has the old ones too, bit for bit, and no pass of
their own is run for them, but in steps that are checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vireo.data.packing import micro_batches
from vireo.data.prompt import Prompt
from vireo.data.ragged import Batch, Example
from vireo.data.render import Renderer
from vireo.data.response import with_response
from vireo.models.heads import Entropy, Softmax
from vireo.rl.advantages import advantages
from vireo.rl.figures import reward_of
from vireo.rl.losses import LossSpec, Stats, Tokens, aggregation, aggregation_weights, policy_loss
from vireo.rl.mismatch import Mismatch
from vireo.rl.reference import Reference
from vireo.rl.score import batch_scores
from vireo.rollout.sample import Sample
from vireo.settings.rl import AlgoSettings
from vireo.training.engine import StepResult, TrainEngine


@dataclass
class Learned:
    """`stats`: numbers of all updates. `logprobs` and `reference` (by sample, in order, the
    trainer's before the first update) and `advantages`, [response] each, on every rank. `seconds`:
    by phase. `skipped`: updates left out because nothing in them had an advantage."""

    stats: dict[str, float]
    logprobs: list[list[float]]
    advantages: list[Tensor]
    reference: list[list[float]] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    skipped: int = 0


@dataclass
class _Part:
    """This rank's share of one optimizer step: which samples, in which micro-batches."""

    batches: list[Batch]
    rows: list[list[int]]  # the samples of each micro-batch, by place in the rollout
    total: float  # what the step's loss sum is divided by


class Learner:
    """`chunk` rows or `budget` tokens a micro-batch, as in supervised training.

    `longest`: what the aggregation `fixed` takes for the length of every response.
    """

    def __init__(
        self,
        engine: TrainEngine,
        renderer: Renderer,
        algo: AlgoSettings,
        *,
        temperature: float,
        longest: int,
        chunk: int,
        budget: int | None,
        max_staleness: int = 0,
        reference: Reference | None = None,
    ):
        self.engine, self.renderer, self.algo = engine, renderer, algo
        self.softmax = Softmax(temperature, renderer.banned_ids)
        self.spec = LossSpec.of(algo, max_staleness)
        self.longest, self.chunk, self.budget = longest, chunk, budget
        self.reference = reference

    def learn(
        self,
        samples: Sequence[Sample],
        prompt: Callable[[Sample], Prompt],
        steps: int,
        rate: Callable[[int], float],
        look: Callable[[list[Batch]], dict[str, float]] = lambda _: {},
    ) -> Learned:
        """`steps` optimizer steps on the samples, which are the same on every rank; collective.

        `prompt` makes what a sample answers; a rank asks for its own share alone. `rate(i)`: the
        share of the highest learning rates in step i. `look` gets the first step's micro-batches
        before anything is updated. RowError: a row is longer than the budget.
        """
        clock = _Clock()
        parallel = self.engine.parallel
        parts = self._parts(samples, prompt, steps)
        clock("prepare")
        found = look(parts[0].batches)
        checked = parallel.max([len(found)])[0] > 0
        old: list[list[Tensor]] | None = None
        if steps > 1 or checked or self.algo.kl_coef or drops_out(self.engine.policy):
            old = [self._scores(self.engine, part, entropy=True) for part in parts]
            clock("logprobs")
        logprobs = None if old is None else self._everywhere(samples, parts, _first(old))
        reference: list[list[Tensor]] | None = None
        shown: list[list[float]] | None = None
        if self.reference is not None:
            with self.reference.ready() as other:
                reference = [[s[0] for s in self._scores(other, part)] for part in parts]
            shown = self._everywhere(samples, parts, reference)
            clock("reference")
        made = self._advantages(samples, logprobs, shown)
        stats, results, skipped = Stats.empty(), list[StepResult](), 0
        for number, part in enumerate(parts):
            if not self._teaches(samples, made, number, steps):
                skipped += 1
                continue
            objective = _Objective(self.spec, self.softmax, keep=old is None)
            for i, (batch, rows) in enumerate(zip(part.batches, part.rows)):
                objective.columns[id(batch)] = _columns(
                    [samples[row] for row in rows],
                    [made[row] for row in rows],
                    None if old is None else old[number][i][0],
                    None if reference is None else reference[number][i],
                )
            results.append(self.engine.step(part.batches, rate(number), objective, part.total))
            stats = stats + objective.stats
            if old is None:
                old = [[objective.kept[id(batch)] for batch in part.batches]]
        clock("update")
        if old is None:  # no update was of any use
            old = [self._scores(self.engine, part, entropy=True) for part in parts]
            clock("logprobs")
        logprobs = logprobs or self._everywhere(samples, parts, _first(old))
        entropy = [s[1] for scores in old for s in scores]
        sums = parallel.sum([sum(float(e.sum()) for e in entropy), sum(map(len, entropy))])
        figures = stats.over_ranks(parallel).figures()
        if "entropy" not in figures:
            figures["entropy"] = sums[0] / max(1.0, sums[1])
        figures |= found | self._mismatch(samples, logprobs)
        if results:
            figures["loss"] = sum(r.loss for r in results) / len(results)
            figures["grad_norm"] = max(r.grad_norm for r in results)
        return Learned(figures, logprobs, made, shown, clock.seconds, skipped)

    # -- shares --------------------------------------------------------------------------------

    def _parts(
        self, samples: Sequence[Sample], prompt: Callable[[Sample], Prompt], steps: int
    ) -> list[_Part]:
        parallel, parts = self.engine.parallel, []
        how = aggregation(self.algo)
        for number in range(steps):
            places = _of_step(len(samples), number, steps)
            weights, total = aggregation_weights(
                how, [samples[i].mask for i in places], self.longest
            )
            lengths = [len(samples[i].prompt_ids) + len(samples[i].response_ids) for i in places]
            mine = dealt(lengths, parallel.world)[parallel.rank]
            examples: list[Example] = []
            names: dict[int, int] = {}  # by the identity of a row's ids, which batches keep
            for k in mine:
                sample = samples[places[k]]
                example = with_response(
                    self._checked(prompt(sample), sample).example,
                    sample.response_ids,
                    self.renderer.positions,
                    weights[k].tolist(),
                )
                examples.append(example)
                names[id(example.fields["input_ids"])] = places[k]
            batches = micro_batches(
                examples,
                rows=self.chunk,
                budget=self.budget,
                can_mix=self.renderer.family.can_mix,
                packing=self.engine.packing,
            )
            rows = [[names[id(ids)] for ids in b.columns["input_ids"].rows] for b in batches]
            parts.append(_Part(batches, rows, total))
        return parts

    def _checked(self, prompt: Prompt, sample: Sample) -> Prompt:
        """ValueError: it is not what the response answers; an image may have changed on disk."""
        if prompt.expanded != sample.prompt_ids:
            raise ValueError(
                f"{sample.name}: its row makes other prompt ids now than when it was answered"
            )
        return prompt

    def _teaches(
        self, samples: Sequence[Sample], made: Sequence[Tensor], number: int, steps: int
    ) -> bool:
        """Whether a step has a gradient: AdamW would move the weights by its momentum without."""
        if self.spec.entropy_coef or (self.spec.kl is not None and self.spec.kl_coef):
            return True
        return any(bool(made[i].any()) for i in _of_step(len(samples), number, steps))

    # -- numbers -------------------------------------------------------------------------------

    def _scores(self, engine: TrainEngine, part: _Part, entropy: bool = False) -> list[Tensor]:
        """Of each micro-batch: log-probs [1, N] of its response tokens, and entropies [2, N]."""
        found = batch_scores(engine, part.batches, self.softmax, entropy)
        return found if entropy else [scores[None] for scores in found]

    def _everywhere(
        self, samples: Sequence[Sample], parts: Sequence[_Part], values: Sequence[Sequence[Tensor]]
    ) -> list[list[float]]:
        """What each rank has of its own samples' tokens, on all ranks, by sample."""
        mine: dict[int, list[float]] = {}
        for part, of_part in zip(parts, values):
            for rows, flat in zip(part.rows, of_part):
                lengths = [len(samples[row].response_ids) for row in rows]
                pieces = flat.cpu().split(lengths)
                mine |= {row: piece.tolist() for row, piece in zip(rows, pieces)}
        every: dict[int, list[float]] = {}
        for found in self.engine.parallel.gather(mine):
            every |= found
        return [every[i] for i in range(len(samples))]

    def _advantages(
        self,
        samples: Sequence[Sample],
        logprobs: Sequence[Sequence[float]] | None,
        reference: Sequence[Sequence[float]] | None,
    ) -> list[Tensor]:
        penalties = None
        if self.algo.kl_coef and reference is not None:
            assert logprobs is not None
            # k1, whose expectation is the divergence itself: rewards are summed, not differentiated
            penalties = [
                self.algo.kl_coef * (torch.tensor(p).double() - torch.tensor(q).double())
                for p, q in zip(logprobs, reference)
            ]
        return advantages(
            self.algo.advantage_estimator,
            [reward_of(sample) for sample in samples],
            [sample.group for sample in samples],
            [sample.mask for sample in samples],
            penalties=penalties,
            normalize=self.algo.normalize_advantages,
        )

    def _mismatch(
        self, samples: Sequence[Sample], logprobs: Sequence[Sequence[float]]
    ) -> dict[str, float]:
        """Every rank has all samples, so nothing is added up over them."""
        found = Mismatch.of(
            [sample.logprobs for sample in samples],
            [torch.tensor(p) for p in logprobs],
            [bool(sample.conversation.images) for sample in samples],
            [sample.mask for sample in samples],
        ).figures()
        return {f"mismatch/{name}": value for name, value in found.items()}


class _Objective:
    """The loss of one optimizer step, by the columns of its micro-batches. `keep`: nobody has the
    log-probabilities before it yet; they and entropies, [2, N] each, are `kept` by micro-batch."""

    def __init__(self, spec: LossSpec, softmax: Softmax, keep: bool):
        self.spec, self.keep = spec, keep
        self.softmax: Softmax | None = softmax
        self.entropy: Entropy = spec.entropy_coef > 0 or (keep and "detached")
        self.columns: dict[int, Mapping[str, Tensor]] = {}
        self.kept: dict[int, Tensor] = {}
        self.stats = Stats.empty()

    def loss(self, batch: Batch, scores: Tensor, weights: Tensor) -> Tensor:
        columns = {n: value.to(scores.device) for n, value in self.columns[id(batch)].items()}
        lp, entropy = (scores[0], scores[1]) if self.entropy else (scores, None)
        if self.keep:
            self.kept[id(batch)] = scores.detach()
            columns["old"] = lp.detach()
        if self.entropy == "detached":
            entropy = None
        loss, stats = policy_loss(
            self.spec, Tokens(logprobs=lp, weights=weights, entropy=entropy, **columns)
        )
        self.stats = self.stats + stats
        return loss


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def __call__(self, phase: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now


def dealt(lengths: Sequence[int], world: int) -> list[list[int]]:
    """The rows of each rank, ascending: the longest first, each to the rank with fewest tokens.
    The same wherever it is computed."""
    tokens, held = [0] * world, [list[int]() for _ in range(world)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(world), key=lambda r: (tokens[r], r))
        tokens[rank] += lengths[i]
        held[rank].append(i)
    return [sorted(mine) for mine in held]


def _of_step(samples: int, number: int, steps: int) -> range:
    """The samples of an optimizer step: as many in each, to one."""
    return range(round(number * samples / steps), round((number + 1) * samples / steps))


def _columns(
    samples: Sequence[Sample],
    made: Sequence[Tensor],
    old: Tensor | None,
    reference: Tensor | None,
) -> dict[str, Tensor]:
    """What `Tokens` has besides the model's own numbers, of the samples of one micro-batch."""
    engine = torch.tensor([g for sample in samples for g in sample.logprobs], dtype=torch.float32)
    counts = torch.tensor([len(sample.response_ids) for sample in samples])
    columns = {
        "engine": engine,
        "advantages": torch.cat([a.float() for a in made]),
        "response": torch.arange(len(samples)).repeat_interleave(counts),
    }
    more = {"old": old, "reference": reference}
    return columns | {name: value for name, value in more.items() if value is not None}


def _first(scores: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Of scores [2, N] by part and micro-batch: the log-probabilities."""
    return [[one[0] for one in part] for part in scores]


def drops_out(policy: nn.Module) -> bool:
    """Whether a forward in training is another one than in evaluation, by chance."""
    shares = [
        getattr(module, name, 0.0)
        for module in policy.modules()
        for name in (("p",) if isinstance(module, nn.Dropout) else ("dropout", "attention_dropout"))
    ]
    return any(isinstance(share, float) and share > 0 for share in shares)
