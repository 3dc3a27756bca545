"""The experts that the engine chose, as trajectories carry them (Routing Replay R3).

The largest number of the data type stands for unknown experts, which the trainer's router chooses: those of
a trajectory's last token, which the engine never read, and of a trajectory without a turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_stppo.base.types import Trajectory
from megatron_stppo.config import ConfigError


def dtype_of(experts: int) -> torch.dtype:
    """Return the data type of routes for a model with `experts` experts per layer."""
    return torch.uint8 if experts < 256 else torch.int32  # NCCL cannot sum int16


def unknown(dtype: torch.dtype) -> int:
    """Return the number that stands for unknown experts."""
    return torch.iinfo(dtype).max


def joined(trajectories: Sequence[Trajectory], layers: int, chosen: int, experts: int) -> Tensor:
    """Return the experts of all tokens, one trajectory after another: [tokens, layers, chosen].

    Raises ConfigError if a trajectory with turns lacks the experts of a token before its last one.
    """
    dtype = dtype_of(experts)
    parts = [torch.empty(0, layers, chosen, dtype=dtype)]
    for trajectory in trajectories:
        length = len(trajectory.token_ids)
        part = torch.full((length, layers, chosen), unknown(dtype), dtype=dtype)
        known = length - 1 if trajectory.turns else 0
        row = layers * chosen * dtype.itemsize
        if len(trajectory.routes) != known * row:
            raise ConfigError(
                f"algorithm.routing_replay=rollout: a trajectory of task {trajectory.task.index} has "
                f"{len(trajectory.routes)} bytes of experts instead of {row} for each of {known} tokens; "
                "set it to old_policy or off"
            )
        if known:
            given = np.frombuffer(trajectory.routes, dtype=str(dtype).removeprefix("torch."))
            part[:known] = torch.from_numpy(given.reshape(known, layers, chosen).copy())
        parts.append(part)
    return torch.cat(parts)
