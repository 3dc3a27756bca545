"""The fields of a run, a YAML file.

They are checked without torch; file.py reads the file.

Every section belongs to the stage of the same name. `megatron:` is passed to megatron's TransformerConfig
unchanged, if validation/passed_on.py accepts it.
"""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, Field

from megatron_stppo.base.errors import ConfigError
from megatron_stppo.config.algorithm import AlgorithmConfig
from megatron_stppo.config.model import LoraConfig, ModelConfig, ParallelConfig
from megatron_stppo.config.rollout import (
    DataConfig,
    EnvironmentConfig,
    EvaluateConfig,
    RetrievalConfig,
    RolloutConfig,
)
from megatron_stppo.config.run import DeadlinesConfig, RunConfig, ServingConfig, TelemetryConfig
from megatron_stppo.config.section import Section, finite
from megatron_stppo.config.update import ColdStartConfig, OptimizerConfig, Source, UpdateConfig, source

__all__ = [
    "AlgorithmConfig",
    "Config",
    "ConfigError",
    "DeadlinesConfig",
    "EnvironmentConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RetrievalConfig",
    "RolloutConfig",
    "RunConfig",
]


# YAML 1.2's numbers that YAML 1.1 reads as text, such as 2e-2: tag, form and first characters.
EXPONENT = (
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


class _Dumper(yaml.SafeDumper):
    """Writes text in quotes if config/file.py would read it as a number."""


_Dumper.add_implicit_resolver(*EXPONENT)


class Config(Section):
    run: RunConfig = RunConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig = DataConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    rollout: RolloutConfig = RolloutConfig()
    serving: ServingConfig = ServingConfig()
    update: UpdateConfig = UpdateConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    cold_start: ColdStartConfig = ColdStartConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    megatron: dict[str, Annotated[Any, AfterValidator(finite)]] = Field(default_factory=dict)
    """fields of megatron's TransformerConfig, verbatim; those that other fields or the model's config.json
    determine are refused"""

    @property
    def max_context(self) -> int:
        """Return the largest number of tokens of a trajectory."""
        r, e = self.rollout, self.environment
        return r.max_context or r.max_prompt_tokens + (e.max_turns + 1) * (
            r.max_turn_tokens + e.max_observation_tokens
        )

    @property
    def deadline_by_phase(self) -> dict[str, float]:
        """Return the deadline of each phase in seconds.

        environment.tool_wait is added to the phases that play episodes, except if the only tool is an index
        in the process, which is always available. With serving.update=complete, a reshard waits for the
        episodes of up to max_staleness rollouts, so their time is added to its deadline.
        """
        e = self.environment
        embedded = e.kind == "search" and e.retrieval.kind == "bm25" and e.reward is None
        wait = 0.0 if embedded else e.tool_wait
        plays = dict.fromkeys(("start_up", "rollout", "evaluate"), wait)
        limits = self.deadlines.model_dump()
        if self.serving.replicas is not None and self.serving.update == "complete":
            plays["reshard"] = max(1, self.serving.max_staleness) * limits["rollout"] + wait
        return {name: limit + plays.get(name, 0.0) for name, limit in limits.items()}

    @property
    def timeout(self) -> timedelta:
        """Timeout of the process groups; longer than every phase's deadline, so that the deadline reports
        first which rank is late."""
        return timedelta(seconds=max(self.deadline_by_phase.values()) + 60)

    @property
    def engine_tensor(self) -> int:
        return self.rollout.engine_tensor or self.parallel.tensor

    @property
    def needs_critic(self) -> bool:
        return self.algorithm.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.kl_coefficient > 0

    @property
    def of_reference(self) -> Config:
        """The configuration that the reference is built with: without adapters, and with
        model.reference_path as model.path, if it is given."""
        if self.model.reference_path is None:
            return self
        return self.changed(model={"path": self.model.reference_path, "lora": LoraConfig()})

    @property
    def replays_rollout(self) -> bool:
        """Whether the trainer uses the experts that the engine chose."""
        return self.algorithm.routing_replay == "rollout"

    @property
    def old_logprob_source(self) -> Source:
        """Where the old policy's log-probs come from; see update.py."""
        return source(self.update, self.algorithm)

    @property
    def scores_actor(self) -> bool:
        """Whether the old log-probs are computed before the update, in a forward pass of their own."""
        return self.old_logprob_source == "score"

    def of_checkpoint(self) -> Config:
        """Return the configuration for models that get a checkpoint's weights and are not trained.

        It has no model.lora.path: the checkpoint has all adapters, so that the folder need not exist. Rank,
        alpha and targets are those of the section; config/file.py has completed them.
        """
        return self.changed(model={"lora": {"path": None}})

    def beside(self, folder: Path) -> Config:
        """Return a copy whose fields may name modules of this folder, that of the file."""
        return self.changed(environment=self.environment.beside(folder))

    def dump(self) -> str:
        """Return the resolved configuration as YAML; loading it gives an equal Config."""
        return yaml.dump(json.loads(self.model_dump_json()), Dumper=_Dumper, sort_keys=False)
