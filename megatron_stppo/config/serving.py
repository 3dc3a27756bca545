"""The section `serving`: asynchronous training, with engines in programs of their own."""

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from megatron_stppo.config.section import Rule, Seconds, Section


class ServingConfig(Section):
    """With `replicas` null, every rank trains and serves in turn. Otherwise the ranks of `train` only train,
    and the replicas, which `megatron-stppo serve` runs, only serve."""

    replicas: int | None = Field(
        None, description="vLLM replicas beside the trainer; null: the trainer's ranks serve"
    )
    start: bool = Field(
        True,
        description="train starts the replicas on its own machine; false: start them with `megatron-stppo "
        "serve RUN_DIR`",
    )
    max_staleness: int = Field(
        1,
        ge=0,
        description="with order=admission, most versions from a trajectory's oldest token to the policy that "
        "trains on it",
    )
    order: Literal["admission", "completion"] = Field(
        "admission",
        description="episodes of the next batch: those admitted first, or those completed first, which "
        "favours short ones and may exceed max_staleness",
    )
    update: Literal["recompute", "drain", "complete"] = Field(
        "recompute",
        description="when new weights are sent. recompute: at once, and running turns continue with them; "
        "drain: after the running turns; complete: after all admitted episodes",
    )
    concurrency: int | None = Field(
        None, ge=1, description="episodes in progress per replica; default: rollout.max_sequences"
    )
    address: str | None = Field(
        None,
        description="network interface that replicas connect to; default: loopback if train starts them, "
        "else MASTER_ADDR's, or under Slurm the first rank's node's",
    )
    timeout: Seconds = Field(
        60.0, description="seconds without a sign of life after which a replica or the trainer is lost"
    )

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
