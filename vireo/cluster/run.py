"""The driver of a run that Ray places: engines first, then trainers; then it watches them.

Trainers are the processes that torchrun would start, with its variables in their environment;
engines are servers, as a single process starts them. Neither knows of Ray. A `Host` a bundle of
GPUs, a Ray actor, keeps the processes of its machine.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

from vireo.cluster.host import Host
from vireo.cluster.plan import Node, Plan, check_room, plan_of
from vireo.errors import InputError, VireoError, first_line
from vireo.rewards import Rewards
from vireo.rollout.launch import SGLANG_ENV, VLLM_ENV, Keys
from vireo.rollout.open import PLACED, server_command
from vireo.settings import Settings

LOOK_S = 0.5  # between two looks at the processes
LOCAL_CPUS = 8  # that stand for GPUs on a machine without any, however few it has
CONNECT_S = 5.0  # that a Ray cluster has to accept a connection
READY_S = 60.0  # that the cluster has to give what it has
GRACE_S = 300.0  # that a trainer has for its last checkpoint
CLOSE_S = 60.0  # that a machine has to end its processes
FAILED_S = 20.0  # that the others have once one has failed
RESTARTS = 3  # of one engine, one after the other, before the run ends
# What the processes get of the driver's environment, beside that of their machine.
PASSED = ("HF_", "NCCL_", "OMP_", "PYTHON", "SGLANG_", "TOKENIZERS_", "TORCH", "VIREO_", "WANDB_")


def run(settings: Settings) -> int:
    """Places, runs and ends it all; returns the exit code of the trainers."""
    try:
        import ray
    except ImportError as error:
        raise InputError("Ray is not installed: pip install 'vireo-vl[ray]'") from error

    check_rewards(settings)
    plan = plan_of(settings)
    for note in plan.notes:
        print(f"note: {note}", flush=True)
    with _connected(ray, settings, plan) as on_gpus, _told_to_stop() as told:
        hosts = _hosts(ray, plan, on_gpus)
        placed = _Run(ray, settings, plan, hosts, told)
        try:
            placed.start_engines()
            placed.start_trainers()
            return placed.watch()
        finally:
            placed.close()


def check_rewards(settings: Settings) -> None:
    """InputError: they are missing, or there are none of their names. The trainers say so too, but
    minutes later, when engines have started."""
    rewards = settings.rewards
    if settings.rollout_trainer and rewards.reward is not None:
        Rewards(rewards.reward, rewards.reward_weights, url=rewards.reward_url)
    elif settings.rollout_trainer:
        raise InputError("--reward is missing: what a response is worth; `vireo rewards`")


@contextlib.contextmanager
def _connected(ray: Any, settings: Settings, plan: Plan) -> Iterator[bool]:
    """In a cluster with room; yields whether it has GPUs. InputError: it has no room, or there is
    none at the address."""
    address = settings.cluster.ray_address or os.environ.get("RAY_ADDRESS")
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if address:
        _check_address(address)
    try:
        ray.init(address=address or "auto", **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if address:
            raise InputError(_no_cluster(address, error)) from error
        cpus = max(os.cpu_count() or 1, LOCAL_CPUS)
        ray.init(include_dashboard=False, num_cpus=cpus, **quiet)
    try:
        alive = [node for node in ray.nodes() if node["Alive"]]
        on_gpus = any(node["Resources"].get("GPU") for node in alive)
        if not on_gpus:
            print("note: this cluster has no GPU: a CPU stands for each", flush=True)
        kind = "GPU" if on_gpus else "CPU"
        nodes = [
            Node(node["NodeManagerAddress"], int(node["Resources"].get(kind, 0))) for node in alive
        ]
        check_room(plan, nodes, kind)
        yield on_gpus
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """InputError: nobody listens there. Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():  # auto, local
        return
    try:
        with socket.create_connection((host, int(port)), CONNECT_S):
            pass
    except OSError as error:
        raise InputError(_no_cluster(address, error)) from error


def _no_cluster(address: str, error: Exception) -> str:
    return (
        f"no Ray cluster answers at {address}: {first_line(error)}; start one (ray start --head), "
        "or leave --ray_address and RAY_ADDRESS out for one on this machine"
    )


@contextlib.contextmanager
def _told_to_stop() -> Iterator[list[int]]:
    """The signals that have come: the first ends the run with a checkpoint, a second one at once.
    Ray has handlers of its own by now."""
    told: list[int] = []

    def note(number: int, _frame: Any) -> None:
        told.append(number)

    before = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _hosts(ray: Any, plan: Plan, on_gpus: bool) -> list[Any]:
    """An actor a bundle, in their order. VireoError: GPUs that the cluster has are taken."""
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    kind = "GPU" if on_gpus else "CPU"
    bundles = [{"CPU": 1, "GPU": size} if on_gpus else {"CPU": size} for size in plan.bundles]
    group = placement_group(bundles, strategy="PACK")
    if not group.wait(READY_S):
        free = ray.available_resources().get(kind, 0)
        raise VireoError(
            f"after {READY_S:g} s the cluster has not given {plan.wanted}: {free:g} {kind}(s) are "
            "free; other runs have the rest (ray status)"
        )

    class Placed(Host):
        def __init__(self) -> None:
            gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
            super().__init__(gpus, ray.util.get_node_ip_address())

    actor = ray.remote(Placed)
    hosts = [
        actor.options(
            num_cpus=0 if on_gpus else size,
            num_gpus=size if on_gpus else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=i
            ),
        ).remote()
        for i, size in enumerate(plan.bundles)
    ]
    ray.get([host.about.remote() for host in hosts], timeout=READY_S)
    return hosts


class _Run:
    """The processes of one run. `told`: signals that have come."""

    def __init__(self, ray: Any, settings: Settings, plan: Plan, hosts: list[Any], told: list[int]):
        self.ray, self.settings, self.plan, self.hosts, self.told = ray, settings, plan, hosts, told
        about = self._ask([host.about.remote() for host in hosts])
        self.addresses = [one["address"] for one in about]
        # Servers listen where others are only if others are elsewhere.
        self.lonely = len(set(self.addresses)) == 1
        self.env = {n: v for n, v in os.environ.items() if n.startswith(PASSED)}
        self.keys = Keys.new()
        self.urls: list[str] = []
        self.commands: dict[int, list[str]] = {}  # of engines
        self.restarts: dict[int, int] = {}

    # -- engines -----------------------------------------------------------------------------

    def start_engines(self) -> None:
        """All of them answer. VireoError: one ended, or takes too long; with its last words."""
        if not self.plan.engines:
            return
        from vireo.rollout.run import open_model

        settings, engine = self.settings, self.settings.engine
        model = settings.model
        folder, renderer = open_model(
            model.vlm_model_name_or_path,
            model.processor_name_or_path,
            engine,
            trust_remote_code=model.trust_remote_code,
        )
        dtype = {"bf16": "bfloat16", "fp32": "float32"}.get(settings.fsdp.mp_dtype or "")
        for number in range(self.plan.engines):
            bundle, _ = self.plan.place_of(number)
            host = "127.0.0.1" if self.lonely else self.addresses[bundle]
            port = self._ask(self.hosts[bundle].free_port.remote())
            self.urls.append(f"http://{host}:{port}")
            self.commands[number] = server_command(
                engine,
                renderer,
                folder,
                port,
                self.keys,
                dtype=dtype,
                host=host,
                gpus=self.plan.per_engine,
            )
            self._start_engine(number)
        until = time.monotonic() + settings.cluster.engine_start_timeout
        waiting = set(range(self.plan.engines))
        while waiting and not self.told:
            for number in sorted(waiting):
                bundle, _ = self.plan.place_of(number)
                if self._code(bundle, f"engine {number}") is not None:
                    raise VireoError(f"engine {number} ended{self._words(number)}")
                url = self.urls[number] + ("/health" if engine.engine == "vllm" else "/model_info")
                if self._ask(self.hosts[bundle].answers.remote(url, self.keys.api)):
                    waiting.discard(number)
            if waiting and time.monotonic() > until:
                number = min(waiting)
                raise VireoError(
                    f"engine {number} does not answer after --engine_start_timeout "
                    f"{settings.cluster.engine_start_timeout:g} s{self._words(number)}"
                )
            time.sleep(LOOK_S)
        print(f"{self.plan.engines} engine(s) answer: {', '.join(self.urls)}", flush=True)

    def _start_engine(self, number: int) -> None:
        bundle, first = self.plan.place_of(number)
        engine_env = VLLM_ENV if self.settings.engine.engine == "vllm" else SGLANG_ENV
        self._ask(
            self.hosts[bundle].start.remote(
                f"engine {number}",
                self.commands[number],
                self.env | engine_env,
                gpus=(first, self.plan.per_engine),
                folder=os.getcwd(),
                secrets=tuple(self.keys),
            )
        )

    def _words(self, number: int) -> str:
        bundle, _ = self.plan.place_of(number)
        text = self._ask(self.hosts[bundle].last_words.remote(f"engine {number}"))
        return f"; the end of its log:\n{text}"

    # -- trainers ----------------------------------------------------------------------------

    def start_trainers(self) -> None:
        if self.told:
            return
        plan, settings = self.plan, self.settings
        text = settings.to_yaml()
        port = self._ask(self.hosts[0].free_port.remote())
        common = {
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(plan.trainers),
            "LOCAL_WORLD_SIZE": str(plan.per_node),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        if self.urls:
            patience = settings.cluster.engine_start_timeout
            common |= {
                PLACED: json.dumps({"urls": self.urls, "patience": patience}),
                "VIREO_API_KEY": self.keys.api,
                "VIREO_ADMIN_KEY": self.keys.admin,
            }
        for rank in range(plan.trainers):
            bundle, local = divmod(rank, plan.per_node)
            host = self.hosts[bundle]
            file = self._ask(host.keep.remote("settings.yaml", text))
            own = {"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(bundle)}
            self._ask(
                host.start.remote(
                    f"trainer {rank}",
                    ["python", "-m", "vireo.train", "--config", file],
                    self.env | common | own,
                    grace=GRACE_S,
                    folder=os.getcwd(),
                    secrets=tuple(self.keys),
                )
            )

    def watch(self) -> int:
        """Until the trainers have ended: 0, or the code of the one that failed first. The others
        are told to stop then; so are all at a signal."""
        said, code, until = 0, 0, math.inf
        running = set(range(self.plan.trainers)) if not self.told else set()
        while running:
            time.sleep(LOOK_S)
            if len(self.told) > said:
                if said:
                    raise KeyboardInterrupt
                said = len(self.told)
                print("told to stop: the trainers write a checkpoint", flush=True)
                self._stop_trainers()
            for bundle, found in enumerate(self._ask([h.look.remote() for h in self.hosts])):
                for name, (ended, text) in found.items():
                    kind, _, number = name.partition(" ")
                    if kind == "engine":
                        if ended is not None and not said and not code:
                            self._again(int(number), ended)
                        continue
                    if number == "0":
                        sys.stdout.write(text)
                        sys.stdout.flush()
                    if ended is None or int(number) not in running:
                        continue
                    running.discard(int(number))
                    if ended and not code:
                        code = ended if ended > 0 else 1
                        if number != "0":
                            words = self._ask(self.hosts[bundle].last_words.remote(name))
                            print(f"trainer {number} ended: code {ended}; the end of its log:")
                            print(words, flush=True)
                        elif not said and (ended < 0 or ended > 128):
                            # By a signal: it says nothing itself (see rollout/watch.py).
                            print(f"trainer 0 ended: code {ended}", flush=True)
                        self._stop_trainers()
                        until = time.monotonic() + FAILED_S
            if time.monotonic() > until:  # they wait for one that is gone
                self._stop_trainers()
                until = math.inf
        return code or (128 + self.told[0] if self.told else 0)

    def _again(self, number: int, code: int) -> None:
        """An engine that ended is started again; its client waits for it. VireoError: it has been
        too often."""
        self.restarts[number] = self.restarts.get(number, 0) + 1
        if self.restarts[number] > RESTARTS:
            raise VireoError(f"engine {number} ended {RESTARTS + 1} times{self._words(number)}")
        print(f"engine {number} ended: code {code}; it is started again", flush=True)
        self._start_engine(number)

    def _stop_trainers(self) -> None:
        for rank in range(self.plan.trainers):
            host = self.hosts[rank // self.plan.per_node]
            self._ask(host.tell_to_stop.remote(f"trainer {rank}"))

    # -- hosts -------------------------------------------------------------------------------

    def _code(self, bundle: int, name: str) -> int | None:
        return self._ask(self.hosts[bundle].look.remote())[name][0]

    def _ask(self, what: Any) -> Any:
        """VireoError: a machine or its actor is gone."""
        try:
            return self.ray.get(what)
        except self.ray.exceptions.RayActorError as error:
            raise VireoError(f"a machine of the cluster is gone: {first_line(error)}") from error

    def close(self) -> None:
        """Nothing is left running. A machine that is gone has ended its processes itself."""
        for host in self.hosts:
            with contextlib.suppress(Exception):
                self.ray.get(host.close.remote(), timeout=CLOSE_S)
        for host in self.hosts:
            with contextlib.suppress(Exception):
                self.ray.kill(host)
