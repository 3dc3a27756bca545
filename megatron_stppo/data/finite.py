"""Checks that a batch contains only finite numbers, before it is used for training."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from megatron_stppo.base.types import Batch


def not_finite(batch: Batch) -> list[str]:
    """Return a description of each column with numbers that are not finite: rewards, log-probs, values or
    advantages of live action tokens.

    Failed trajectories are not checked, because they carry no loss.
    Example: ["reward_T: 1 of 40 not finite"].
    """
    live_T, found = batch.live_T, []
    for name, value in columns(batch).items():
        if name.endswith("_T") and value.is_floating_point():
            bad = int((~torch.isfinite(value[live_T])).sum())
            found += [f"{name}: {bad} of {int(live_T.sum())} not finite"] if bad else []
    return found


def columns(batch: Batch) -> dict[str, Tensor]:
    """Return the batch's tensors by name, without those that are None."""
    given: dict[str, Any] = {field.name: getattr(batch, field.name) for field in fields(Batch)}
    return {name: value for name, value in given.items() if value is not None}
