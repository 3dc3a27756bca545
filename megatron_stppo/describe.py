"""What an iteration's trajectories and batch look like, in numbers for metrics.jsonl."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatron_stppo.types import Batch, Trajectory


def outcomes(trajectories: Sequence[Trajectory]) -> Counter[str]:
    return Counter(t.outcome for t in trajectories)


def mean_of(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Field by field. Example: [{"a": 1}, {"a": 3}] gives {"a": 2}."""
    return {name: statistics.fmean(row[name] for row in rows) for name in rows[0]} if rows else {}


def describe(trajectories: Sequence[Trajectory], batch: Batch) -> dict[str, Any]:
    """Reward, behaviour and train/serve mismatch of a scored batch. Equal on all ranks."""
    return describe_rollouts(trajectories) | describe_batch(batch)


def describe_rollouts(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Reward and behaviour."""
    counted, played = outcomes(trajectories), [t for t in trajectories if t.turns]
    return {
        "reward/mean": statistics.fmean(t.reward for t in played) if played else 0.0,
        "rollout/exact_match": counted["ok"] / max(1, len(played)),
        "rollout/searched": statistics.fmean(t.searches > 0 for t in played) if played else 0.0,
        "rollout/turns": statistics.fmean(len(t.turns) for t in played) if played else 0.0,
        "rollout/valid_action_rate": sum(t.valid_actions for t in played)
        / max(1, sum(len(t.turns) for t in played)),
        **{f"outcome/{name}": counted[name] for name in ("ok", "wrong", "truncated", "error", "timeout")},
    }


def describe_batch(batch: Batch) -> dict[str, Any]:
    """What a scored batch tells without its trajectories."""
    live_T = batch.live_T
    assert batch.old_logprob_T is not None
    mismatch_T = (batch.old_logprob_T - batch.rollout_logprob_T)[live_T]
    row: dict[str, Any] = {
        "rollout/action_tokens": len(live_T),
        "rollout/tokens": len(batch.tokens_P),
        "mismatch/mean_abs": _mean(mismatch_T.abs()),
        "mismatch/mean_ratio": _mean(mismatch_T.exp()),
    }
    if batch.reference_logprob_T is not None:
        row["kl/reference"] = _mean((batch.old_logprob_T - batch.reference_logprob_T)[live_T])
    if batch.advantage_T is not None:
        row["advantage/std"] = float(batch.advantage_T[live_T].std()) if live_T.sum() > 1 else 0.0
    if batch.value_T is not None and batch.return_T is not None:
        row["critic/explained_variance"] = _explained(batch.value_T[live_T], batch.return_T[live_T])
    return row


def _mean(x: Tensor) -> float:
    return float(x.mean()) if len(x) else 0.0


def _explained(value: Tensor, target: Tensor) -> float:
    """1 - Var[return - value] / Var[return]; 0 where returns do not vary."""
    spread = float(target.var()) if len(target) > 1 else 0.0
    return 1 - float((target - value).var()) / spread if spread > 0 else 0.0
