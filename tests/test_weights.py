"""Weights on their way to an engine: names, shared memory, groups, the receiver and the push.

The engine is a small server in another process (the end of this file), which holds a `Receiver`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import pickle
import pickletools
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
import torch.distributed as dist
from aiohttp import web
from safetensors.torch import load_file, save_file
from torch.distributed.distributed_c10d import (
    PrefixStore,
    _new_process_group_helper,
    _world,
    rendezvous,
)

from tests.launch import ROOT, environment
from tests.tiny_models import FAMILIES, tiny
from vireo.data.model_folder import load_config
from vireo.errors import InputError, VireoError
from vireo.families import family_of
from vireo.models.build import ModelSpec, build_policy, whole_model
from vireo.models.layout import save_as_published
from vireo.models.names import named_parameters, part_of
from vireo.parallel import alone
from vireo.rollout.engine import EngineError, EngineGone
from vireo.weights import payload
from vireo.weights.group import join, listen
from vireo.weights.named import Names, compare, published, shapes
from vireo.weights.payload import packed, unpack
from vireo.weights.push import push
from vireo.weights.receive import Receiver
from vireo.weights.source import Broadcast, Folder, Shared, Tensors

torch.set_num_threads(1)
SOME = ["qwen2_5_vl", "qwen3_vl_moe", "qwen3_moe", "gemma3", "mllama", "qwen3", "llava"]
IDS = torch.arange(3, 20)[None]


def model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    config, _ = load_config(tiny(family), False)
    return whole_model(config, FAMILIES[family], tiny(family), dtype)


@cache
def trained(family: str) -> Any:
    """Other weights than the folder's, in every tensor. Not to be changed."""
    hf = model(family)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in hf.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return hf


def sent(family: str, **options: Any) -> dict[str, torch.Tensor]:
    hf = trained(family)
    return dict(Names(hf, FAMILIES[family]).published(hf.named_parameters(), **options))


def source(tensors: dict[str, torch.Tensor]) -> Tensors:
    return Tensors(lambda: iter(tensors.items()))


@cache
def exported(family: str) -> str:
    """The trained model as exports write it."""
    folder = Path(tiny(family)).parent / f"{family}-trained"
    hf = model(family)
    hf.load_state_dict(trained(family).state_dict())
    save_as_published(hf)
    hf.save_pretrained(folder)
    return str(folder)


def with_prefix(family: str) -> str:
    """The tiny folder with the names that the Hub has: the tower's own prefix, the head twice."""
    folder = Path(tiny(family)).parent / f"{family}-hub"
    if not folder.exists():
        folder.mkdir()
        named = load_file(f"{tiny(family)}/model.safetensors")
        named = {
            n.replace("vision_tower.", "vision_tower.vision_model."): t for n, t in named.items()
        }
        named["language_model.lm_head.weight"] = named["language_model.model.embed_tokens.weight"]
        save_file({n: t.clone() for n, t in named.items()}, folder / "model.safetensors")
    return str(folder)


@torch.no_grad()
def logits(hf: Any) -> str:
    """The bits of a forward, as text."""
    out = hf.eval()(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits
    return out.numpy().tobytes().hex()


def memory_of(pid: int) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{pid}_")]


# -- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_have_the_names_shapes_and_values_that_exports_write(family):
    found, wrote = sent(family), load_file(f"{exported(family)}/model.safetensors")
    assert found.keys() == wrote.keys() == shapes(exported(family)).keys()
    assert all(torch.equal(found[name], wrote[name]) for name in wrote)
    assert {name: tuple(t.shape) for name, t in found.items()} == shapes(tiny(family))


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3"])
def test_a_policy_in_training_has_the_names_of_its_checkpoint(family):
    config, _ = load_config(tiny(family), False)
    spec = ModelSpec(tiny(family), shard=False, recompute="full")
    policy, _ = build_policy(spec, config, FAMILIES[family], alone())
    found = dict(published(policy.hf, FAMILIES[family], named_parameters(policy.hf)))
    assert {name: tuple(t.shape) for name, t in found.items()} == shapes(tiny(family))


def test_what_is_stored_in_pieces_comes_piece_by_piece_and_nothing_waits():
    hf, family = trained("qwen3_moe"), FAMILIES["qwen3_moe"]
    asked: list[str] = []

    def stream() -> Iterator:
        for name, tensor in hf.named_parameters():
            asked.append(name)
            yield name, tensor

    for key, _ in published(hf, family, stream()):
        assert key.split(".mlp")[0] == asked[-1].split(".mlp")[0]  # that tensor's, nothing older
    assert len(asked) == 24


def test_a_tensor_that_checkpoints_do_not_have_is_named():
    hf = trained("qwen3")
    adapter = ("model.layers.0.self_attn.q_proj.lora_A.default.weight", torch.zeros(2, 2))
    with pytest.raises(InputError, match=r"lora_A.* is in no qwen3 checkpoint; merge adapters"):
        list(published(hf, FAMILIES["qwen3"], [adapter]))


@pytest.mark.parametrize("family", ["gemma3", "llava"])
def test_the_names_of_an_engines_own_checkpoint_are_kept(family):
    hub = shapes(with_prefix(family))
    assert any("vision_model" in name for name in hub)
    found = sent(family, like=hub)
    compare({name: tuple(t.shape) for name, t in found.items()}, hub)
    plain = sent(family)
    for name, tensor in found.items():
        key = name.replace("vision_model.", "").replace("lm_head", "model.embed_tokens")
        assert torch.equal(tensor, plain[key])


def test_a_folder_without_readable_weights_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"no model.safetensors"):
        shapes(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(InputError, match=r"model.safetensors: its header cannot be read"):
        shapes(str(tmp_path))


# -- shared memory -------------------------------------------------------------------------------

KINDS = [
    ("bf16", torch.randn(3, 5).bfloat16()),
    ("scalar", torch.tensor(3.5)),
    ("bool", torch.tensor([True, False])),
    ("transposed", torch.randn(4, 6).t()),
    ("empty", torch.empty(0, 3)),
    ("int", torch.arange(5)),
    ("trained", torch.nn.Parameter(torch.randn(7))),
]


def test_tensors_of_every_kind_are_shared_and_nothing_of_the_process_is_switched():
    strategy = torch.multiprocessing.get_sharing_strategy()
    with packed(KINDS) as payloads:
        assert len(payloads) == 1
        assert len(memory_of(os.getpid())) == 1
        read = unpack(payloads[0])
        for (name, tensor), (sent_name, value) in zip(read, KINDS, strict=True):
            assert name == sent_name
            assert tensor.dtype == value.dtype
            assert torch.equal(tensor, value)
        read[0][1].zero_()
        assert not unpack(payloads[0])[0][1].any()  # the same memory
    assert torch.multiprocessing.get_sharing_strategy() == strategy


def test_memory_is_given_back_after_an_error_and_however_often_a_payload_was_read():
    with pytest.raises(ZeroDivisionError), packed(KINDS):
        raise ZeroDivisionError
    assert memory_of(os.getpid()) == []
    with packed(KINDS):
        pass
    assert memory_of(os.getpid()) == []
    with packed(KINDS) as payloads:
        for _ in range(9):  # as several ranks do, or a call that is repeated
            kept = unpack(payloads[0])
    assert memory_of(os.getpid()) == []
    assert all(torch.equal(tensor, dict(KINDS)[name]) for name, tensor in kept)
    del kept
    with pytest.raises(InputError, match="cannot be read: unable to open shared memory"):
        unpack(payloads[0])


def test_too_little_shared_memory_is_said_before_any_is_taken(monkeypatch):
    monkeypatch.setattr(payload.shutil, "disk_usage", lambda _: type("Disk", (), {"free": 100}))
    with pytest.raises(VireoError, match=r"/dev/shm has 100 bytes left .* --shm-size"):
        packed(KINDS).__enter__()
    assert memory_of(os.getpid()) == []


def test_a_payload_names_only_what_stock_servers_allow():
    with packed(KINDS) as payloads:
        opcodes = list(pickletools.genops(base64.b64decode(payloads[0])))
    assert not any(opcode.name == "GLOBAL" for opcode, *_ in opcodes)
    strings = {value for opcode, value, _ in opcodes if opcode.name == "SHORT_BINUNICODE"}
    shared = {"rebuild_tensor", "rebuild_typed_storage", "rebuild_storage_filename"}
    modules = {"torch", "torch.storage", "torch.multiprocessing.reductions"}
    types = {"Tensor", "Size", "UntypedStorage", "bfloat16", "float32", "bool", "int64"}
    assert strings == shared | modules | types | {name for name, _ in KINDS}


class Runs:
    """Unpickled, it calls something."""

    def __init__(self, call: Any, *args: Any):
        self.call, self.args = call, args

    def __reduce__(self) -> Any:
        return self.call, self.args


def text(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def test_a_payload_that_would_run_something_is_refused_and_runs_nothing(tmp_path):
    trace = tmp_path / "ran"
    touch = f"open({str(trace)!r}, 'w')"
    for call, args, name in (
        (os.system, (f"touch {trace}",), "posix.system"),
        (eval, (touch,), "builtins.eval"),
        (getattr, ("", "join"), "builtins.getattr"),
        (torch.storage._load_from_bytes, (pickle.dumps(Runs(eval, touch)),), "torch.storage._load"),
        (subprocess.run, (["touch", str(trace)],), "subprocess.run"),
    ):
        with pytest.raises(InputError, match=f"names {re.escape(name)}.*which is not allowed"):
            unpack(text([("a", Runs(call, *args))]))
    dotted = b"\x80\x04\x8c\x05torch\x8c\x18storage._load_from_bytes\x93."
    with pytest.raises(InputError, match=r"names torch.storage._load_from_bytes"):
        unpack(base64.b64encode(dotted).decode())
    assert not trace.exists()


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ("not base64!", "cannot be read"),
        (base64.b64encode(b"\x80\x04").decode(), "cannot be read"),
        (text({"a": 1}), r"has dict, not \(name, tensor\)"),
        (text([("a", 1)]), r"has tuple, not \(name, tensor\)"),
    ],
)
def test_what_is_no_payload_is_refused(payload, message):
    with pytest.raises(InputError, match=message):
        unpack(payload)


# -- groups --------------------------------------------------------------------------------------


def both(first: Any, second: Any) -> tuple[Any, Any]:
    """What two functions return that wait for each other; the second in a thread."""
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(second()), daemon=True)
    thread.start()
    mine = first()
    thread.join(30)
    return mine, got[0]


def ends(name: str = "pair") -> tuple[Any, Any]:
    waiting = listen("127.0.0.1")
    port = waiting.getsockname()[1]
    return both(
        lambda: join("127.0.0.1", port, 0, 2, name, timeout=20, listener=waiting),
        lambda: join("127.0.0.1", port, 1, 2, name, timeout=20),
    )


@contextlib.contextmanager
def default_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("has_default", [False, True])
def test_a_group_works_beside_a_default_group_and_without_one(has_default):
    with default_group() if has_default else contextlib.nullcontext():
        trainer, engine = ends()
        for _, tensor in KINDS:
            blank = torch.empty(tensor.shape, dtype=tensor.dtype)
            both(lambda t=tensor: trainer.broadcast(t), lambda b=blank: engine.broadcast(b))
            assert torch.equal(blank, tensor)
        trainer.close()
        engine.close()
        engine.close()
        with pytest.raises(VireoError, match="group pair is closed"):
            engine.broadcast(blank)
        assert dist.is_initialized() == has_default


def test_a_group_whose_other_side_makes_it_as_stock_servers_do():
    """Their group: a store at tcp://, a prefix of its name, and torch's own helper."""
    limit, waiting = timedelta(seconds=20), listen("127.0.0.1")
    port = waiting.getsockname()[1]

    def stock() -> Any:
        store, rank, world = next(rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, timeout=limit))
        store = PrefixStore("stock", store)
        made, _ = _new_process_group_helper(
            world, rank, [], dist.Backend("gloo"), store, group_name="stock", timeout=limit
        )
        _world.pg_group_ranks[made] = {0: 0, 1: 1}
        return made

    with default_group():
        trainer, engine = both(
            lambda: join("127.0.0.1", port, 0, 2, "stock", timeout=20, listener=waiting), stock
        )
        tensor, blank = torch.randn(5, 3).bfloat16(), torch.empty(5, 3, dtype=torch.bfloat16)
        both(
            lambda: trainer.broadcast(tensor),
            lambda: dist.broadcast(blank, src=0, group=engine),
        )
        assert torch.equal(blank, tensor)
        dist.destroy_process_group(engine)
        trainer.close()


def test_a_group_that_cannot_be_joined_says_why():
    with pytest.raises(InputError, match=r"group backend 'nccl': expected gloo"):
        join("127.0.0.1", 1, 1, 2, "x", backend="nccl")
    with pytest.raises(InputError, match=r"no port can be opened at 192.0.2.1"):
        listen("192.0.2.1")
    with pytest.raises(VireoError, match=r"group x at 127.0.0.1:\d+: not all joined"):
        join("127.0.0.1", 0, 0, 2, "x", timeout=1, listener=listen("127.0.0.1"))


SENDER = """
import time, torch
from vireo.weights.group import join, listen
from vireo.weights.payload import packed
waiting = listen("127.0.0.1")
port = waiting.getsockname()[1]
with packed([("a", torch.ones(1000))]) as payloads:
    print(port, payloads[0], flush=True)
    group = join("127.0.0.1", port, 0, 2, "killed", listener=waiting)
    time.sleep(60)
"""


def test_a_sender_that_is_killed_leaves_no_memory_and_nobody_waiting():
    sender = subprocess.Popen(
        [sys.executable, "-c", SENDER],
        env=environment(),
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
    )
    try:
        port, sent_payload = sender.stdout.readline().split()
        group = join("127.0.0.1", int(port), 1, 2, "killed", timeout=60)
        held = unpack(sent_payload)
        assert memory_of(sender.pid)
        threading.Timer(0.5, sender.kill).start()
        start = time.monotonic()
        with pytest.raises(VireoError, match="group killed broke"):
            group.broadcast(torch.empty(10))
        assert time.monotonic() - start < 20
        assert held[0][1].sum() == 1000
        until = time.monotonic() + 10
        while memory_of(sender.pid) and time.monotonic() < until:
            time.sleep(0.05)
        assert memory_of(sender.pid) == []
    finally:
        sender.kill()
        sender.wait()


# -- the receiver --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SOME)
def test_messages_in_any_order_fill_a_model_of_another_type_whose_weights_are_gone(family):
    hf = model(family, torch.bfloat16)
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.fill_(float("nan"))
    receiver, tensors = Receiver(hf, FAMILIES[family]), list(sent(family).items())
    receiver.check({name: tuple(t.shape) for name, t in tensors}, whole=True)
    for start in range(3):  # what is joined in memory comes in three messages
        receiver.named(iter(tensors[start::3]))
    wanted = dict(trained(family).named_parameters())
    assert all(torch.equal(p, wanted[n].bfloat16()) for n, p in hf.named_parameters())


@pytest.mark.parametrize("family", ["gemma3", "llava"])
def test_the_names_of_published_checkpoints_are_taken_as_well(family):
    receiver = Receiver(model(family), FAMILIES[family])
    tensors = sent(family, like=shapes(with_prefix(family)))
    receiver.check({name: tuple(t.shape) for name, t in tensors.items()}, whole=True)
    receiver.named(tensors.items())
    assert receiver.checksums() == Receiver(trained(family), FAMILIES[family]).checksums()
    receiver.from_disk(with_prefix(family))
    assert receiver.checksums() == Receiver(model(family), FAMILIES[family]).checksums()


def wrong(tensors: dict[str, torch.Tensor], fault: str) -> tuple[dict[str, torch.Tensor], str]:
    """Tensors with a fault in the last but one, and what is said of it."""
    name = list(tensors)[-2]
    value = tensors[name]
    made = dict(tensors)
    if fault == "name":
        made.pop(name)
        made = {**made, f"{name}_typo": value}
        return made, f"{re.escape(name)}_typo: .* no such tensor .*nearest: {re.escape(name)}"
    if fault == "memory":
        inner = name.replace("model.", "model.language_model.", 1)
        return {(inner if n == name else n): t for n, t in made.items()}, f"{re.escape(inner)}: "
    made[name] = value[..., :-1]
    found, wanted = tuple(made[name].shape), tuple(value.shape)
    said = f"has shape {found}, the engine's has {wanted}"
    return made, f"{re.escape(name)} {re.escape(said)}"


@pytest.mark.parametrize("fault", ["name", "memory", "shape"])
def test_a_message_with_a_fault_is_refused_before_any_of_it_is_written(fault):
    receiver = Receiver(model("qwen2_5_vl"), FAMILIES["qwen2_5_vl"])
    before = receiver.checksums()
    tensors, message = wrong(sent("qwen2_5_vl"), fault)
    with packed(list(tensors.items())) as payloads, pytest.raises(InputError, match=message):
        receiver.from_tensors(payloads)
    with pytest.raises(InputError, match=message):
        receiver.check({name: t.shape for name, t in tensors.items()})
    trainer, receiver._groups["g"] = ends("g")
    names, kinds = list(tensors), ["float32"] * len(tensors)
    with pytest.raises(InputError, match=message):
        receiver.from_group(names, kinds, [list(t.shape) for t in tensors.values()], "g")
    assert receiver.checksums() == before
    receiver.destroy_group("g")
    trainer.close()


def test_a_lacking_tensor_is_named():
    receiver = Receiver(trained("qwen3"), FAMILIES["qwen3"])
    found = {name: t.shape for name, t in sent("qwen3").items() if "norm" not in name}
    receiver.check(found)
    with pytest.raises(InputError, match=r"norm.weight: .* has it, and it is not among those"):
        receiver.check(found, whole=True)


def test_messages_that_say_too_little_are_refused():
    receiver = Receiver(model("qwen3"), FAMILIES["qwen3"])
    with pytest.raises(InputError, match="is empty: expected one payload"):
        receiver.from_tensors([])
    with pytest.raises(InputError, match="group a does not exist"):
        receiver.from_group([], [], [], "a")
    with pytest.raises(InputError, match="group a does not exist"):
        receiver.destroy_group("a")
    trainer, receiver._groups["a"] = ends("a")
    with pytest.raises(InputError, match="group a is there already"):
        receiver.init_group("127.0.0.1", 1, 1, 2, "a")
    with pytest.raises(InputError, match="1 names, 0 dtypes, 1 shapes"):
        receiver.from_group(["model.norm.weight"], [], [[64]], "a")
    for dtype in ("bfloat17", "zeros", "Tensor"):
        with pytest.raises(InputError, match=f"model.norm.weight: dtype '{dtype}', expected one"):
            receiver.from_group(["model.norm.weight"], [dtype], [[64]], "a")
    receiver.destroy_group("a")
    trainer.close()


def test_a_folder_with_another_models_weights_changes_nothing():
    receiver = Receiver(model("qwen3"), FAMILIES["qwen3"])
    before = receiver.checksums()
    with pytest.raises(InputError, match="the checkpoint"):
        receiver.from_disk(tiny("llama"))
    assert receiver.checksums() == before


def test_checksums_change_where_weights_do_and_are_16_hex_digits():
    family = FAMILIES["qwen2_5_vl"]
    hf = model("qwen2_5_vl")
    receiver = Receiver(hf, family)
    before = receiver.checksums()
    assert before.keys() == shapes(tiny("qwen2_5_vl")).keys()
    assert all(re.fullmatch("[0-9a-f]{16}", value) for value in before.values())
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if part_of(name, family) not in ("vision", "projector"):  # those are frozen
                parameter.view(-1)[-1] += 1
    after = receiver.checksums()
    same = {name for name in before if before[name] == after[name]}
    assert same == {name for name in before if name.startswith("visual.")}
    assert receiver.checksums() == after == Receiver(hf, family).checksums()


# -- the push, to an engine in another process ---------------------------------------------------


class Engine:
    """The server at the end of this file; `posts` are its calls, as (path, body)."""

    def __init__(self, url: str):
        self.url = url
        self.posts: list[tuple[str, dict]] = []

    def do(self, what: str, **body: Any) -> Any:
        async def ask() -> Any:
            url = f"{self.url}/test/{what}"
            async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
                return await answer.json()

        return asyncio.run(ask())

    def push(self, weights: Any, expected: dict, sessions: bool = True, **options: Any) -> Any:
        self.posts = []

        async def run() -> Any:
            async with aiohttp.ClientSession() as session:

                async def post(path: str, body: dict) -> dict:
                    self.posts.append((path, body))
                    try:
                        async with session.post(self.url + path, json=body) as answer:
                            found = await answer.json()
                    except aiohttp.ClientError as error:
                        raise EngineGone(str(error)) from error
                    if answer.status != 200:
                        raise EngineError(f"{path}: {found['message']}")
                    return found

                options.setdefault("bucket_bytes", 1 << 18)
                args = {"sessions": sessions, "post": post, "expected": expected}
                return await push(weights, "step-7", **args, **options)

        return asyncio.run(run())

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.posts]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.test_weights"],
        env=environment(),
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
    )
    try:
        yield Engine(process.stdout.readline().strip())
        assert process.poll() is None, "the server died"
    finally:
        process.kill()
        process.wait()


UPDATES = {
    "folder": ("/update_weights_from_disk", [], []),
    "shared": (
        "/update_weights_from_tensor",
        ["/end_weight_update", "/begin_weight_update"],
        ["/end_weight_update"],
    ),
    "group": (
        "/update_weights_from_distributed",
        ["/init_weights_update_group", "/end_weight_update", "/begin_weight_update"],
        ["/end_weight_update", "/destroy_weights_update_group"],
    ),
}


@pytest.mark.parametrize("way", UPDATES)
@pytest.mark.parametrize("family", SOME)
def test_every_way_gives_an_engine_weights_that_are_equal_bit_for_bit(engine, family, way):
    engine.do("load", family=family, folder=tiny(family))
    tensors = sent(family)
    weights = {
        "folder": Folder(exported(family)),
        "shared": source(tensors),
        "group": Broadcast(lambda: iter(tensors.items())),
    }[way]
    done = engine.push(weights, shapes(tiny(family)))
    assert engine.do("checksums") == Receiver(trained(family), FAMILIES[family]).checksums()
    assert engine.do("logits") == logits(trained(family)) != logits(model(family))
    assert engine.do("state") == {"version": "step-7", "session": False, "groups": []}

    path, before, after = UPDATES[way]
    updates = [body for called, body in engine.posts if called == path]
    assert engine.paths == [*before, *[path] * len(updates), *after]
    assert all(body["flush_cache"] is False for body in updates)
    assert [body.get("weight_version") for body in updates[:-1]] == [None] * (len(updates) - 1)
    assert updates[-1]["weight_version"] == "step-7"
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert done.tensors == len(tensors)
    assert done.seconds > 0
    if way == "folder":
        assert done.bytes == os.path.getsize(f"{exported(family)}/model.safetensors") > size
    else:
        assert done.bytes == size
        assert len(updates) > 1
    assert memory_of(os.getpid()) == []


def test_a_server_without_sessions_gets_none(engine):
    engine.do("load", family="qwen3", folder=tiny("qwen3"), sessions=False)
    engine.push(source(sent("qwen3")), shapes(tiny("qwen3")), sessions=False)
    assert set(engine.paths) == {"/update_weights_from_tensor"}
    assert engine.do("logits") == logits(trained("qwen3"))


def test_a_session_that_a_dead_client_left_open_is_ended_first(engine):
    engine.do("load", family="qwen3", folder=tiny("qwen3"), open=True)
    engine.push(source(sent("qwen3")), shapes(tiny("qwen3")))
    assert engine.do("state")["session"] is False


def test_a_larger_tensor_than_a_bucket_goes_alone(engine):
    engine.do("load", family="qwen3", folder=tiny("qwen3"))
    engine.push(source(sent("qwen3")), shapes(tiny("qwen3")), bucket_bytes=1)
    updates = [path for path in engine.paths if path == "/update_weights_from_tensor"]
    assert len(updates) == len(sent("qwen3"))
    assert engine.do("logits") == logits(trained("qwen3"))


@pytest.mark.parametrize("way", ["folder", "shared", "group"])
@pytest.mark.parametrize("fault", ["name", "memory", "shape", "lacking"])
def test_wrong_names_and_shapes_are_refused_before_the_first_call(engine, fault, way, tmp_path):
    tensors = sent("qwen2_5_vl")
    if fault == "lacking":
        name = list(tensors)[3]
        message = f"{re.escape(name)}: .* has it, and it is not among those to be sent"
        tensors = {n: t for n, t in tensors.items() if n != name}
    else:
        tensors, message = wrong(tensors, fault)
    if way == "folder":
        named = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(named, tmp_path / "model.safetensors")
        weights: Any = Folder(str(tmp_path))
    else:
        weights = {"shared": Tensors, "group": Broadcast}[way](lambda: iter(tensors.items()))
    with pytest.raises(InputError, match=message + r".*\. Nothing was sent: .* answer success"):
        engine.push(weights, shapes(tiny("qwen2_5_vl")))
    assert engine.posts == []


def test_names_of_another_flavour_of_a_checkpoint_are_refused_with_the_nearest(engine):
    with pytest.raises(InputError, match=r"vision_tower.*\(nearest: vision_tower.vision_model"):
        engine.push(source(sent("gemma3")), shapes(with_prefix("gemma3")))
    assert engine.posts == []


def test_a_tensor_that_comes_twice_is_refused(engine):
    twice = [*sent("qwen3").items()] * 2
    with pytest.raises(InputError, match="would be sent twice"):
        engine.push(Tensors(lambda: iter(twice)), shapes(tiny("qwen3")))
    assert engine.posts == []


def test_shared_weights_are_not_sent(engine):
    with pytest.raises(ValueError, match="not sent"):
        engine.push(Shared(), {})


@pytest.mark.parametrize("way", ["folder", "shared", "group"])
def test_an_engine_that_does_not_say_success_is_an_error_and_the_session_is_ended(engine, way):
    engine.do("load", family="qwen3", folder=tiny("qwen3"))
    path, _, after = UPDATES[way]
    engine.do("lie", path=path)
    tensors = sent("qwen3")
    weights = {
        "folder": Folder(exported("qwen3")),
        "shared": source(tensors),
        "group": Broadcast(lambda: iter(tensors.items())),
    }[way]
    start = time.monotonic()
    with pytest.raises(EngineError, match=f"{path}: told to fail; the engine may have a part"):
        engine.push(weights, shapes(tiny("qwen3")))
    assert time.monotonic() - start < 15
    assert engine.paths[len(engine.paths) - len(after) :] == after
    assert engine.paths.count(path) == 1
    assert engine.do("state") == {"version": "", "session": False, "groups": []}
    assert memory_of(os.getpid()) == []


@pytest.mark.parametrize("path", ["/begin_weight_update", "/init_weights_update_group"])
def test_an_engine_that_refuses_to_begin_is_not_waited_for(engine, path):
    engine.do("load", family="qwen3", folder=tiny("qwen3"))
    engine.do("lie", path=path)
    weights = Broadcast(lambda: iter(sent("qwen3").items()))
    start = time.monotonic()
    with pytest.raises(EngineError, match=f"{path}: told to fail"):
        engine.push(weights, shapes(tiny("qwen3")))
    assert time.monotonic() - start < 15
    assert "/update_weights_from_distributed" not in engine.paths
    assert engine.do("state") == {"version": "", "session": False, "groups": []}


def test_tensors_that_change_between_the_check_and_the_sending_are_an_error(engine):
    engine.do("load", family="qwen3", folder=tiny("qwen3"))
    first, second = sent("qwen3"), list(sent("qwen3").items())
    for later, message in (
        (second[:-1], f"{second[-1][0]} and 0 more did not come again"),
        ([(second[0][0], torch.zeros(2)), *second[1:]], r"is \(2,\), and was"),
    ):
        turns = iter([first.items(), later])
        with pytest.raises(EngineError, match=message):
            engine.push(Tensors(lambda turns=turns: iter(next(turns))), shapes(tiny("qwen3")))
        assert engine.do("state")["session"] is False


def test_an_engine_that_dies_amid_a_broadcast_is_told_as_gone():
    """Here the engine is in this process: its group closes, then its answer fails."""
    held: dict[str, Any] = {}

    async def post(path: str, body: dict) -> dict:
        if path == "/init_weights_update_group":
            where = "127.0.0.1", body["master_port"], 1, 2, body["group_name"]
            held["group"] = await asyncio.to_thread(join, *where)
        elif path == "/update_weights_from_distributed":
            held.pop("group").close()
            await asyncio.sleep(0.5)
            raise EngineGone("connection reset")
        return {"success": True}

    tensors = {"a": torch.zeros(1 << 22)}
    weights = Broadcast(lambda: iter(tensors.items()))
    start = time.monotonic()
    with pytest.raises(EngineGone, match="connection reset"):
        asyncio.run(push(weights, "1", sessions=True, post=post, expected={"a": (1 << 22,)}))
    assert time.monotonic() - start < 15


# -- the engine ----------------------------------------------------------------------------------


class Server:
    """What a server does with weights, and what the tests ask of it, at /test/."""

    def __init__(self) -> None:
        self.lies: set[str] = set()
        self.receiver: Any = None
        self.load("qwen3", tiny("qwen3"))

    def load(self, family: str, folder: str, sessions: bool = True, open: bool = False) -> None:
        """A model whose weights have been released: they are no numbers."""
        config, _ = load_config(folder, False)
        hf = whole_model(config, family_of(config), folder)
        with torch.no_grad():
            for parameter in hf.parameters():
                parameter.fill_(float("nan"))
        self.receiver = Receiver(hf, family_of(config))
        self.sessions, self.open, self.version = sessions, open, ""

    async def answer(self, request: web.Request) -> web.Response:
        body, path = await request.json(), request.path
        try:
            if path.startswith("/test/"):
                return web.json_response(getattr(self, path.rpartition("/")[2])(**body))
            if path in self.lies:
                self.lies.discard(path)
                return web.json_response({"success": False, "message": "told to fail"})
            await asyncio.to_thread(self.call, path, body)
        except VireoError as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        return web.json_response({"success": True, "message": ""})

    def call(self, path: str, body: dict) -> None:
        receiver, name = self.receiver, body.get("group_name", "")
        if path in ("/begin_weight_update", "/end_weight_update"):
            if self.open == (path == "/begin_weight_update"):
                raise InputError("no such session")
            self.open = not self.open
        elif path == "/init_weights_update_group":
            where = body["master_address"], body["master_port"]
            receiver.init_group(
                *where, body["rank_offset"], body["world_size"], name, body["backend"]
            )
        elif path == "/destroy_weights_update_group":
            receiver.destroy_group(name)
        elif path == "/update_weights_from_disk":
            receiver.from_disk(body["model_path"])
        elif self.open != self.sessions:
            raise InputError("no open session")
        elif path == "/update_weights_from_tensor":
            receiver.from_tensors(body["serialized_named_tensors"])
        else:
            receiver.from_group(body["names"], body["dtypes"], body["shapes"], name)
        self.version = body.get("weight_version", self.version)

    def lie(self, path: str) -> None:
        self.lies.add(path)

    def checksums(self) -> dict[str, str]:
        return self.receiver.checksums()

    def logits(self) -> str:
        return logits(self.receiver.hf)

    def state(self) -> dict:
        groups = list(self.receiver._groups)
        return {"version": self.version, "session": self.open, "groups": groups}


async def serve() -> None:
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/{path:.*}", Server().answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve())
