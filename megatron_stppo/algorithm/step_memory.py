"""What the optimizer steps of the actor pass on to later steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self


@dataclass(frozen=True)
class StepMemory:
    """Numbers that a step reads and that the steps taken before it have written. Equal on every rank.

    A checkpoint contains them, so that a resumed run takes the same steps. A step that is skipped or held
    changes nothing.

    Example: StepMemory() before the first step; StepMemory(2/3) after one that `rate: kl` has shortened.
    """

    rate_scale: float = 1.0  # the factor of algorithm.rate
    kl_after: float = 0.0  # actor/kl_after of the last update in which a step was applied

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> Self:
        """Return the memory that a checkpoint contains. Those of earlier versions have other fields too."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in written.items() if name in names})
