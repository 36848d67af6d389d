"""Which GPUs a run needs, and what stands on them; nothing here knows Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vireo.errors import InputError
from vireo.settings import Settings
from vireo.settings.schema import SFT


@dataclass(frozen=True)
class Plan:
    """`nodes` times `per_node` trainers, and `engines` of `per_engine` GPUs each, on GPUs of their
    own or, `colocate`, on the trainers'. `notes`: what a person should know."""

    nodes: int
    per_node: int
    engines: int
    per_engine: int
    colocate: bool
    notes: tuple[str, ...] = ()

    @property
    def trainers(self) -> int:
        return self.nodes * self.per_node

    @property
    def bundles(self) -> list[int]:
        """GPUs that must lie on one machine each: of trainers, then of engines."""
        apart = 0 if self.colocate else self.engines
        return [self.per_node] * self.nodes + [self.per_engine] * apart

    @property
    def wanted(self) -> str:
        """In words."""
        found = f"{self.trainers} GPU(s) of trainers ({self.nodes} x {self.per_node})"
        if self.engines and not self.colocate:
            found += f" and {self.engines * self.per_engine} of engines "
            found += f"({self.engines} x {self.per_engine})"
        return found

    def place_of(self, engine: int) -> tuple[int, int]:
        """(bundle, its first GPU there) of an engine."""
        if not self.colocate:
            return self.nodes + engine, 0
        each = self.per_node // self.per_engine
        return engine // each, engine % each * self.per_engine


@dataclass(frozen=True)
class Node:
    """A machine of the cluster; `gpus`: or CPUs, where no machine has a GPU."""

    name: str
    gpus: int


def plan_of(settings: Settings) -> Plan:
    """InputError: the numbers do not go together."""
    cluster, engine = settings.cluster, settings.engine
    nodes, per_node = cluster.actor_num_nodes, cluster.actor_num_gpus_per_node or 1
    trainers, per_engine = nodes * per_node, cluster.rollout_num_gpus_per_engine
    notes: list[str] = []
    given = engine.sglang_url or engine.vllm_url
    if settings.trainer in SFT or given or engine.engine == "embedded":
        if cluster.rollout_num_gpus and settings.trainer not in SFT:
            raise InputError(
                "--rollout_num_gpus is for engines that are started here, and "
                + ("servers are given by URL" if given else "--engine embedded is none of them")
            )
        return Plan(nodes, per_node, 0, 1, cluster.colocate)
    if cluster.colocate:
        if cluster.rollout_num_gpus is not None:
            notes.append("--rollout_num_gpus has no effect with --colocate: engines share the GPUs")
        if per_node % per_engine:
            raise InputError(
                f"--rollout_num_gpus_per_engine {per_engine} does not divide the {per_node} GPU(s) "
                "of a machine (--actor_num_gpus_per_node)"
            )
        return Plan(nodes, per_node, trainers // per_engine, per_engine, True, tuple(notes))
    gpus = cluster.rollout_num_gpus or trainers
    if gpus % per_engine:
        raise InputError(
            f"--rollout_num_gpus_per_engine {per_engine} does not divide the {gpus} GPU(s) of "
            "engines (--rollout_num_gpus)"
        )
    return Plan(nodes, per_node, gpus // per_engine, per_engine, False, tuple(notes))


def check_room(plan: Plan, cluster: Sequence[Node], kind: str = "GPU") -> None:
    """InputError: the cluster cannot hold the plan; it says what is there and what is asked.

    The largest bundles first, each on the machine where the least is left over.
    """
    free = {node.name: node.gpus for node in cluster}
    for size in sorted(plan.bundles, reverse=True):
        fit = [name for name in free if free[name] >= size]
        if not fit:
            there = ", ".join(f"{node.name}: {node.gpus}" for node in cluster) or "none"
            raise InputError(
                f"the cluster is too small: asked are {plan.wanted}, there are {kind}s: {there}; "
                "give fewer (--actor_num_nodes, --actor_num_gpus_per_node, --rollout_num_gpus), "
                "--colocate, or add machines (ray start --address HEAD:PORT)"
            )
        free[min(fit, key=lambda name: free[name])] -= size
