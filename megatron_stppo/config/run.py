"""The sections `run`, `deadlines` and `telemetry`: what a run writes, and when it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from megatron_stppo.config.section import Section

NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$"  # no leading dot: ".." would leave the root


class RunConfig(Section):
    name: str = Field("run", pattern=NAME, description="the run's folder under `root`")
    root: Path = Field(Path("runs"), description="folder of all runs")
    seed: int = Field(0, ge=0, lt=2**32, description="of data order, sampling and initial values")
    iterations: int = Field(
        100, ge=1, description="iterations of rollout, score, advantage, update and reshard"
    )
    evaluate_every: int = Field(
        0, ge=0, description="iterations between evaluations; 0: only by the evaluate command"
    )
    checkpoint_every: int = Field(10, ge=1, description="iterations between checkpoints")
    keep_checkpoints: int = Field(2, ge=1, description="newest checkpoints kept")
    keep_every: int = Field(
        0, ge=0, description="checkpoints of iterations that this divides are never removed; 0: none"
    )
    async_checkpoints: bool = Field(
        True, description="write from a copy in host memory while training goes on; False: wait for the disk"
    )
    end_margin: float = Field(
        300, ge=0, description="seconds that a checkpoint may take before SLURM_JOB_END_TIME"
    )
    nonfinite_budget: int = Field(
        5, ge=0, description="skipped non-finite steps before the run ends with exit code 93"
    )
    dump: Literal["none", "faults", "all"] = Field(
        "faults", description="iterations whose scored batch goes to dumps/: none, those with a fault, all"
    )
    keep_dumps: int = Field(4, ge=1, description="newest dumps kept")
    spike_deviations: float = Field(
        10.0, gt=0, description="robust deviations above the median that make a number of an update a spike"
    )
    spike_window: int = Field(
        32, ge=4, description="iterations that the median is of; judged from half as many on"
    )
    rollback: bool = Field(
        False,
        description="after a spike, go on with the newest checkpoint and the tasks that come next; once per "
        "checkpoint",
    )

    @property
    def folder(self) -> Path:
        return self.root / self.name


class DeadlinesConfig(Section):
    """Seconds that a phase may take. A rank that exceeds one reports the stacks of its threads and the rank
    that the others wait for, and ends the run with exit code 1."""

    start_up: float = Field(3600.0, gt=0, description="until the first rollout or evaluation begins")
    rollout: float = Field(3600.0, gt=0, description="waiting for tools (environment.tool_wait) is added")
    score: float = Field(3600.0, gt=0, description="log-probs and values")
    advantage: float = Field(600.0, gt=0, description="credit to tokens")
    update: float = Field(7200.0, gt=0, description="all optimizer steps of an iteration")
    reshard: float = Field(1800.0, gt=0, description="weights to the engine")
    evaluate: float = Field(7200.0, gt=0, description="one evaluation")
    checkpoint: float = Field(3600.0, gt=0, description="one checkpoint, or the wait for the last one")
    other: float = Field(600.0, gt=0, description="between two phases: metrics and logs are written there")


class TelemetryConfig(Section):
    """Reporters in addition to metrics.jsonl and tensorboard/, which every run writes."""

    wandb_project: str | None = Field(
        None, description="Weights & Biases project; default: none. WANDB_API_KEY holds the key"
    )
    wandb_mode: Literal["online", "offline"] = Field(
        "online", description="offline: kept in the run's folder for `wandb sync`"
    )
    prometheus_port: int | None = Field(
        None, ge=1, le=65535, description="the last row's numbers on http://127.0.0.1:PORT/metrics"
    )
    profile: tuple[int, int] | None = Field(
        None, description="first and last iteration of rank 0's torch.profiler trace, in profile/"
    )
    nvtx: bool = Field(False, description="an NVTX range per phase, for Nsight Systems")

    @model_validator(mode="after")
    def _window(self) -> TelemetryConfig:
        if self.profile is not None and not 1 <= self.profile[0] <= self.profile[1]:
            raise ValueError(
                f"profile={list(self.profile)} is no window; give [first, last] with 1 <= first <= last"
            )
        return self
