"""Whatever way weights reach an engine, its own checksums say the same; what is left out is named.

`vireo serve` is a real one. Of a stock server there is what check-sync sees of it: its endpoints
for weights, over a model of its own, and checksums in its form: fused names, for each GPU.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from tests.faulty_server import FaultyServer
from tests.serving import serving
from tests.tiny_models import renderer as tiny_renderer
from tests.tiny_models import tiny
from vireo.checks.sync import Check, Syncs, check_sync, stored, turned
from vireo.cli import main
from vireo.errors import InputError
from vireo.models.build import whole_model
from vireo.rollout.embedded import EmbeddedEngine
from vireo.rollout.http import Http
from vireo.rollout.sglang import SglangEngine
from vireo.settings.rollout import EngineSettings
from vireo.weights.receive import Receiver

FAMILY = "qwen2_5_vl"
LINES = [
    *("disk, as computed here", "disk, turned weights", "disk, the model's again"),
    *("shared, turned weights", "shared, the model's again"),
    *("group, turned weights", "group, the model's again", "disk, the model folder"),
]


class Forgetful(Receiver):
    """Leaves the tensors `lost` (names in memory) as they are, by some ways."""

    def __init__(self, hf: Any, family: Any, lost: list[str], by: tuple[str, ...]):
        super().__init__(hf, family)
        self.lost, self.by = lost, by

    def from_disk(self, path: str) -> None:
        self._keeping("disk", lambda: Receiver.from_disk(self, path))

    def from_tensors(self, payloads: Any) -> None:
        self._keeping("shared", lambda: Receiver.from_tensors(self, payloads))

    def from_group(self, *given: Any) -> None:
        self._keeping("group", lambda: Receiver.from_group(self, *given))

    @torch.no_grad()
    def _keeping(self, way: str, call: Callable[[], None]) -> None:
        kept = {n: p.clone() for n, p in self.hf.named_parameters() if n in self.lost}
        call()
        for name, value in kept.items():
            if way in self.by:
                self.hf.get_parameter(name).copy_(value)


class Stock(FaultyServer):
    """The endpoints of a stock server for weights, over `receiver`'s model."""

    def __init__(self, receiver: Receiver, version: str, gpus: int = 1):
        super().__init__(version=version)
        self.receiver, self.gpus = receiver, gpus
        names = ("master_address", "master_port", "rank_offset", "world_size", "group_name")
        self.does: dict[str, Callable[[dict[str, Any]], object]] = {
            "/update_weights_from_disk": lambda b: receiver.from_disk(b["model_path"]),
            "/update_weights_from_tensor": lambda b: receiver.from_tensors(
                b["serialized_named_tensors"]
            ),
            "/init_weights_update_group": lambda b: receiver.init_group(*map(b.get, names)),
            "/update_weights_from_distributed": lambda b: receiver.from_group(
                b["names"], b["dtypes"], b["shapes"], b["group_name"]
            ),
            "/destroy_weights_update_group": lambda b: receiver.destroy_group(b["group_name"]),
        }

    async def _control(self, request: web.Request) -> web.Response:
        if request.path == "/weights_checker":
            ranks = [{"checksums": fused(self.receiver.checksums())}] * self.gpus
            return web.json_response({"success": True, "message": "", "ranks": ranks})
        if request.path in self.does:
            await asyncio.to_thread(self.does[request.path], await request.json())
        return await super()._control(request)


def fused(sums: dict[str, str]) -> dict[str, str]:
    """As stock SGLang calls and joins the tensors of a decoder, beside a buffer of its own."""
    parts: dict[str, list[str]] = {}
    for name, value in sums.items():
        for one in ("q_proj", "k_proj", "v_proj"):
            name = name.replace(f"self_attn.{one}", "self_attn.qkv_proj")
        parts.setdefault(name, []).append(value)
    found = {n: hashlib.sha256("".join(p).encode()).hexdigest()[:16] for n, p in parts.items()}
    return found | {"model.layers.0.self_attn.attn.k_scale": "f" * 16}


def checked(
    folder: Path,
    lost: list[str],
    by: tuple[str, ...],
    stock: str = "",
    only: str | None = None,
    gpus: int = 1,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[Check], list[str]]:
    """The checks, and the lines that were printed, of a server that loses tensors by some ways.
    `stock`: version of a stock server; else it is `vireo serve`, in `dtype`."""
    made, path, lines = tiny_renderer(FAMILY), tiny(FAMILY), list[str]()

    async def check(url: str) -> list[Check]:
        async with SglangEngine(Http(url), made) as client:
            syncs = Syncs(client, made, path, folder, [url], torch.float32, lines.append)
            return await syncs.run(only)

    async def run() -> list[Check]:
        hf = whole_model(made.config, made.family, path)
        if stock:
            async with Stock(Forgetful(hf, made.family, lost, by), stock, gpus) as server:
                return await check(server.url)
        engine = EmbeddedEngine.of_folder(path, made, dtype)
        receiver = Forgetful(engine.policy.hf, made.family, lost, by)
        async with engine, serving(engine, made, receiver) as url:
            return await check(url)

    return asyncio.run(run()), lines


def test_a_real_server_has_the_same_checksums_by_every_way(capsys) -> None:
    assert main(["check-sync", "--model", tiny(FAMILY), "--engine", "serve"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[7:39].rstrip() for line in lines] == ["disk, as at the start", *LINES]
    assert all(line.startswith("ok ") for line in lines)
    count = len(dict(stored(tiny(FAMILY))))
    assert f"{count} checksums changed" in lines[2]


@pytest.mark.parametrize("way", ["shared", "group"])
def test_a_tensor_that_a_way_leaves_out_is_named(way: str, tmp_path: Path) -> None:
    lost = "model.language_model.layers.0.mlp.down_proj.weight"
    checks, lines = checked(tmp_path, [lost], (way,))
    assert [check.name for check in checks] == LINES
    # What is left out keeps the model's value: only after the turned ones is it a wrong one.
    failed = {check.name: check.apart for check in checks if check.apart}
    assert failed == {f"{way}, turned weights": ["model.layers.0.mlp.down_proj.weight"]}
    assert any(line.startswith("FAILED") and "1 of " in line for line in lines)


def test_a_tensor_that_loading_leaves_out_is_named(tmp_path: Path) -> None:
    lost = "model.visual.blocks.1.norm2.weight"
    checks, _ = checked(tmp_path, [lost], ("disk", "shared", "group"))
    failed = {check.name: check.apart for check in checks if check.apart}
    assert failed == {"disk, turned weights": ["visual.blocks.1.norm2.weight"]}


def test_a_server_may_have_another_number_format_than_the_model(tmp_path: Path) -> None:
    checks, _ = checked(tmp_path, [], (), dtype=torch.bfloat16)
    assert [check.name for check in checks] == LINES
    assert not any(check.apart for check in checks)


@pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])
def test_a_stock_server_is_compared_with_itself(version: str, tmp_path: Path) -> None:
    checks, lines = checked(tmp_path, [], (), version)
    assert [check.name for check in checks] == LINES[1:]
    assert not any(check.apart for check in checks)
    notes = [line for line in lines if line.startswith("note: ")]
    assert "names of their own" in notes[0]
    assert notes[1:] == ["note: no weights reach rank0/model.layers.0.self_attn.attn.k_scale"]


@pytest.mark.parametrize("way", ["shared", "group"])
def test_a_part_of_a_fused_tensor_that_a_stock_server_leaves_out_is_named(
    way: str, tmp_path: Path
) -> None:
    lost = "model.language_model.layers.1.self_attn.k_proj.bias"
    checks, _ = checked(tmp_path, [lost], (way,), "0.5.17", only=way)
    failed = {check.name: check.apart for check in checks if check.apart}
    assert failed == {f"{way}, turned weights": ["rank0/model.layers.1.self_attn.qkv_proj.bias"]}
    assert {check.name.partition(",")[0] for check in checks} == {"disk", way}


def test_a_tensor_that_a_stock_server_always_leaves_out_is_named(tmp_path: Path) -> None:
    lost = "model.language_model.norm.weight"
    checks, _ = checked(tmp_path, [lost], ("disk", "shared", "group"), "0.5.23")
    failed = {check.name: check.apart for check in checks if check.apart}
    assert failed == {"disk, turned weights": ["rank0/model.norm.weight"]}


def test_an_engine_of_two_gpus_is_checked_by_disk_alone(tmp_path: Path) -> None:
    checks, lines = checked(tmp_path, [], (), "0.5.17", gpus=2)
    assert {check.name.partition(",")[0] for check in checks} == {"disk"}
    assert any("2 GPUs" in line for line in lines)
    assert f"{2 * len(fused(dict.fromkeys(dict(stored(tiny(FAMILY))), '')))} checksums" in lines[-1]


def test_the_command_fails_and_names_what_differs(capsys) -> None:
    made, path = tiny_renderer(FAMILY), tiny(FAMILY)
    lost = "model.language_model.embed_tokens.weight"

    async def run() -> int:
        hf = whole_model(made.config, made.family, path)
        async with Stock(Forgetful(hf, made.family, [lost], ("shared",)), "0.5.17") as server:
            words = ["check-sync", "--model", path, "--engine=sglang"]
            words += [f"--sglang_url={server.url}", "--weight_sync=shared"]
            return await asyncio.to_thread(main, words)

    assert asyncio.run(run()) == 1
    said = capsys.readouterr().out
    assert "FAILED shared, turned weights" in said
    assert "rank0/model.embed_tokens.weight" in said


def test_every_number_of_turned_weights_is_another_one() -> None:
    mine, others = dict(stored(tiny(FAMILY))), dict(turned(tiny(FAMILY)))
    assert mine.keys() == others.keys()
    assert any((tensor == 0).any() for tensor in mine.values())
    for name, tensor in mine.items():
        assert others[name].dtype == tensor.dtype
        assert not (others[name] == tensor).any(), name


@pytest.mark.parametrize("name", ["embedded", "vllm"])
def test_engines_without_checksums_are_refused(name: Any) -> None:
    with pytest.raises(InputError, match="give --engine serve or sglang"):
        check_sync(model=tiny(FAMILY), engine=EngineSettings(engine=name))
