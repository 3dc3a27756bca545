"""The experts that the engine chose, as trajectories carry them (Routing Replay R3).

The largest number of the data type stands for unknown experts, which the trainer's router chooses: those of
a trajectory's last token, which the engine never read, and of a trajectory without a turn.
"""

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


def of_rows(routes_P: Tensor, origin: Tensor) -> Tensor:
    """Return the recorded experts of packed tokens, int16 [P, layers, k].

    They are -1 where the router chooses: for unknown experts, and where `origin` is -1.

    The router chooses the experts of a dummy token in a replayed pass as in any other pass. Other experts
    would change the number of rows that an expert multiplies, and on some CPUs the last bits of live rows.
    """
    if not len(routes_P):  # no episode of this rank has a token, so the only one here is a dummy
        routes_P = routes_P.new_zeros(1, *routes_P.shape[1:])
    routes = routes_P[origin.clamp(min=0)]
    chooses = (routes == unknown(routes.dtype)) | (origin < 0)[:, None, None]
    return routes.short().masked_fill(chooses, -1)


def marks(routes_P: Tensor, stage: int) -> Tensor:
    """Return a number for the recorded experts (Batch.routes_P) of each token, int64 [P].

    The sum over pipeline stages, of which each has the experts of its own layers, is a mark of all experts.
    The marks of different experts are equal with a probability below 2^-32.
    """
    flat_P, generator = routes_P.flatten(1), torch.Generator().manual_seed(stage)
    factors = torch.randint(-(2**63), 2**63 - 1, (flat_P.shape[1],), generator=generator)
    return torch.cat([part.long() @ factors for part in flat_P.split(4096)])  # sums wrap around
