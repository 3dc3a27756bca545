"""The sections `run`, `serving`, `deadlines` and `telemetry`: what a run writes, where its engines are, when
it ends."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field

from megatron_stppo.config.section import Rule, Seconds, Section

NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$"  # no leading dot: ".." would leave the root


class RunConfig(Section):
    name: str = Field("run", pattern=NAME)
    """the run's folder under `root`"""
    root: Path = Path("runs")
    """folder of all runs"""
    seed: int = Field(0, ge=0, lt=2**32)
    """seed of data order, sampling and initial values"""
    iterations: int = Field(100, ge=1)
    """iterations to train"""
    evaluate_every: int = Field(0, ge=0)
    """iterations between evaluations; 0: none during training"""
    checkpoint_every: int = Field(10, ge=1)
    """iterations between checkpoints"""
    keep_checkpoints: int = Field(2, ge=1)
    """newest checkpoints to keep"""
    keep_every: int = Field(0, ge=0)
    """checkpoints at multiples of this iteration are kept for good; 0: off"""
    async_checkpoints: bool = True
    """write from a copy in host memory while training continues; false: wait for the disk"""
    end_margin: float = Field(300, ge=0, le=10_000_000)
    """seconds before SLURM_JOB_END_TIME for the last checkpoint"""
    nonfinite_budget: int = Field(5, ge=0)
    """skipped steps above which the run ends with exit code 93"""
    dump: Literal["none", "faults", "all"] = "faults"
    """iterations whose scored batch is written to dumps/"""
    keep_dumps: int = Field(4, ge=1)
    """newest dumps to keep"""
    spike_deviations: float = Field(10.0, gt=0)
    """robust standard deviations above the median at which a value of an update is a spike"""
    spike_window: int = Field(32, ge=4)
    """iterations for that median; no spikes before half of them"""
    rollback: bool = False
    """after a spike, restore the newest checkpoint (once each) and go to the next tasks"""

    @property
    def folder(self) -> Path:
        return self.root / self.name


class DeadlinesConfig(Section):
    """Seconds that a phase may take. A rank that exceeds one reports the stacks of its threads and the rank
    that the others wait for, and ends the run with exit code 1."""

    start_up: Seconds = 3600.0
    """until the first rollout or evaluation begins"""
    rollout: Seconds = 3600.0
    """one rollout; environment.tool_wait is added if tools can be unavailable"""
    score: Seconds = 3600.0
    """computing log-probs and values"""
    advantage: Seconds = 600.0
    """computing advantages"""
    update: Seconds = 7200.0
    """all optimizer steps of an iteration"""
    reshard: Seconds = 1800.0
    """copying weights to the engine"""
    evaluate: Seconds = 7200.0
    """one evaluation"""
    checkpoint: Seconds = 3600.0
    """one checkpoint, or the wait for the last one"""
    other: Seconds = 600.0
    """between two phases: metrics and logs"""


class TelemetryConfig(Section):
    """Reporters in addition to metrics.jsonl and tensorboard/, which every run writes."""

    wandb_project: str | None = None
    """Weights & Biases project; WANDB_API_KEY holds the key"""
    wandb_mode: Literal["online", "offline"] = "online"
    """offline: kept in the run's folder for `wandb sync`"""
    profile: tuple[int, int] | None = None
    """first and last iteration of rank 0's torch.profiler trace, in profile/"""
    nvtx: bool = False
    """an NVTX range per phase, for Nsight Systems"""

    def rules(self) -> Iterable[Rule]:
        first, last = self.profile or (1, 1)
        yield Rule(
            not 1 <= first <= last,
            f"profile={[first, last]} is not a window",
            "give [first, last] with 1 <= first <= last",
        )


class ServingConfig(Section):
    """With `replicas` null, every rank trains and serves in turn. Otherwise the ranks of `train` only train,
    and the replicas, which `megatron-stppo serve` runs, only serve."""

    replicas: int | None = None
    """vLLM replicas beside the trainer; null: the trainer's ranks serve"""
    start: bool = True
    """train starts the replicas on its own machine; false: start them with `megatron-stppo serve RUN_DIR`"""
    max_staleness: int = Field(1, ge=0)
    """with order=admission, most versions from a trajectory's oldest token to the policy that trains on it"""
    order: Literal["admission", "completion"] = "admission"
    """episodes of the next batch: those admitted first, or those completed first, which favours short ones
    and may exceed max_staleness"""
    update: Literal["recompute", "drain", "complete"] = "recompute"
    """when new weights are sent. recompute: at once, and running turns continue with them; drain: after the
    running turns; complete: after all admitted episodes"""
    concurrency: int | None = Field(None, ge=1)
    """episodes in progress per replica; default: rollout.max_sequences"""
    address: str | None = None
    """network interface that replicas connect to; default: loopback if train starts them, else MASTER_ADDR's,
    or under Slurm the first rank's node's"""
    timeout: Seconds = 60.0
    """seconds without a sign of life after which a replica or the trainer is lost"""

    def rules(self) -> Iterable[Rule]:
        yield Rule(
            self.replicas is not None and self.replicas < 1,
            f"replicas={self.replicas} is below 1",
            "give null if the trainer's ranks serve",
        )
        yield Rule(
            self.order == "completion" and self.max_staleness == 0,
            "order='completion' with max_staleness=0: every admitted episode is in the next batch, so there "
            "is only one order",
            "choose 'admission', or max_staleness=1 or more",
        )
