"""The embedded engine: what it answers is the trainer's own, however rows are put together."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig

from tests.minicpmv_stand_in import build as build_stand_in
from tests.tiny_models import FAMILIES, noise, policy, renderer, row, tiny, user
from vireo.data.prompt import Prompt
from vireo.data.ragged import TRAINER_KEYS, Batch
from vireo.data.render import Renderer
from vireo.data.response import with_response
from vireo.errors import InputError
from vireo.models.heads import Softmax
from vireo.models.lora import ADAPTER_WEIGHTS, Lora, add_adapters, peft_config, published_name
from vireo.models.names import is_adapter, named_parameters
from vireo.models.policy import Policy
from vireo.rollout import embedded as module
from vireo.rollout.contract import check
from vireo.rollout.embedded import EmbeddedEngine
from vireo.rollout.engine import EngineError, EngineGone, EngineRefused, WrongOrder
from vireo.rollout.sample import Generation, Request, Sampling
from vireo.rollout.sampler import Sampler
from vireo.weights.source import Broadcast, Folder, Shared, Tensors

VISION = [name for name, family in FAMILIES.items() if family.has_vision]
ONE = "qwen2_5_vl"
CPU = torch.device("cpu")


def in_loop(test: Callable[..., Coroutine]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def within() -> None:
            await asyncio.wait_for(test(*args, **kwargs), 60)

        asyncio.run(within())

    return run


@cache
def model(name: str) -> Policy:
    """Without the blank picture that training adds: text rows see none."""
    return Policy(policy(name).hf, FAMILIES[name], None)


def engine_of(name: str = ONE, **options: Any) -> EmbeddedEngine:
    return EmbeddedEngine(model(name), renderer(name), CPU, **options)


def prompt(made: Renderer, images: int, text: str) -> Prompt:
    pictures = [noise(56 + 28 * i, 56 + 56 * (i % 2), seed=i) for i in range(images)]
    return made.rollout(row(user(*range(images), text), images=pictures))


def request(made: Renderer, asked: Prompt | None = None, sampling: Any = None, **more: Any) -> Any:
    asked = asked or prompt(made, int(made.family.has_vision), "What is it?")
    options = {"stop_ids": made.stop_ids, "banned_ids": made.banned_ids} | more
    banned = options.pop("banned_ids")
    return Request(asked, sampling or Sampling(8, 0.0), banned=banned, **options)


def mixed(made: Renderer) -> list[Request]:
    """Rows of many lengths, with and without pictures, at several temperatures, as long as each
    wants: so they leave the batch one after the other."""
    vision = made.family.has_vision
    kinds = [(1, 0.0, 5), (0, 1.0, 24), (2, 0.7, 11), (0, 0.0, 17), (1, 1.3, 30), (1, 1.0, 3)]
    return [
        request(made, prompt(made, n * vision, "Say" + " more" * i), Sampling(most, t, seed=i))
        for i, (n, t, most) in enumerate(kinds)
    ]


def answers(engine: EmbeddedEngine, requests: Sequence[Request]) -> list[Generation]:
    async def ask() -> list[Generation]:
        async with engine:
            return await asyncio.gather(*(engine.generate(asked) for asked in requests))

    return asyncio.run(ask())


@cache
def answered(name: str) -> tuple[list[Request], list[Generation]]:
    requests = mixed(renderer(name))
    return requests, answers(engine_of(name), requests)


def scored(
    scorer: Policy, made: Renderer, requests: Sequence[Request], got: Sequence[Generation]
) -> list[torch.Tensor]:
    """The trainer's log-probs, rows of one softmax together, packed where the family can."""
    found: dict[int, torch.Tensor] = {}
    family = scorer.family
    kinds: dict[Any, list[int]] = {}
    for i, asked in enumerate(requests):
        images = 0 if family.can_mix else asked.prompt.example.images
        softmax = Softmax(asked.sampling.softmax_temperature, asked.banned)
        kinds.setdefault((softmax, images), []).append(i)
    for (softmax, _), rows in kinds.items():
        examples = []
        for i in rows:
            tokens = requests[i].response + got[i].ids
            mask = [0.0] * len(requests[i].response) + [1.0] * len(got[i].ids)
            prompted = requests[i].prompt.example
            examples.append(with_response(prompted, tokens, made.positions, mask))
        batch = Batch.of(examples)
        inputs = batch.pack() if family.can_pack else batch.pad(made.pad_id)
        with torch.no_grad():
            every = scorer(inputs, softmax)
        parts = every.split([len(requests[i].response) + len(got[i].ids) for i in rows])
        found |= {i: part[len(requests[i].response) :] for i, part in zip(rows, parts)}
    return [found[i] for i in range(len(requests))]


def agree(
    scorer: Policy, made: Renderer, requests: Sequence[Request], got: Sequence[Generation]
) -> None:
    gaps = [
        torch.tensor(one.logprobs) - logprobs
        for one, logprobs in zip(got, scored(scorer, made, requests, got))
    ]
    gap = torch.cat(gaps).abs()
    assert gap.max() <= 1e-4, gap.max()
    assert gap.exp().mean() - 1 <= 2e-5
    words = made.config.get_text_config().vocab_size
    for asked, one in zip(requests, got):
        check("a row", asked, one, words)


# -- every family ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_are_those_that_the_trainer_gives_the_same_tokens(name: str) -> None:
    requests, got = answered(name)
    assert len({len(one.ids) for one in got}) > 3
    agree(model(name), renderer(name), requests, got)
    # Generation leaves no offset of positions behind for a training forward to find.
    assert getattr(model(name).hf.model, "rope_deltas", None) is None


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_is_answered_alike_alone_and_in_any_batch(name: str) -> None:
    requests, got = answered(name)
    alone = answers(engine_of(name, max_rows=1), requests[2:5])
    assert [one.ids for one in alone] == [one.ids for one in got[2:5]]
    order = [4, 0, 3, 2]
    again = answers(engine_of(name), [requests[i] for i in order])
    assert [one.ids for one in again] == [got[i].ids for i in order]


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_is_transformers_own(name: str) -> None:
    made, hf = renderer(name), model(name).hf
    requests = [replace(r, sampling=Sampling(12, 0.0)) for r in mixed(made) if r.prompt.example]
    got = answers(engine_of(name), requests)
    greedy = GenerationConfig(
        do_sample=False,
        max_new_tokens=12,
        eos_token_id=list(made.stop_ids),
        pad_token_id=made.pad_id,
        suppress_tokens=list(made.banned_ids),
    )
    for asked, one in zip(requests, got):
        inputs = Batch.of([asked.prompt.example]).pad(made.pad_id, left=True)
        inputs = {n: v for n, v in inputs.items() if n not in TRAINER_KEYS}
        ids = hf.generate(**inputs, generation_config=greedy)[0, inputs["input_ids"].shape[1] :]
        assert one.ids == ids.tolist()
    if hasattr(hf.model, "rope_deltas"):
        hf.model.rope_deltas = None


@pytest.mark.parametrize("name", FAMILIES)
def test_finished_rows_leave_and_change_nothing_for_the_others(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, got = answered(name)
    widths: list[int] = []
    whole = Sampler.__call__

    def counted(self: Sampler, logits: torch.Tensor) -> Any:
        widths.append(len(logits))
        return whole(self, logits)

    monkeypatch.setattr(Sampler, "__call__", counted)
    answers(engine_of(name), requests)
    assert len(set(widths)) >= 3, "no row left its batch early"
    monkeypatch.setattr(module, "_LEAVE", 0)
    staying = answers(engine_of(name), requests)
    for one, other in zip(got, staying):
        assert one.ids == other.ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
@in_loop
async def test_a_look_shows_what_the_model_gets(name: str) -> None:
    made = renderer(name)
    asked = request(made, prompt(made, 2 * made.family.has_vision, "Both?"))
    async with engine_of(name) as engine:
        seen = await engine.look(asked)
        if made.family.has_vision:
            text = request(made, prompt(made, 0, "None?"))
            assert "embeddings" not in await engine.look(text)
    assert seen.pop("prompt_ids") == asked.prompt.expanded
    features = seen.pop("embeddings", None)
    fields = asked.prompt.example.fields
    expected = {n for n in fields if n in made.family.keys} | {"positions"}
    assert seen.keys() == expected
    for key in expected:
        assert torch.equal(seen[key], fields[key]), key
    if made.family.has_vision:
        assert features is not None
        images = {n: fields[n] for n in fields if n in made.family.keys}
        images = {n: v for n, v in images.items() if made.family.keys[n].kind != "token"}
        if made.family.expands:
            padded = {n for n in images if made.family.keys[n].kind == "padded"}
            images = {n: v[None] if n in padded else v for n, v in images.items()}
            with torch.no_grad():
                out = model(name).hf.model.get_image_features(**images).pooler_output
            out = torch.cat([part.flatten(0, -2) for part in out])
            assert torch.allclose(features, out, atol=1e-5)
        else:
            hidden = made.config.get_text_config().hidden_size
            assert features.shape[1] == hidden
            assert features.abs().sum() > 0


# -- the sampler -----------------------------------------------------------------------------------


def drawn(
    p: list[float], sampling: Sampling, count: int = 4000, banned: tuple[int, ...] = ()
) -> Any:
    """(share of each word, log-probability of each word that came) over as many seeds."""
    made = renderer("qwen3")
    asked = request(made, prompt(made, 0, "Hi"), banned_ids=banned)
    requests = [replace(asked, sampling=replace(sampling, seed=i)) for i in range(count)]
    sampler = Sampler(requests, [0] * count, CPU)
    logits = torch.tensor(p).log().expand(count, -1)
    tokens, logprobs = sampler(logits)
    shares = [float((tokens == word).float().mean()) for word in range(len(p))]
    return shares, {int(t): float(v) for t, v in zip(tokens, logprobs)}


P = [0.15, 0.4, 0.05, 0.3, 0.1]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 1}, {1}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.8}, {0, 1, 3}),
        ({"top_p": 0.8, "top_k": 2}, {1, 3}),
        ({"top_p": 0.5, "top_k": 4}, {1, 3}),
    ],
)
def test_top_p_and_top_k_cut_the_tail_off(options: dict[str, Any], kept: set[int]) -> None:
    """By hand; log-probabilities are of the whole distribution."""
    shares, logprobs = drawn(P, Sampling(4, **options))
    total = sum(P[word] for word in kept)
    for word, share in enumerate(shares):
        expected = P[word] / total if word in kept else 0.0
        error = 4.5 * math.sqrt(expected * (1 - expected) / 4000)
        assert abs(share - expected) <= error, (word, share, expected)
    for word, logprob in logprobs.items():
        assert logprob == pytest.approx(math.log(P[word]), abs=1e-6)


def test_temperature_and_banned_words_shape_the_distribution() -> None:
    shares, logprobs = drawn(P, Sampling(4, temperature=2.0), banned=(1,))
    weights = [math.sqrt(p) if word != 1 else 0.0 for word, p in enumerate(P)]
    for word, weight in enumerate(weights):
        expected = weight / sum(weights)
        assert abs(shares[word] - expected) <= 4.5 * math.sqrt(0.25 / 4000)
        assert (word in logprobs) == (word != 1)
        if word != 1:
            assert logprobs[word] == pytest.approx(math.log(expected), abs=1e-6)


def test_greedy_rows_and_drawn_ones_share_a_batch() -> None:
    made = renderer("qwen3")
    asked = request(made, prompt(made, 0, "Hi"), banned_ids=())
    kinds = [Sampling(4, 0.0), Sampling(4, 1.0, seed=1), Sampling(4, 0.5, top_k=1, seed=2)]
    sampler = Sampler([replace(asked, sampling=s) for s in kinds], [0] * 3, CPU)
    tokens, logprobs = sampler(torch.tensor(P).log().expand(3, -1))
    assert tokens[0] == tokens[2] == 1
    assert float(logprobs[0]) == pytest.approx(math.log(0.4), abs=1e-6)  # as at temperature 1
    sharp = [p**2 for p in P]
    assert float(logprobs[2]) == pytest.approx(math.log(0.16 / sum(sharp)), abs=1e-6)


@pytest.mark.parametrize("parallel", [False, True])
def test_no_rounding_names_a_token_without_probability(
    parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest random number there is, where the last words of the vocabulary are banned; and
    sums whose last bits go up and down, as hardware that adds in parallel makes them."""
    made = renderer("qwen3")
    asked = request(
        made, prompt(made, 0, "Hi"), Sampling(4, seed=0), banned_ids=tuple(range(900, 1000))
    )
    draw = torch.Generator().manual_seed(5)
    logits = torch.randn(500, 1000, generator=draw) * 3
    logits[:, 900:] += 50.0  # the model wants them
    sampler = Sampler([asked] * 500, [0] * 500, CPU)
    if parallel:
        whole = torch.Tensor.cumsum

        def uneven(self: torch.Tensor, dim: int) -> torch.Tensor:
            sums = whole(self, dim)
            sums[..., 950:] = sums[..., 950:].nextafter(torch.tensor(2.0).double()) + 2.0**-50
            return sums

        monkeypatch.setattr(torch.Tensor, "cumsum", uneven)
    for number in (1 - 2.0**-53, 0.0):
        sampler._rows["numbers"].fill_(number)
        tokens, logprobs = sampler(logits)
        assert int(tokens.max()) < 900
        assert logprobs.isfinite().all()


def test_rows_with_other_banned_words_share_a_batch() -> None:
    made = renderer("qwen3")
    sets = [(), (1,), (1, 3), (1,)]
    asked = [request(made, prompt(made, 0, "Hi"), banned_ids=banned) for banned in sets]
    sampler = Sampler(asked, [0] * 4, CPU)
    logits = torch.tensor(P).log()
    assert sampler(logits.expand(4, -1))[0].tolist() == [1, 3, 0, 3]
    sampler.select(torch.tensor([2, 0]))
    tokens, logprobs = sampler(logits.expand(2, -1))
    assert tokens.tolist() == [0, 1]
    expected = [math.log(0.15 / 0.3), math.log(0.4)]
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-6)


def test_shares_of_top_p_do_not_touch_the_other_rows_of_a_batch() -> None:
    """A whole distribution keeps its least likely token beside a row that is cut."""
    made = renderer("qwen3")
    asked = request(made, prompt(made, 0, "Hi"), Sampling(4, seed=0), banned_ids=())
    cut = replace(asked, sampling=Sampling(4, top_p=0.5, seed=0))
    sampler = Sampler([asked, cut], [0, 0], CPU)
    sampler._rows["numbers"].fill_(1 - 2.0**-53)
    # Before the least likely of them, the rounded sum is 1 already.
    logits = torch.cat([torch.zeros(1), torch.full((11,), -36.3)])
    tokens, _ = sampler(logits.expand(2, -1))
    assert tokens.tolist() == [11, 0]


# -- requests --------------------------------------------------------------------------------------


def test_a_banned_token_never_comes_even_where_the_model_wants_it() -> None:
    made = renderer(ONE)
    (free,) = answers(engine_of(), [request(made)])
    wanted = tuple(sorted({*free.ids} - {*made.stop_ids}))
    banned = request(made, banned_ids=(*made.banned_ids, *wanted))
    drawn = replace(banned, sampling=Sampling(8, 1.0, seed=2))
    got = answers(engine_of(), [banned, drawn])
    for one in got:
        assert not {*one.ids} & {*wanted}
    agree(model(ONE), made, [banned, drawn], got)


def test_a_stop_id_ends_a_row_and_is_kept() -> None:
    made = renderer(ONE)
    (free,) = answers(engine_of(), [request(made, stop_ids=())])
    assert (free.finish, free.matched, len(free.ids)) == ("length", None, 8)
    stop = next(token for token in free.ids if free.ids.index(token) >= 2)
    (one,) = answers(engine_of(), [request(made, stop_ids=(stop,))])
    assert one.ids == free.ids[: free.ids.index(stop) + 1]
    assert (one.finish, one.matched) == ("stop", stop)
    # Where both are true at once, it stopped.
    short = request(made, sampling=Sampling(len(one.ids), 0.0), stop_ids=(stop,))
    assert answers(engine_of(), [short])[0].finish == "stop"


def test_each_row_has_its_own_length() -> None:
    made = renderer(ONE)
    requests = [request(made, sampling=Sampling(n, 0.0), stop_ids=()) for n in (1, 7, 4)]
    got = answers(engine_of(), requests)
    assert [len(one.ids) for one in got] == [1, 7, 4]
    assert got[1].ids[:4] == got[2].ids
    full = request(made, sampling=Sampling(2, 0.0), response=got[0].ids * 2)
    assert answers(engine_of(), [full])[0].ids == []


@pytest.mark.parametrize("name", [ONE, "mllama", "minicpmv4_6", "gemma3"])
def test_a_response_that_goes_on_is_the_uninterrupted_one(name: str) -> None:
    made = renderer(name)
    asked = request(made, sampling=Sampling(24, 1.0, seed=7), stop_ids=())
    (whole,) = answers(engine_of(name), [asked])
    later = replace(asked, response=whole.ids[:9])
    other = replace(asked, sampling=Sampling(24, 1.0, seed=8))
    rest, different = answers(engine_of(name), [later, other])
    assert rest.ids == whole.ids[9:]
    assert different.ids != whole.ids
    assert rest.prompt_ids == asked.prompt.expanded + whole.ids[:9]
    agree(model(name), made, [later], [rest])


def test_without_a_seed_responses_differ() -> None:
    asked = request(renderer(ONE), sampling=Sampling(16, 1.0), stop_ids=())
    got = answers(engine_of(), [replace(asked, rid=str(i)) for i in range(3)])
    assert len({tuple(one.ids) for one in got}) == 3


def test_too_long_a_row_is_refused() -> None:
    made = renderer(ONE)
    with pytest.raises(InputError, match=r"max_new_tokens 4096 are more than the limit of 4096"):
        answers(engine_of(), [request(made, sampling=Sampling(4096))])


@in_loop
async def test_requests_of_one_moment_are_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    whole = EmbeddedEngine._generate
    monkeypatch.setattr(
        EmbeddedEngine, "_generate", lambda self, rows: (sizes.append(len(rows)), whole(self, rows))
    )
    made = renderer(ONE)
    async with engine_of(max_rows=3) as engine:
        await asyncio.gather(*(engine.generate(request(made)) for _ in range(7)))
    assert sizes == [3, 3, 1]


@in_loop
async def test_rows_that_cannot_mix_are_computed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[int]] = []
    whole = EmbeddedEngine._generate

    def counted(self: EmbeddedEngine, rows: Any) -> Any:
        batches.append([each.request.prompt.example.images for each in rows])
        return whole(self, rows)

    monkeypatch.setattr(EmbeddedEngine, "_generate", counted)
    made = renderer("mllama")
    requests = [request(made, prompt(made, n, "Hi")) for n in (1, 0, 1, 2, 0)]
    async with engine_of("mllama") as engine:
        got = await asyncio.gather(*(engine.generate(asked) for asked in requests))
    assert batches == [[1, 1], [0, 0], [2]]
    agree(model("mllama"), made, requests, got)


def test_a_model_with_code_of_its_own_generates(tmp_path: Any) -> None:
    folder = str(build_stand_in(tmp_path / "stand-in"))
    made = Renderer(folder, trust_remote_code=True)
    engine = EmbeddedEngine.of_folder(folder, made, device="cpu")
    requests = mixed(made)
    got = answers(engine, requests)
    assert len({len(one.ids) for one in got}) > 3
    agree(engine.policy, made, requests, got)
    alone = answers(engine, [requests[2]])
    assert alone[0].ids == got[2].ids

    async def look() -> dict[str, Any]:
        async with engine:
            return await engine.look(requests[2])

    seen = asyncio.run(look())
    fields = requests[2].prompt.example.fields
    assert seen["embeddings"].shape == ((fields["image_bound"] > 0).sum(), 64)
    assert all(torch.equal(seen[n], fields[n]) for n in (*made.family.keys, "positions"))


def test_a_folder_is_loaded_in_its_own_number_format_or_another(tmp_path: Any) -> None:
    made = renderer(ONE)
    engine = EmbeddedEngine.of_folder(tiny(ONE), made, device="cpu", max_rows=2)
    assert {p.dtype for p in engine.policy.parameters()} == {torch.float32}
    assert answers(engine, [request(made)])[0].ids == answers(engine_of(), [request(made)])[0].ids
    half = EmbeddedEngine.of_folder(tiny(ONE), made, torch.bfloat16, "cpu")
    assert {p.dtype for p in half.policy.parameters()} == {torch.bfloat16}
    (one,) = answers(half, [request(made)])
    assert len(one.ids) == len(one.logprobs) > 0


def test_an_adapter_folder_is_its_base_with_the_adapters(tmp_path: Path) -> None:
    made, lora = renderer(ONE), Lora(4, 8)
    trained = own().policy
    modules = add_adapters(trained.hf, trained.family, lora)
    draw = torch.Generator().manual_seed(0)
    weights = {n: p for n, p in named_parameters(trained.hf) if is_adapter(n)}
    for weight in weights.values():
        weight.data = 0.1 * torch.randn(weight.shape, generator=draw)
    save_file({published_name(n): w.data for n, w in weights.items()}, tmp_path / ADAPTER_WEIGHTS)
    about = peft_config(lora, modules)
    about.base_model_name_or_path = tiny(ONE)
    about.save_pretrained(tmp_path)
    (one,) = answers(EmbeddedEngine.of_folder(str(tmp_path), made, device="cpu"), [request(made)])
    agree(trained, made, [request(made)], [one])
    plain = scored(model(ONE), made, [request(made)], [one])[0]
    assert (plain - torch.tensor(one.logprobs)).abs().max() > 1e-3


# -- orders in the midst of a batch ----------------------------------------------------------------


class Stepper:
    """Holds the model in its forward number `at`, counted from 1, until it may go on."""

    def __init__(self, name: str = ONE):
        self.at, self.count, self.widths = 0, 0, list[int]()
        self._reached, self._go = threading.Event(), threading.Event()
        self._head = model(name).hf.lm_head

    def __enter__(self) -> Stepper:
        self._hook = self._head.register_forward_pre_hook(self._step)
        return self

    def __exit__(self, *error: Any) -> None:
        self._go.set()
        self._hook.remove()

    def _step(self, _module: Any, inputs: Any) -> None:
        self.count += 1
        self.widths.append(len(inputs[0]))
        if self.count == self.at:
            self._reached.set()
            assert self._go.wait(30)
            self._go.clear()

    async def reach(self, step: int) -> None:
        assert step > self.count
        self._reached.clear()
        self.at = step
        self._go.set() if self.count else None
        assert await asyncio.to_thread(self._reached.wait, 30)

    def go(self) -> None:
        self._go.set()


async def during(stepper: Stepper, step: int, order: Coroutine) -> None:
    """`order` is given while step `step` is computed, and has been obeyed."""
    await stepper.reach(step)
    task = asyncio.create_task(order)
    await asyncio.sleep(0.01)
    assert not task.done()
    stepper.go()
    await task


def long_ones(count: int = 3) -> list[Request]:
    made = renderer(ONE)
    return [request(made, sampling=Sampling(40, 1.0, seed=i), stop_ids=()) for i in range(count)]


@in_loop
async def test_abort_ends_rows_with_what_they_have() -> None:
    requests = long_ones()
    waiting = request(renderer(ONE))
    async with engine_of(max_rows=3) as engine:
        with Stepper() as stepper:
            tasks = [asyncio.create_task(engine.generate(asked)) for asked in requests]
            last = asyncio.create_task(engine.generate(waiting))
            await during(stepper, 4, engine.abort([requests[1].rid, "unknown"]))
            assert tasks[1].done()
            assert not tasks[0].done()
            cut = await tasks[1]
            assert (cut.finish, len(cut.ids), len(cut.logprobs)) == ("abort", 4, 4)
            assert not last.done()
            await engine.abort([waiting.rid])
            none = await last
            assert (none.finish, none.ids, none.spans) == ("abort", [], [])
            first, third = await tasks[0], await tasks[2]
            assert 2 in stepper.widths  # it left
        alone = await engine.generate(replace(requests[0], rid="again"))
    assert first.ids == alone.ids
    assert len(third.ids) == 40
    agree(model(ONE), renderer(ONE), [requests[1], waiting], [cut, none])


@in_loop
async def test_abort_of_all_and_pause_by_abort_end_everything() -> None:
    requests = long_ones()
    async with engine_of(max_rows=2) as engine:
        for order in (engine.abort, engine.pause):
            with Stepper() as stepper:
                tasks = [asyncio.create_task(engine.generate(asked)) for asked in requests]
                await during(stepper, 3, order())
            got = await asyncio.gather(*tasks)
            assert [len(one.ids) for one in got] == [3, 3, 0]
            assert {one.finish for one in got} == {"abort"}
        late = asyncio.create_task(engine.generate(requests[0]))
        await asyncio.sleep(0)
        await engine.pause()
        assert (await late).finish == "abort"
        late = asyncio.create_task(engine.generate(requests[0]))
        await asyncio.sleep(0.02)
        assert not late.done()
        assert (await engine.health()).ready is False
        await engine.resume()
        assert len((await late).ids) == 40


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@in_loop
async def test_rows_go_on_after_a_pause_as_if_there_were_none(mode: Any) -> None:
    requests = long_ones()
    async with engine_of(shares_weights=True) as engine:
        whole = await asyncio.gather(*(engine.generate(asked) for asked in requests))
        engine.weights = "one"
        with Stepper() as stepper:
            tasks = [asyncio.create_task(engine.generate(asked)) for asked in requests]
            await during(stepper, 5, engine.pause(mode))
            await asyncio.sleep(0.05)
            assert stepper.count == 5
            await engine.update_weights(Shared(), "two")
            await engine.resume()
            got = await asyncio.gather(*tasks)
            steps = stepper.count
    assert steps == 40
    for one, other in zip(whole, got):
        assert one.ids == other.ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert other.spans == [("one", 5), ("two", 35)]
    agree(model(ONE), renderer(ONE), requests, got)


@in_loop
async def test_rows_that_are_frozen_can_be_ended_or_put_back() -> None:
    requests = long_ones()
    async with engine_of() as engine:
        with Stepper() as stepper:
            tasks = [asyncio.create_task(engine.generate(asked)) for asked in requests]
            await during(stepper, 2, engine.pause("in_place"))
            with pytest.raises(WrongOrder, match="frozen"):
                await engine.sleep()
            await engine.abort([requests[0].rid])
            assert len((await tasks[0]).ids) == 2
            await engine.pause("in_place")
            await engine.pause("retract")
            assert stepper.count == 2
            assert not tasks[1].done()
            await engine.abort([requests[2].rid])
            assert len((await tasks[2]).ids) == 2
            await engine.resume()
            assert len((await tasks[1]).ids) == 40
            assert stepper.count == 40


@in_loop
async def test_an_abort_counts_more_than_a_retraction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it, after it, and once the rows have left the batch."""
    requests = long_ones(4)
    whole = EmbeddedEngine._generate

    def late(self: EmbeddedEngine, rows: Any) -> Any:
        out = whole(self, rows)
        self._loop.call_soon_threadsafe(self._end, [rows[2]])
        return out

    monkeypatch.setattr(EmbeddedEngine, "_generate", late)
    async with engine_of() as engine:
        with Stepper() as stepper:
            tasks = [asyncio.create_task(engine.generate(asked)) for asked in requests]
            await stepper.reach(2)
            first = asyncio.create_task(engine.abort([requests[0].rid]))
            await asyncio.sleep(0)
            pause = asyncio.create_task(engine.pause("retract"))
            await asyncio.sleep(0)
            second = asyncio.create_task(engine.abort([requests[1].rid]))
            await asyncio.sleep(0.01)
            assert not any(task.done() for task in (first, second, pause))
            stepper.go()
            await asyncio.gather(first, second, pause)
            got = [await task for task in tasks[:3]]
            assert [(one.finish, len(one.ids)) for one in got] == [("abort", 2)] * 3
            monkeypatch.undo()
            await engine.resume()
            assert len((await tasks[3]).ids) == 40
            assert stepper.widths[2:] == [1] * 38


@in_loop
async def test_an_update_waits_for_the_rows_that_are_computed() -> None:
    """And those behind them are answered by the new weights."""
    requests = long_ones()
    async with engine_of(max_rows=2, shares_weights=True) as engine:
        with Stepper() as stepper:
            tasks = [asyncio.create_task(engine.generate(asked)) for asked in requests]
            await stepper.reach(3)
            update = asyncio.create_task(engine.update_weights(Shared(), "two"))
            await asyncio.sleep(0.02)
            assert not update.done()
            assert engine.state.name == "updating"
            stepper.go()
            await update
            assert all(task.done() for task in tasks[:2])
            got = await asyncio.gather(*tasks)
    assert [one.spans for one in got] == [[("default", 40)]] * 2 + [[("two", 40)]]


@in_loop
async def test_a_caller_that_goes_away_takes_its_row_with_it() -> None:
    requests = long_ones()
    async with engine_of() as engine:
        with Stepper() as stepper:
            tasks = [asyncio.create_task(engine.generate(asked)) for asked in requests]
            await stepper.reach(3)
            tasks[1].cancel()
            await asyncio.sleep(0.01)
            stepper.go()
            got = await asyncio.gather(tasks[0], tasks[2])
            assert stepper.widths[:4] == [3, 3, 3, 2]
        assert [len(one.ids) for one in got] == [40, 40]


@in_loop
async def test_closing_ends_everything() -> None:
    engine = engine_of(max_rows=2)
    with pytest.raises(EngineGone, match="not started"):
        await engine.generate(request(renderer(ONE)))
    assert (await engine.health()).why == "it is closed"
    await engine.start()
    with Stepper() as stepper:
        tasks = [asyncio.create_task(engine.generate(asked)) for asked in long_ones()]
        await during(stepper, 3, engine.close())
        for task in tasks:
            with pytest.raises(EngineGone, match="was closed"):
                await task
        assert stepper.count == 3
    await engine.close()
    with pytest.raises(EngineGone):
        await engine.generate(request(renderer(ONE)))
    async with engine:  # and it can be started again, frozen rows are ended
        tasks = [asyncio.create_task(engine.generate(asked)) for asked in long_ones()]
        with Stepper() as stepper:
            await during(stepper, 2, engine.pause("in_place"))
    for task in tasks:
        with pytest.raises(EngineGone):
            await task


@in_loop
async def test_a_failure_in_the_thread_reaches_every_caller_and_the_engine_goes_on() -> None:
    requests = long_ones()

    def fail(_module: Any, _inputs: Any) -> None:
        raise RuntimeError("out of memory")

    async with engine_of(max_rows=2) as engine:
        hook = model(ONE).hf.lm_head.register_forward_pre_hook(fail)
        tasks = [asyncio.create_task(engine.generate(asked)) for asked in requests[:2]]
        done = await asyncio.gather(*tasks, return_exceptions=True)
        hook.remove()
        assert [str(error) for error in done] == [
            "generation failed: RuntimeError: out of memory"
        ] * 2
        assert all(isinstance(error, EngineError) for error in done)
        assert all(isinstance(error.__cause__, RuntimeError) for error in done)
        assert len((await engine.generate(requests[2])).ids) == 40


# -- memory and weights ----------------------------------------------------------------------------


def own(**options: Any) -> EmbeddedEngine:
    return EmbeddedEngine.of_folder(tiny(ONE), renderer(ONE), device="cpu", **options)


@in_loop
async def test_memory_is_given_back_and_weights_are_garbage_until_they_come() -> None:
    asked = request(renderer(ONE))
    async with own() as engine:
        first = await engine.generate(asked)
        with pytest.raises(WrongOrder, match="running, expected paused"):
            await engine.sleep()
        await engine.pause("retract")
        waiting = asyncio.create_task(engine.generate(asked))
        await asyncio.sleep(0)
        await engine.sleep()
        await engine.sleep(["weights"])
        assert sum(p.numel() for p in engine.policy.parameters()) == 0
        for call in (engine.resume, lambda: engine.generate(asked)):
            with pytest.raises(WrongOrder):
                await call()
        with pytest.raises(WrongOrder):
            await engine.update_weights(Folder(tiny(ONE)), "two")
        await engine.wake(["weights"])
        assert all(p.isnan().all() for p in engine.policy.parameters())
        tied = engine.policy.hf.lm_head.weight is engine.policy.hf.get_input_embeddings().weight
        assert tied == engine.policy.hf.config.get_text_config().tie_word_embeddings
        for call in (engine.resume, lambda: engine.generate(asked), engine.sleep):
            with pytest.raises(WrongOrder):
                await call()
        await engine.update_weights(Folder(tiny(ONE)), "two")
        with pytest.raises(WrongOrder, match="released"):
            await engine.resume()
        await engine.wake(["kv_cache"])
        assert not waiting.done()
        await engine.resume()
        assert (await waiting).ids == first.ids
        again = await engine.generate(asked)
    assert again.logprobs == pytest.approx(first.logprobs, abs=1e-6)
    assert (again.spans, first.spans) == ([("two", len(first.ids))], [("default", len(first.ids))])


@in_loop
async def test_shared_weights_stay_where_they_are() -> None:
    before = [p.clone() for p in model(ONE).parameters()]
    async with engine_of(shares_weights=True) as engine:
        await engine.pause()
        await engine.sleep()
        await engine.wake()
        with pytest.raises(WrongOrder):
            await engine.resume()
        with pytest.raises(EngineRefused, match="found Folder, expected Shared"):
            await engine.update_weights(Folder(tiny(ONE)), "two")
        await engine.update_weights(Shared(), "two")
        await engine.resume()
        assert (await engine.generate(request(renderer(ONE)))).spans[0][0] == "two"
    assert all(torch.equal(a, b) for a, b in zip(before, model(ONE).parameters()))


@in_loop
async def test_weights_of_another_process_are_refused() -> None:
    async with engine_of() as engine:
        with pytest.raises(EngineRefused, match="found Broadcast, expected Folder or Tensors"):
            await engine.update_weights(Broadcast(lambda: iter(())), "two")
        with pytest.raises(EngineRefused, match="found Shared"):
            await engine.update_weights(Shared(), "two")
        assert (engine.weights, engine.state.name) == ("default", "running")


@in_loop
async def test_tensors_become_the_weights() -> None:
    from vireo.weights.named import published

    asked = request(renderer(ONE))
    source = own().policy
    with torch.no_grad():
        source.hf.model.visual.merger.mlp[-1].weight.neg_()

    def named() -> Any:
        return published(source.hf, source.family, source.hf.state_dict().items())

    async with own() as engine:
        first = await engine.generate(asked)
        await engine.update_weights(Tensors(named), "two")
        second = await engine.generate(asked)
        assert second.spans[0][0] == "two"
        agree(source, renderer(ONE), [asked], [second])
        assert second.logprobs != pytest.approx(first.logprobs, abs=1e-3)

        def wrong() -> Any:
            return iter([*named(), ("model.no_such.weight", torch.zeros(2))])

        with pytest.raises(InputError, match=r"model\.no_such\.weight"):
            await engine.update_weights(Tensors(wrong), "three")
        assert (engine.weights, engine.state.name) == ("two", "running")
        assert (await engine.generate(asked)).logprobs == second.logprobs
        assert (await engine.checksums()).keys() == dict(named()).keys()
        await engine.pause()
        await engine.sleep()
        await engine.wake()
        # What does not come would stay garbage.
        with pytest.raises(InputError, match=r"has it, and it is not among"):
            await engine.update_weights(Tensors(lambda: iter([next(named())])), "three")
        assert engine.state.name == "resumed"
        await engine.update_weights(Tensors(named), "four")
        await engine.resume()
        assert (await engine.generate(asked)).logprobs == second.logprobs


@in_loop
async def test_an_update_that_breaks_off_leaves_nothing_usable() -> None:
    class Breaks:
        def from_disk(self, path: str) -> None:
            if path == "bad":
                raise InputError("model.x: shape [2], expected [3]")
            if path == "broken":
                raise OSError("disk")

        def check(self, shapes: Any, whole: bool) -> None: ...

        def named(self, pairs: Any) -> None:
            raise InputError("model.x came twice")

    asked = request(renderer(ONE))
    async with engine_of(receiver=Breaks()) as engine:
        with pytest.raises(InputError, match="expected"):
            await engine.update_weights(Folder("bad"), "two")
        assert len((await engine.generate(asked)).ids) > 0
        for broken in (Folder("broken"), Tensors(lambda: iter(()))):
            with pytest.raises(EngineError, match=r"update to 'two' failed: (disk|model\.x came)"):
                await engine.update_weights(broken, "two")
            assert (engine.state.name, engine.weights) == ("resumed", "default")
            with pytest.raises(WrongOrder):
                await engine.generate(asked)
        await engine.update_weights(Folder("good"), "three")
        await engine.resume()
        assert (await engine.generate(asked)).spans[0][0] == "three"


@in_loop
async def test_weights_that_are_no_numbers_are_an_error() -> None:
    async with own() as engine:
        with torch.no_grad():
            engine.policy.hf.lm_head.weight.fill_(torch.nan)
        for temperature in (0.0, 1.0):
            with pytest.raises(EngineError, match="log-probability is nan"):
                await engine.generate(request(renderer(ONE), sampling=Sampling(4, temperature)))


@in_loop
async def test_a_look_waits_for_nothing_in_a_paused_engine() -> None:
    async with engine_of() as engine:
        await engine.pause()
        with pytest.raises(WrongOrder, match="paused"):
            await engine.look(request(renderer(ONE)))
        health = await engine.health()
        assert (health.state, health.weights, health.why) == ("paused", "default", "it is paused")
        await engine.resume()
        assert (await engine.health()).ready
