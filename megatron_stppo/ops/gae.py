"""Generalised advantage estimation over action tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_stppo.algorithm.gae import token_level
from megatron_stppo.algorithm.ratio import check_offsets
from megatron_stppo.ops.arguments import check


def gae(
    reward: Tensor, value: Tensor, trajectory_offsets: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(advantage, returns), float32 [T]; nothing here is recorded by autograd.

    reward, value: float32 [T] over action tokens, observations left out; trajectory_offsets: int32 or int64
    [N+1] from 0 to T, non-decreasing. Definition: megatron_stppo/algorithm/gae.py.
    Raises ValueError naming the argument that does not fit.
    """
    total = reward.shape[0] if reward.dim() == 1 else None
    for name, tensor in (("reward", reward), ("value", value)):
        check(name, tensor, reward.device, (torch.float32,), (total,))
    check("trajectory_offsets", trajectory_offsets, reward.device, (torch.int32, torch.int64), (None,))
    check_offsets("trajectory_offsets", trajectory_offsets, len(reward))
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0 <= number <= 1:
            raise ValueError(f"{name}={number} is a discount; choose a number in [0, 1]")
    advantage_T, return_T = token_level(reward.detach(), value.detach(), trajectory_offsets, gamma, lam)
    return advantage_T.float(), return_T.float()
