"""Settings of a rollout engine and of sampling, for the commands and trainers that have one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from vireo.settings.section import Names, Section, Text


class EngineSettings(Section):
    """Which engine answers prompts, and how it is reached."""

    engine: Literal["embedded", "sglang", "vllm", "serve"] = Field(
        default="embedded",
        description="What generates: this process (embedded), an SGLang or vLLM server, or the "
        "embedded engine as a server (serve).",
    )
    sglang_url: Names | None = Field(
        default=None,
        description="Running SGLang servers (or `vireo serve`): http://HOST:PORT,... "
        "Default: one is started; settings of its own pass through as --sglang-NAME.",
    )
    vllm_url: Names | None = Field(
        default=None,
        description="Running vLLM servers. Default: one is started; settings of its own pass "
        "through as --vllm-NAME.",
    )
    engine_fallback: bool = Field(
        default=False,
        description="Use the embedded engine where the chosen one cannot run the model.",
    )
    engine_api_key: Text | None = Field(
        default=None,
        exclude=True,  # no record of a run has it
        description="Key of the servers given by URL. Default: VIREO_API_KEY.",
    )
    engine_admin_key: Text | None = Field(
        default=None,
        exclude=True,
        description="Key of their control endpoints. Default: VIREO_ADMIN_KEY, or the API key.",
    )
    engine_concurrency: int = Field(
        default=256, ge=1, description="Requests that are on their way to one server at most."
    )
    engine_timeout: float = Field(
        default=600.0, gt=0, description="Seconds without an answer after which a server hangs."
    )
    engine_retries: int = Field(
        default=3, ge=0, description="Times that a request is sent again after a passing failure."
    )
    engine_patience: float = Field(
        default=0.0,
        ge=0,
        description="Seconds that a server given by URL, once gone, may take to answer again: it "
        "gets the last weights then, and nothing is lost. 0: it stays gone.",
    )
    allow_image_urls: bool = Field(
        default=False, description="Fetch images that rows name by http(s) URL."
    )
    allow_image_paths: bool = Field(
        default=False, description="Read images outside the data file's folder."
    )
    weight_sync: Literal["shared", "group", "disk"] | None = Field(
        default=None,
        description="How new weights reach a server: in shared memory, over a process group, or "
        "by a folder that it reads. Default: shared on this machine, else group; disk for an "
        "engine of several GPUs, and for vLLM.",
    )
    server_args: dict[str, str] = Field(
        default={},
        description="Settings of a server that is started, by its own names: what "
        "--sglang-NAME and --vllm-NAME give.",
    )

    @model_validator(mode="after")
    def _rules(self) -> EngineSettings:
        for name in self.server_args:
            if not name.startswith(f"{self.engine}-"):
                raise ValueError(f"--{name} is for another engine than {self.engine}")
        return self


class SamplingSettings(Section):
    """How responses are sampled."""

    n: int = Field(default=1, ge=1, description="Responses a prompt.")
    max_new_tokens: int = Field(default=256, ge=1, description="Longest response in tokens.")
    temperature: float = Field(default=1.0, ge=0, description="Temperature; 0 is greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Share of the probability kept.")
    top_k: int = Field(default=0, ge=0, description="Most likely tokens kept. 0: all.")
    seed: int = Field(default=42, ge=0, description="Seed; each response has its own from it.")
