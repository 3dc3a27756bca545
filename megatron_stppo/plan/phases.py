"""The memory of a GPU in each phase of an iteration, by item."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_stppo.model.offload import MAY_LEAVE, NEEDED, Offload, Phase
from megatron_stppo.plan.engine import EngineUse
from megatron_stppo.plan.memory import ModelUse


@dataclass(frozen=True)
class StageUse:
    """The memory of each rank of one pipeline stage, in bytes. All ranks of a stage hold the same."""

    stage: int
    ranks: int
    layers: int
    models: Mapping[str, ModelUse]  # by role
    scored: tuple[str, ...]  # roles of the models that are scored
    in_flight: Mapping[str, int]  # by role
    trunk: int  # frozen weights that all models share; 0 without adapters
    buffers: int  # of megatron, shared by all models
    served_flop: int  # of a micro-batch through what the engine serves
    logits: int  # one chunk of logits on the last stage; already included in the models' numbers

    def held(self, phase: Phase, offload: Offload) -> dict[str, int]:
        """Return the bytes that stay on the GPU during the whole phase, by item."""
        away = set(MAY_LEAVE[offload]) - set(NEEDED[phase])
        models = self.models.values()
        shared = {"frozen weights": 0 if "trunk" in away else self.trunk} if self.trunk else {}
        return shared | {
            "weights": sum(use.weights for role, use in self.models.items() if role not in away),
            "gradients": 0 if "gradients" in away else sum(use.gradients for use in models),
            "optimizer": 0 if "optimizer" in away else sum(use.optimizer for use in models),
            "buffers": self.buffers + sum(use.buffers for use in models),
        }

    def updating(self, role: str) -> int:
        """Return the largest number of bytes that an update of a model adds."""
        use = self.models[role]
        return max(self.in_flight[role] + use.working + use.set_aside, use.stepping)

    def phases(self, engine: EngineUse, staging: int, offload: Offload) -> dict[Phase, dict[str, int]]:
        """Return bytes by phase and item. In score and update one model computes at a time.

        staging: bytes of the reshard's buffers; offload: update.offload.
        """
        models = self.models
        updating = {role: self.updating(role) for role in models}
        busiest = max(updating, key=updating.__getitem__)
        kept = self.in_flight[busiest]
        serving = {"engine weights": engine.weights, "engine at work": engine.working}
        at_work: dict[Phase, dict[str, int]] = {
            "rollout": serving | {"KV cache": max(0, engine.cache)},
            "reshard": {"engine weights": engine.weights, "reshard buffers": staging},
            "score": {"at work": max((models[role].scoring for role in self.scored), default=0)},
            "update": {"in flight": kept, "at work": updating[busiest] - kept},
        }
        return {phase: self.held(phase, offload) | items for phase, items in at_work.items()}

    def totals(self, engine: EngineUse, staging: int, offload: Offload) -> dict[Phase, int]:
        phases = self.phases(engine, staging, offload)
        return {phase: sum(items.values()) for phase, items in phases.items()}
