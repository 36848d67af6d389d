"""Settings of a run that is spread over GPUs and machines by Ray."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from vireo.settings.section import Section, Text


class ClusterSettings(Section):
    """Where trainers and engines run. With the number of GPUs or a launcher given, Ray places
    them; else this process, or each that torchrun starts, is a trainer."""

    launcher: Literal["ray"] | None = Field(
        default=None,
        description="Start the trainers through Ray. Default: where actor_num_gpus_per_node is "
        "given.",
    )
    actor_num_nodes: int = Field(default=1, ge=1, description="Machines with trainers.")
    actor_num_gpus_per_node: int | None = Field(
        default=None, ge=1, description="Trainers on each of them, one a GPU. Default: 1."
    )
    rollout_num_gpus: int | None = Field(
        default=None,
        ge=1,
        description="GPUs of engines, apart from those of trainers. Default with an engine that is "
        "a server: as many as trainers have.",
    )
    rollout_num_gpus_per_engine: int = Field(
        default=1, ge=1, description="GPUs of one engine, which splits its tensors over them."
    )
    colocate: bool = Field(
        default=False,
        description="Trainers and engines take turns on the same GPUs: the engine gives its memory "
        "back while training, the trainer while generating.",
    )
    trainer_offload: Literal["all", "optimizer", "none"] = Field(
        default="all",
        description="What colocated trainers move to host memory while the engine generates.",
    )
    ray_address: Text | None = Field(
        default=None,
        description="Address of the Ray cluster. Default: RAY_ADDRESS, else one on this machine, "
        "which is started if there is none.",
    )
    engine_start_timeout: float = Field(
        default=900.0, gt=0, description="Seconds until engines must answer."
    )
    train_backend: Literal["fsdp"] | None = Field(
        default=None, description="As published commands name it; there is no other."
    )

    @model_validator(mode="after")
    def _rules(self) -> ClusterSettings:
        if self.actor_num_nodes > 1 and self.actor_num_gpus_per_node is None:
            raise ValueError(
                "--actor_num_nodes needs --actor_num_gpus_per_node: how many GPUs of each machine"
            )
        return self

    @property
    def by_ray(self) -> bool:
        """Whether Ray places the run."""
        return self.launcher == "ray" or self.actor_num_gpus_per_node is not None
