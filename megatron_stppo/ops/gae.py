"""Generalised advantage estimation over action tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_stppo.algorithm.gae import token_level, turn_level
from megatron_stppo.algorithm.ratio import check_offsets
from megatron_stppo.ops import extension
from megatron_stppo.ops.arguments import check
from megatron_stppo.ops.registration import has_data, registered


def gae(
    reward: Tensor,
    value: Tensor,
    trajectory_offsets: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    turn_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (advantage, returns), float32 [T]. Autograd records nothing.

    The definition is in megatron_stppo/algorithm/gae.py.
    reward, value: float32 [T] over action tokens, without observations.
    trajectory_offsets: int32 or int64 [N+1], from 0 to T, non-decreasing.
    turn_offsets: int32 or int64 [S+1], from 0 to T, non-decreasing. If given, the steps of GAE are turns
    instead of tokens. Every trajectory must start with a turn.
    Raises ValueError that names the argument that does not fit. The extension on a GPU reads nothing back to
    the host, so it does not raise for bad offsets: if they are out of order, every output is NaN, and it does
    not check whether a turn crosses the end of a trajectory.
    """
    total = reward.shape[0] if reward.dim() == 1 else None
    for name, tensor in (("reward", reward), ("value", value)):
        check(name, tensor, reward.device, (torch.float32,), (total,))
    offsets = {"trajectory_offsets": trajectory_offsets, "turn_offsets": turn_offsets}
    for name, given in offsets.items():
        if given is not None:
            check(name, given, reward.device, (torch.int32, torch.int64), (None,))
            if len(given) == 0:
                check_offsets(name, given, len(reward))  # raises; the extension would read the first element
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0 <= number <= 1:
            raise ValueError(f"{name}={number} is a discount; choose a number in [0, 1]")
    return _computed(reward.detach(), value.detach(), trajectory_offsets, turn_offsets, gamma, lam)


@registered("gae")
def _computed(
    reward: Tensor,
    value: Tensor,
    trajectory_offsets: Tensor,
    turn_offsets: Tensor | None,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    if not extension.applies(reward):
        _check(trajectory_offsets, turn_offsets, len(reward))
        if turn_offsets is None:
            advantage_T, return_T = token_level(reward, value, trajectory_offsets, gamma, lam)
        else:
            advantage_T, return_T = turn_level(reward, value, turn_offsets, trajectory_offsets, gamma, lam)
        return advantage_T.float(), return_T.float()
    advantage, returns = torch.empty_like(reward), torch.empty_like(reward)
    if not has_data(reward):
        return advantage, returns
    offsets = (trajectory_offsets, turn_offsets)
    counts = [0 if given is None else len(given) - 1 for given in offsets]
    wide = [None if given is None else given.long() for given in offsets]
    status = extension.run(
        "gae", reward.device, reward, value, *wide, len(reward), *counts, gamma, lam, advantage, returns
    )
    if status == extension.BAD_OFFSETS:
        _check(trajectory_offsets, turn_offsets, len(reward))  # finds the same error and raises
    return advantage, returns


def _check(trajectory_offsets: Tensor, turn_offsets: Tensor | None, total: int) -> None:
    check_offsets("trajectory_offsets", trajectory_offsets, total)
    if turn_offsets is None:
        return
    check_offsets("turn_offsets", turn_offsets, total)
    inside = trajectory_offsets[~torch.isin(trajectory_offsets, turn_offsets)]
    if len(inside):
        raise ValueError(
            f"turn_offsets: a trajectory starts at {int(inside[0])}, inside a turn; cut it there"
        )
