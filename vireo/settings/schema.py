"""The settings tree: every setting's name, type, bounds, default and meaning, said once.

The flags, the table of `vireo settings` and the error texts are all made from this file. Rules that
join two settings are validators here; rules that need the data, the model or the number of ranks
are the trainer's.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from vireo.settings.cluster import ClusterSettings
from vireo.settings.rl import AlgoSettings, PromptSettings, RewardSettings, RolloutSettings
from vireo.settings.rollout import EngineSettings
from vireo.settings.section import Names, Numbers, Recompute, Section, Text

SFT = ("fsdp_vlm", "fsdp")  # trainers without a rollout
RL_SECTIONS = ("prompts", "rollout", "rewards", "algo", "engine")
TRAINER_DEFAULTS: dict[Any, dict[str, Any]] = {
    "grpo": {"optim.lr": 1e-6, "optim.lr_scheduler": "constant", "optim.warmup_ratio": 0.0}
}


class ModelSettings(Section):
    """Which model, and which parts of it learn."""

    vlm_model_name_or_path: Text = Field(
        description="Folder or Hub name of the model to train. Required."
    )
    processor_name_or_path: Text | None = Field(
        default=None,
        description="Folder or Hub name of the processor. Default: the model's folder.",
    )
    freeze_vision: bool = Field(default=True, description="Leave the vision tower as it is.")
    freeze_mm_proj: bool = Field(
        default=False,
        description="Leave the projector between vision tower and language model as it is.",
    )
    freeze_language: bool = Field(
        default=False, description="Leave the layers of the language model as they are."
    )
    freeze_embeddings: bool | None = Field(
        default=None,
        description="Leave the token embeddings and the output head as they are. "
        "Default: as freeze_language.",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Run the Python code that a model folder brings along, where it needs it.",
    )
    chat_template: Literal["qwen", "llava", "minicpm", "llama32v"] | None = Field(
        default=None, description="Chat template to render turns with. Default: the model's own."
    )
    compile: bool = Field(
        default=False,
        description="Compile decoder and vision layers (torch.compile): faster steps after a "
        "longer first one, and other roundings.",
    )


class DataSettings(Section):
    """Which rows, and how they become examples."""

    train_file: Names | None = Field(
        default=None, description="Data files with the rows to train on."
    )
    train_weights: Numbers | None = Field(
        default=None,
        description="How often an epoch has the rows of each train_file: 2 is twice, 0.5 is half "
        "of them, another half in the next epoch. When streaming, the ratio in which the files "
        "take turns. Default: 1 each; streams one after the other.",
    )
    streaming: bool = Field(
        default=False,
        description="Read train_file in its order, without looking at all rows at the start. "
        "Needs max_steps.",
    )
    shuffle_buffer: int = Field(
        default=1000,
        ge=1,
        description="Rows that are shuffled among themselves when streaming.",
    )
    eval_file: Text | None = Field(
        default=None, description="Data file with the rows to evaluate on. Default: no evaluation."
    )
    image_root: Text | None = Field(
        default=None,
        description="Folder that image paths start from. Default: the data file's folder.",
    )
    image_size: int | None = Field(
        default=None, ge=1, description="Size of an image in pixels. Default: the processor's own."
    )
    image_strategy: Literal["longest", "pad_square"] = Field(
        default="longest",
        description="How an image meets its size: scale the longest side, or pad to a square.",
    )
    pack_multi_image: bool = Field(
        default=True,
        description="Keep all images of a row in one sequence, in reading order. false: a row "
        "with several images is refused.",
    )
    max_length: int | None = Field(
        default=None,
        ge=1,
        description="Longest row in tokens; a longer one is refused, never cut. "
        "Default: the model's limit.",
    )
    on_bad_row: Literal["error", "skip"] = Field(
        default="error",
        description="What a refused row does: stop the run, or be skipped and listed.",
    )
    # `validate` is taken by pydantic, so only the attribute is named otherwise.
    validate_rows: Literal["lazy", "full"] = Field(
        default="lazy",
        alias="validate",
        description="When images and lengths are checked: as rows are read, or all at the start.",
    )
    num_workers: int = Field(
        default=2,
        ge=0,
        description="Processes that read rows ahead, per rank. 0: in the trainer itself.",
    )
    shuffle: bool = Field(
        default=True, description="Take the rows of each epoch in a new random order."
    )

    @model_validator(mode="after")
    def _rules(self) -> DataSettings:
        weights, files = self.train_weights, self.train_file
        if weights is not None and len(weights) != len(files or []):
            raise ValueError(
                f"--train_weights has {len(weights)} number{'s' * (len(weights) != 1)} for "
                f"{len(files or [])} files of --train_file: give one for each"
            )
        return self


class BatchSettings(Section):
    """How many rows or tokens a micro-batch and an optimizer step hold."""

    per_device_train_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Rows of one micro-batch on one rank. "
        "Default: 1 when max_tokens_per_gpu is not set.",
    )
    grad_accum_steps: int | None = Field(
        default=None,
        ge=1,
        description="Micro-batches of one optimizer step. Default: as global_batch_size needs.",
    )
    global_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Rows of one optimizer step over all ranks. "
        "Default: ranks times grad_accum_steps micro-batches.",
    )
    max_tokens_per_gpu: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of one micro-batch at most, padding counted, in place of a number of "
        "rows.",
    )
    packing: bool | None = Field(
        default=None,
        description="Join rows into one sequence instead of padding them. "
        "Default: where the model family can be packed.",
    )

    use_dynamic_batch_size: bool | None = Field(
        default=None,
        description="As published commands say that max_tokens_per_gpu counts: it always does.",
    )

    @model_validator(mode="after")
    def _rules(self) -> BatchSettings:
        wanted = self.use_dynamic_batch_size
        if wanted is not None and wanted != (self.max_tokens_per_gpu is not None):
            raise ValueError(
                f"--use_dynamic_batch_size {str(wanted).lower()} "
                + ("needs --max_tokens_per_gpu" if wanted else "excludes --max_tokens_per_gpu")
            )
        if self.max_tokens_per_gpu is None:
            return self
        if self.per_device_train_batch_size is not None:
            raise ValueError(
                "--per_device_train_batch_size and --max_tokens_per_gpu exclude each other: "
                "a micro-batch is sized by rows or by tokens; leave one out"
            )
        return self


class OptimSettings(Section):
    """AdamW, its schedule, and when the run ends."""

    lr: float = Field(
        default=1e-5, ge=0, description="Highest learning rate, reached after the warm-up."
    )
    vision_lr: float | None = Field(
        default=None, ge=0, description="Highest learning rate of the vision tower. Default: lr."
    )
    mm_proj_lr: float | None = Field(
        default=None, ge=0, description="Highest learning rate of the projector. Default: lr."
    )
    embeddings_lr: float | None = Field(
        default=None,
        ge=0,
        description="Highest learning rate of token embeddings and output head. Default: lr.",
    )
    lr_scheduler: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="How the learning rate falls after the warm-up."
    )
    warmup_ratio: float = Field(
        default=0.03, ge=0, le=1, description="Share of all optimizer steps spent warming up."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's weight decay. 0: none.")
    adam_beta1: float = Field(
        default=0.9, ge=0, lt=1, description="AdamW's decay of the mean gradient."
    )
    adam_beta2: float = Field(
        default=0.999, ge=0, lt=1, description="AdamW's decay of the mean squared gradient."
    )
    adam_eps: float = Field(
        default=1e-8, gt=0, description="AdamW's term that keeps the division from zero."
    )
    clip_grad_norm: float = Field(
        default=1.0, ge=0, description="Gradients with a larger norm are scaled down to it. 0: off."
    )
    max_steps: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps after which the run ends. Default: no limit.",
    )
    num_epochs: int | None = Field(
        default=None,
        ge=1,
        description="Passes over the data after which the run ends. Default: 1 without max_steps; "
        "with both, the first to come.",
    )


class FsdpSettings(Section):
    """How the model is spread over ranks, and what that costs in memory."""

    enable: bool = Field(default=True, description="Shard the model over the ranks with FSDP2.")
    sharding: Literal["full", "hybrid"] = Field(
        default="full",
        description="Shard over all ranks, or within groups that each hold a whole copy.",
    )
    shard_size: int | None = Field(
        default=None,
        ge=1,
        description="Ranks of one group under hybrid sharding. Default: the ranks of one host.",
    )
    mp_dtype: Literal["bf16", "fp32"] | None = Field(
        default=None,
        description="Number format of the computation; master weights stay fp32. "
        "Default: bf16 on CUDA, fp32 on CPU.",
    )
    auto_wrap_cls: Names | None = Field(
        default=None,
        description="Layer classes that are sharded one by one. Default: the family's own.",
    )
    checkpoint: Literal["sharded", "full"] = Field(
        default="sharded",
        description="Checkpoints as one file per rank, or gathered into whole tensors.",
    )
    full_params: bool = Field(
        default=False, description="As published commands ask for checkpoint full."
    )
    grad_ckpt: Recompute = Field(
        default="none",
        description="Recompute activations in the backward pass, less memory and more time: of "
        "none, all (full) or every N-th decoder layer, or as few as the memory needs (auto). "
        "true is full, false is none.",
    )

    @model_validator(mode="after")
    def _rules(self) -> FsdpSettings:
        if self.sharding == "hybrid" and not self.enable:
            raise ValueError(
                "--fsdp_sharding hybrid needs --fsdp_enable true: without FSDP nothing is sharded"
            )
        if self.full_params:
            self.checkpoint = "full"
        return self


class LoraSettings(Section):
    """Low-rank adapters in place of training whole weights."""

    r: int = Field(
        default=0,
        ge=0,
        description="Rank of the adapters. 0: none, whole weights are trained.",
    )
    alpha: int = Field(
        default=16, ge=1, description="Scale of the adapters: they count alpha / r times."
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Share of adapter inputs dropped.")
    target_modules: Names | None = Field(
        default=None,
        description="Linear modules that get an adapter: module names (q_proj), or vision_tower, "
        "mm_proj, language for all of a part. Default: language.",
    )
    ignore_modules: Names | None = Field(
        default=None,
        description="Modules that get no adapter though they are targets, named the same way. "
        "Default: none.",
    )
    adapter: Text | None = Field(
        default=None,
        description="Adapter folder to start from, as exported; it gives r, alpha, dropout and "
        "modules. Default: new adapters.",
    )


class RunSettings(Section):
    """Where a run writes, what it repeats, and how often it logs, evaluates and saves."""

    output_dir: Text | None = Field(
        default=None,
        description="Folder of the run. Default: runs/NAME, NAME being trainer and time.",
    )
    save_dir: Text | None = Field(
        default=None,
        description="Folder of the checkpoints. Default: checkpoints/ in the run's folder.",
    )
    resume: Text | None = Field(
        default=None,
        description="Checkpoint to go on from: a path, or auto for the newest in save_dir. "
        "Default: start afresh.",
    )
    seed: int = Field(
        default=42, ge=0, description="Seed of every random choice: order, dropout, sampling."
    )
    logging_steps: int = Field(
        default=1, ge=1, description="Optimizer steps between two logged records."
    )
    eval_steps: int = Field(
        default=0,
        ge=0,
        description="Optimizer steps between two evaluations. 0: only at the end, if eval_file is "
        "given.",
    )
    save_steps: int = Field(
        default=0, ge=0, description="Optimizer steps between two checkpoints. 0: only at the end."
    )
    keep_checkpoints: int = Field(
        default=0, ge=0, description="Checkpoints kept; older ones are removed. 0: all."
    )
    eval_samples: int = Field(
        default=8, ge=0, description="Rows answered by generation at each evaluation. 0: none."
    )
    check_steps: int = Field(
        default=100,
        ge=0,
        description="Optimizer steps between two checks of a row: scored alone as beside others, "
        "and with its pixels permuted. 0: none.",
    )
    check_action: Literal["warn", "stop"] = Field(
        default="warn", description="What a failed check does: warn, or stop the run."
    )
    profile: bool = Field(
        default=False,
        description="Write a trace of steps 4 and 5, and what a GPU's memory held, to profile/ in "
        "the run folder.",
    )
    deterministic: bool = Field(
        default=False,
        description="Only algorithms that give the same bits each time, even where slower.",
    )
    report_to: Names | None = Field(
        default=None,
        description="Trackers beside the run folder: tensorboard, wandb, trackio, or none. "
        "Default: tensorboard where it is installed.",
    )
    project: Text = Field(default="vireo", description="Project that trackers file the run under.")
    run_name: Text | None = Field(
        default=None, description="Name of the run in trackers. Default: the run folder's."
    )
    push_to_hub: Text | None = Field(
        default=None,
        description="Hub repository ORG/NAME that gets the exported model when the run ends. "
        "Default: none.",
    )
    hub_private: bool = Field(
        default=True, description="Make the Hub repository private if it is new."
    )
    max_new_tokens: int = Field(default=64, ge=1, description="Longest generated answer in tokens.")


class Settings(Section):
    """All settings of one run. Plain data: it compares, pickles, and is written as YAML."""

    trainer: Text = Field(default="fsdp_vlm", description="Trainer that runs.")
    debug: bool = Field(default=False, description="Show the traceback of an error too.")
    model: ModelSettings
    data: DataSettings = Field(default_factory=DataSettings)
    batch: BatchSettings = Field(default_factory=BatchSettings)
    optim: OptimSettings = Field(default_factory=OptimSettings)
    fsdp: FsdpSettings = Field(default_factory=FsdpSettings)
    lora: LoraSettings = Field(default_factory=LoraSettings)
    run: RunSettings = Field(default_factory=RunSettings)
    prompts: PromptSettings = Field(default_factory=PromptSettings)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    rewards: RewardSettings = Field(default_factory=RewardSettings)
    algo: AlgoSettings = Field(default_factory=AlgoSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    cluster: ClusterSettings = Field(default_factory=ClusterSettings)

    @model_validator(mode="after")
    def _rules(self) -> Settings:
        if self.fsdp.grad_ckpt == "auto" and self.batch.max_tokens_per_gpu is None:
            raise ValueError(
                "--grad_ckpt auto needs --max_tokens_per_gpu, to know what must fit; give it with "
                "--global_batch_size, or use --grad_ckpt full"
            )
        budget, rows = self.batch.max_tokens_per_gpu, self.batch.global_batch_size
        if self.trainer in SFT and budget is not None and rows is None:
            raise ValueError(
                "--max_tokens_per_gpu needs --global_batch_size: a budget of tokens does not say "
                "how many rows an optimizer step has"
            )
        for name in RL_SECTIONS if self.trainer in SFT else ():
            section = getattr(self, name)
            if section != type(section)():
                also = next(n for n, v in section if v != getattr(type(section)(), n))
                raise ValueError(f"--{also} is for --trainer grpo, found {self.trainer}")
        cluster = self.cluster
        if self.trainer in SFT and (cluster.rollout_num_gpus or cluster.colocate):
            also = "colocate" if cluster.colocate else "rollout_num_gpus"
            raise ValueError(f"--{also} is for --trainer grpo, found {self.trainer}")
        return self

    @property
    def rollout_trainer(self) -> bool:
        """Whether the trainer has rollouts."""
        return self.trainer not in SFT

    def to_yaml(self) -> str:
        """Every setting with its value, in a form that `--config` reads back to an equal object."""
        import yaml

        idle = set(RL_SECTIONS) if self.trainer in SFT else None  # theirs are the defaults
        kept = self.model_dump(mode="json", by_alias=True, exclude=idle)
        return yaml.safe_dump(kept, sort_keys=False)
