"""Numbers of tokens of some trajectories: all, distinct, and those that a packing computes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from megatron_stppo.base.types import Trajectory
from megatron_stppo.data.packing import PackingSpec, pack, to_batch


def counts(played: Sequence[Trajectory], budgets: Sequence[int]) -> dict[str, Any]:
    """Return the numbers of tokens; `computed` has one for each budget, a number of tokens_per_microbatch.

    `distinct` is the size of the trie of all trajectories, which no packing can go below. `reached` is the
    share of its saving that the packing reaches.
    Example: three trajectories of 10 tokens of which 5 are common have 30 tokens and 20 distinct ones. If two
    of them fit into a microbatch, 25 are computed: half of the saving.
    """
    tokens = sum(len(one.token_ids) for one in played)
    found = {"trajectories": len(played), "tokens": tokens, "distinct": distinct(played)}
    found["action tokens"] = sum(len(turn.token_ids) for one in played for turn in one.turns)
    computed = {str(budget): _computed(played, budget) for budget in budgets}
    saving = max(1, tokens - found["distinct"])
    reached = {budget: (tokens - n) / saving for budget, n in computed.items()}
    longest = max(len(one.token_ids) for one in played)
    return found | {"longest": longest, "computed": computed, "reached": reached}


def distinct(played: Sequence[Trajectory]) -> int:
    """Return the number of different beginnings of trajectories: the nodes of their trie."""
    rows = sorted(one.token_ids for one in played)
    same = ([x == y for x, y in zip(a, b, strict=False)] for a, b in pairwise(rows))
    common = sum([*equal, False].index(False) for equal in same)
    return sum(map(len, rows)) - common


def _computed(played: Sequence[Trajectory], budget: int) -> int:
    spec = PackingSpec(budget, share_prefixes=True)
    microbatches = pack(to_batch(played), range(len(played)), spec)
    return sum(one.distinct[0] for one in microbatches)
