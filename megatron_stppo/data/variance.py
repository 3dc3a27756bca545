"""Groups of episodes from which a group-relative advantage learns nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_stppo.algorithm.baselines import group_relative
from megatron_stppo.base.types import FAILED, Summary


def without_variance(played: Sequence[Summary]) -> set[int]:
    """Return the groups in which the advantage of every episode is 0, by `group_relative`.

    These are groups whose live episodes have equal outcomes, and those with at most one live episode.

    played: all histories of the groups' episodes.
    Example: two episodes each of groups 0, 1 and 2, with the rewards (0, 1), (1, 1) and (0, failed): {1, 2}.
    """
    if not played:
        return set()
    # float32, as the rewards of a batch
    reward_S = torch.tensor([turn.reward for t in played for turn in t.turns], dtype=torch.float32).double()
    of_S = torch.tensor([n for n, t in enumerate(played) for _ in t.turns], dtype=torch.int64)
    advantage_N = group_relative(
        torch.zeros(len(played), dtype=torch.float64).index_add(0, of_S, reward_S),
        torch.tensor([t.group for t in played]),
        torch.tensor([t.outcome not in FAILED and bool(t.turns) for t in played]),
        normalised=False,
        first_N=torch.tensor([t.branch == 0 for t in played]),
    )
    varied = {t.group for t, advantage in zip(played, advantage_N.tolist(), strict=True) if advantage != 0}
    return {t.group for t in played} - varied
