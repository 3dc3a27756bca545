"""A GPU's memory in each phase of an iteration, item by item."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_stppo.plan.engine import EngineUse
from megatron_stppo.plan.memory import ModelUse

Phase = Literal["serving", "reshard", "scoring", "update"]


@dataclass(frozen=True)
class StageUse:
    """What the ranks of one pipeline stage hold alike."""

    stage: int
    ranks: int
    layers: int
    models: Mapping[str, ModelUse]  # by role
    in_flight: Mapping[str, int]  # by role
    buffers: int  # megatron's, shared by its models
    logits: int  # of all that, one chunk of logits on the last stage

    @property
    def resident(self) -> int:
        return sum(use.resident for use in self.models.values()) + self.buffers

    def phases(self, engine: EngineUse, staging: int) -> dict[Phase, dict[str, int]]:
        """Bytes by phase and item; in scoring and update one model works at a time. staging: bytes of the
        reshard's buffers."""
        models = self.models
        resident = {
            "weights": sum(use.weights for use in models.values()),
            "gradients": sum(use.gradients for use in models.values()),
            "optimizer": sum(use.optimizer for use in models.values()),
            "buffers": self.buffers,
        }
        updating = {
            role: max(self.in_flight[role] + use.working, use.stepping) for role, use in models.items()
        }
        busiest = max(updating, key=updating.__getitem__)
        kept = self.in_flight[busiest]
        return {
            "serving": resident
            | {
                "engine weights": engine.weights,
                "engine at work": engine.working,
                "KV cache": max(0, engine.cache),
            },
            "reshard": resident
            | {"engine weights": engine.weights, "reshard buffers": staging},
            "scoring": resident | {"at work": max(use.scoring for use in models.values())},
            "update": resident | {"in flight": kept, "at work": updating[busiest] - kept},
        }

    def totals(self, engine: EngineUse, staging: int) -> dict[Phase, int]:
        return {phase: sum(items.values()) for phase, items in self.phases(engine, staging).items()}
