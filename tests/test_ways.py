"""How new weights reach an engine, how trainer and engine take turns, engines that come back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from tests.ranks.cases import engine_for
from tests.rl import flags, records, train, write_prompts
from tests.rows import write_rows
from tests.stub_engine import StubEngine
from tests.tiny_models import tiny
from vireo import parallel as parallel_module
from vireo.data.conversation import read_rows
from vireo.data.ragged import Batch
from vireo.errors import InputError
from vireo.rollout import several
from vireo.rollout.engine import EngineGone
from vireo.rollout.sample import Request, Sampling
from vireo.rollout.several import SeveralEngines
from vireo.settings import load_settings
from vireo.trainers import registry
from vireo.training.offload import Offload
from vireo.weights.folder import write_weights
from vireo.weights.source import Broadcast, Folder, Tensors
from vireo.weights.ways import is_here, packed, way

FAMILY = "qwen2_5_vl"
HERE, THERE = "http://127.0.0.1:30000", "http://192.0.2.77:30000"


@pytest.mark.parametrize(
    ("chosen", "engine", "urls", "gpus", "expected"),
    [
        (None, "sglang", [], 1, "shared"),
        (None, "sglang", [HERE, "http://localhost:1"], 1, "shared"),
        (None, "sglang", [HERE, THERE], 1, "group"),
        (None, "sglang", [HERE], 2, "disk"),
        (None, "vllm", [HERE], 1, "disk"),
        ("group", "vllm", [HERE], 1, "group"),
    ],
)
def test_the_way_that_fits(chosen, engine, urls, gpus, expected) -> None:
    assert way(chosen, engine, urls, gpus) == expected


def test_this_machines_own_address_is_here() -> None:
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.77", 9))
        own = probe.getsockname()[0]
    assert is_here(f"http://{own}:1")
    assert not is_here(THERE)


@pytest.mark.parametrize("shard_bytes", [1 << 30, 100_000])
def test_a_folder_of_weights_loads_as_the_model(shard_bytes: int, tmp_path: Path) -> None:
    model = transformers.AutoModelForImageTextToText.from_pretrained(tiny(FAMILY))
    saved = tmp_path / "saved"
    model.save_pretrained(saved)
    from safetensors.torch import load_file

    named = {n: t for file in saved.glob("*.safetensors") for n, t in load_file(file).items()}
    write_weights(tmp_path / "out", str(tiny(FAMILY)), iter(named.items()), shard_bytes)
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes < 1 << 30)
    again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_newer_folder_takes_the_place_of_the_older(tmp_path: Path) -> None:
    def named() -> Any:
        return iter([("a", torch.ones(2))])

    options = {"urls": [HERE], "model": str(tiny(FAMILY)), "folder": tmp_path}
    for version in ("3", "4", "4"):
        source = packed("disk", named, version, **options)
        assert isinstance(source, Folder)
        assert [p.name for p in tmp_path.iterdir()] == [f"weights-{version}"]
    assert isinstance(packed("shared", named, "5", **options), Tensors)
    group = packed("group", named, "5", **options)
    assert isinstance(group, Broadcast)
    assert group.address == "127.0.0.1"


# -- one process, an engine that is a server -----------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        ["--weight_sync=shared"],
        ["--colocate", "--save_steps=1"],
        pytest.param(["--weight_sync=group"], marks=pytest.mark.slow),
        pytest.param(["--weight_sync=disk"], marks=pytest.mark.slow),
        pytest.param(["--colocate", "--trainer_offload=optimizer"], marks=pytest.mark.slow),
    ],
)
def test_a_server_gives_the_run_of_the_engine_in_the_process(more, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "data", [0, 1, 2, 0, 1, 0])
    held = [f"--eval_prompt_data={prompts}", "--eval_interval=2"]
    own = records(train(tiny(FAMILY), prompts, tmp_path / "own", *held))
    other = records(
        train(tiny(FAMILY), prompts, tmp_path / "other", "--engine=serve", *held, *more)
    )
    for key in ("reward", "loss", "grad_norm"):
        assert [r[key] for r in own] == pytest.approx([r[key] for r in other], rel=1e-5, abs=1e-7)
    assert ("seconds/swap" in other[0]) == ("--colocate" in more)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--colocate"], "--engine is embedded: use sglang or serve"),
        (["--colocate", "--engine=vllm"], "--engine is vllm"),
        (["--colocate", "--engine=serve", "--max_staleness=1"], "leave one out"),
    ],
)
def test_who_cannot_take_turns(more: list[str], says: str, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "data", [0])
    settings = load_settings(flags(tiny(FAMILY), prompts, tmp_path / "run", *more))
    with pytest.raises(InputError, match=says):
        registry.find("grpo")(settings)


@pytest.mark.parametrize("what", ["all", "optimizer", "none"])
def test_training_does_not_notice_that_it_was_moved_away(what: str, tmp_path: Path) -> None:
    rows = read_rows(write_rows(tmp_path / "data", [1, 0, 2]))

    def losses(offload: bool) -> list[float]:
        torch.manual_seed(0)
        engine, renderer = engine_for(str(tiny(FAMILY)), parallel_module.start(shard=True))
        batches = [Batch.of([renderer.example(rows[i]) for i in range(len(rows))])]
        mover, found = Offload(engine, what), []
        for _ in range(3):
            found.append(engine.step(batches, 1.0).loss)
            if offload:
                mover.away()
                mover.away()
                empty = [p.to_local().untyped_storage().nbytes() == 0 for p in _parameters(engine)]
                assert all(empty) == (what == "all")
                states = [v for s in engine.optimizer.state.values() for v in s.values()]
                sizes = [s.to_local().untyped_storage().nbytes() for s in states if s.dim()]
                assert (sum(sizes) == 0) == (what != "none")
                mover.back()
                mover.back()
        return found

    assert losses(True) == losses(False)


def _parameters(engine: Any) -> list[Any]:
    return list(engine.policy.parameters())


# -- engines that come back ----------------------------------------------------------------------


class Mortal(StubEngine):
    """Gone while `dead`; remembers the weights that it was sent."""

    def __init__(self) -> None:
        super().__init__(fail=self._check)
        self.dead = False
        self.sent: list[str] = []

    def _check(self, request: Any) -> None:
        if self.dead:
            raise EngineGone("it is dead")

    async def start(self) -> None:
        if self.dead:
            raise EngineGone("nobody listens")
        await super().start()
        self.weights = "0"

    async def update_weights(self, weights: Any, version: str) -> None:
        self._check(None)
        self.sent.append(version)
        self.weights = version


def ask(group: str) -> Any:
    example = SimpleNamespace(fields={"input_ids": torch.tensor([1, 2])})
    prompt: Any = SimpleNamespace(key=group, example=example, expanded=[1, 2])
    return Request(prompt, Sampling(4, seed=0), (2,), (), group=group)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several, "_AGAIN_S", 0.01)


@pytest.mark.usefixtures("quick")
def test_requests_wait_for_the_last_engine_and_it_gets_the_last_weights() -> None:
    async def run() -> None:
        one = Mortal()
        async with SeveralEngines([one], patience=20) as engines:
            await engines.update_weights(Tensors(lambda: iter(())), "7")
            one.dead = True
            waiting = asyncio.create_task(engines.generate(ask("0")))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            one.dead = False
            await asyncio.wait_for(waiting, 10)
            assert one.sent == ["7", "7"]  # again, after it had begun anew
            assert engines.weights == "7"

    asyncio.run(run())


@pytest.mark.usefixtures("quick")
def test_one_that_is_gone_joins_the_others_but_not_while_they_sleep() -> None:
    async def run() -> None:
        one, two = Mortal(), Mortal()
        async with SeveralEngines([one, two], patience=20) as engines:
            await engines.update_weights(Tensors(lambda: iter(())), "1")
            one.dead = True
            for group in "abcd":
                await engines.generate(ask(f"0.{group}"))
            assert engines._gone.keys() == {one}
            await engines.pause()
            one.dead = False
            await asyncio.sleep(0.2)
            assert engines._gone.keys() == {one}
            await engines.update_weights(Tensors(lambda: iter(())), "2")
            await engines.resume()
            while engines._gone:
                await asyncio.sleep(0.01)
            assert (one.sent, two.sent) == (["1", "2"], ["1", "2"])

    asyncio.run(run())


@pytest.mark.usefixtures("quick")
def test_patience_ends() -> None:
    async def run() -> None:
        one = Mortal()
        async with SeveralEngines([one], patience=0.2) as engines:
            one.dead = True
            with pytest.raises(EngineGone, match="no server is left: nobody listens"):
                await asyncio.wait_for(engines.generate(ask("0")), 10)

    asyncio.run(run())
