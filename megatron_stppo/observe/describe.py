"""Metrics of an iteration's trajectories and batch for metrics.jsonl."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from megatron_stppo.algorithm.penalties import k1, k3
from megatron_stppo.base.types import Batch, Summary, UpdatedBatch, Versions
from megatron_stppo.data.ledger import without_variance


def mean_of(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each field over the rows that have it, the fields in the order of their first row.

    Example: [{"a": 1}, {"a": 3, "b": 1}] gives {"a": 2, "b": 1}.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: statistics.fmean(row[name] for row in rows if name in row) for name in names}


def standard_error(values: Sequence[float], tasks: Sequence[int]) -> float:
    """Return the standard error of the mean of `values`, of which those of one task depend on each other.

    The clustered error of "Adding Error Bars to Evals" (arXiv 2411.00640), with the factor
    sqrt(G / (G - 1)) for G tasks. 0 for fewer than two tasks.
    Example: (1, 1, 0, 0) of the tasks (7, 7, 8, 8) has 0.5, of four tasks 0.289.
    """
    mean = statistics.fmean(values) if values else 0.0
    apart: defaultdict[int, float] = defaultdict(float)
    for value, task in zip(values, tasks, strict=True):
        apart[task] += value - mean
    count = len(apart)
    between = sum(total**2 for total in apart.values()) * count / max(1, count - 1)
    return math.sqrt(between) / len(values) if count > 1 else 0.0


def describe(trajectories: Sequence[Summary], batch: UpdatedBatch, version: int) -> dict[str, Any]:
    """Return reward, behaviour and train/serve mismatch of a scored batch. Equal on all ranks."""
    return describe_rollouts(trajectories, version) | describe_batch(batch)


def describe_rollouts(trajectories: Sequence[Summary], version: int) -> dict[str, Any]:
    """Return metrics of reward, behaviour and staleness. They are 0 if there is nothing to average.

    version: the policy version that is updated. The staleness of a token is `version` minus the version that
    generated it; that of a trajectory is the staleness of its oldest token.
    """
    histories = [t for t in trajectories if t.turns]
    played = [t for t in histories if t.branch == 0]
    counted = Counter(t.outcome for t in trajectories if t.branch == 0 and not t.overlong_prompt)
    turns = [turn for t in histories for turn in t.turns]
    lengths = sorted(_response_tokens(histories)) or [0]
    staleness = [version - t.policy_version for t in histories] or [0]

    def per_episode(numbers: Iterable[float]) -> float:
        return sum(numbers) / max(1, len(played))

    return {
        "reward/mean": per_episode(t.reward for t in played),
        "reward/standard_error": standard_error([t.reward for t in played], [t.group for t in played]),
        "rollout/exact_match": counted["ok"] / max(1, len(played)),
        "rollout/called_tool": per_episode(t.tool_calls > 0 for t in played),
        "rollout/tool_calls": per_episode(t.tool_calls for t in played),
        "rollout/turns": len(turns) / max(1, len(played)),
        "rollout/valid_action_rate": sum(t.valid_actions for t in histories) / max(1, len(turns)),
        "rollout/branches": len(histories) / max(1, len(played)),
        "rollout/truncated": counted["truncated"] / max(1, len(played)),
        "rollout/overlong_prompts": sum(t.overlong_prompt > 0 for t in trajectories),
        "rollout/unusable_metrics": sum(value is None for t in played for value in t.metrics.values()),
        "rollout/response_tokens": statistics.fmean(lengths),
        "rollout/response_tokens_p95": lengths[math.ceil(0.95 * len(lengths)) - 1],
        "rollout/response_tokens_max": lengths[-1],
        "rollout/staleness": statistics.fmean(staleness),
        "rollout/staleness_max": max(staleness),
        **_token_staleness(tuple(run for turn in turns for run in turn.versions), version),
        **{f"outcome/{name}": counted[name] for name in ("ok", "wrong", "truncated", "error", "timeout")},
        **environment_metrics(played),
    }


def describe_groups(trained: Sequence[Summary], dropped: Sequence[Summary] | None = None) -> dict[str, Any]:
    """Return which groups have no variance, and what dynamic sampling played and dropped.

    {} if no task was played more than once. dropped: with group numbers of its own; None without
    rollout.resample.
    Example: a batch with the rewards (0, 1) and (1, 0), for which a group of (1, 1) was dropped:
    without_variance is 1/3, resampled 1, played_per_trained 6/4, and reward_all 4/6 instead of 2/4.
    """
    batch, replaced = ([t for t in given if t.branch == 0] for given in (trained, dropped or ()))
    groups, gone = {t.group for t in batch}, {t.group for t in replaced}
    if len(batch) == len(groups):
        return {}
    flat = len(without_variance(trained)) + len(gone)
    row: dict[str, Any] = {"rollout/without_variance": flat / (len(groups) + len(gone))}
    if dropped is None:
        return row
    rewards = [t.reward for t in (*batch, *replaced) if t.turns]
    return row | {
        "rollout/resampled": len(gone),
        "rollout/played_per_trained": (len(batch) + len(replaced)) / len(batch),
        "rollout/reward_all": sum(rewards) / max(1, len(rewards)),
    }


def _response_tokens(histories: Sequence[Summary]) -> list[int]:
    """Return the action tokens of each episode, whose histories follow each other."""
    tokens: list[int] = []
    for history in histories:
        tokens += [0] if history.branch == 0 else []
        tokens[-1] += sum(turn.tokens for turn in history.turns)
    return tokens


def environment_metrics(played: Iterable[Summary]) -> dict[str, float]:
    """Return the mean of each metric of the environment, over the episodes that have it.

    Example: episodes with {"score": 1.0}, {"score": 0.0}, {"score": None} and {} give
    {"environment/score": 0.5}.
    """
    found: dict[str, list[float]] = {}
    for episode in played:
        for name, value in episode.metrics.items():
            if value is not None:
                found.setdefault(name, []).append(value)
    return {f"environment/{name}": statistics.fmean(found[name]) for name in sorted(found)}


def _token_staleness(runs: Versions, version: int) -> dict[str, float]:
    """Return the share of the tokens that are 0, 1, ... versions old, up to the oldest.

    Example: runs ((4, 3), (5, 1)) at version 5 give {"staleness/tokens_0": 0.25, "staleness/tokens_1": 0.75}.
    """
    tokens = Counter[int]()
    for generated, count in runs:
        tokens[version - generated] += count
    total = max(1, tokens.total())
    return {f"staleness/tokens_{n}": tokens[n] / total for n in range(max(tokens, default=0) + 1)}


def describe_batch(batch: UpdatedBatch) -> dict[str, Any]:
    """Return the metrics of a scored batch that do not need its trajectories."""
    live_T = batch.live_T
    mismatch_T = (batch.old_logprob_T - batch.rollout_logprob_T)[live_T]
    row: dict[str, Any] = {
        "rollout/action_tokens": len(live_T),
        "rollout/tokens": batch.tokens,
        "mismatch/mean_abs": _mean(mismatch_T.abs()),
        "mismatch/mean_ratio": _mean(mismatch_T.exp()),
    }
    if batch.reference_logprob_T is not None:
        given = batch.old_logprob_T[live_T], batch.reference_logprob_T[live_T]
        row |= {"kl/reference": _mean(k1(*given)), "kl/reference_k3": _mean(k3(*given))}
    advantage_T = batch.advantage_T[live_T]
    row |= {"advantage/mean": _mean(advantage_T), "advantage/variance": _variance(advantage_T)}
    if batch.value_T is not None and batch.return_T is not None:
        value_T, return_T = batch.value_T[live_T], batch.return_T[live_T]
        row["advantage/variance_before_whitening"] = _variance(return_T - value_T)
        if _returns_differ(return_T, batch.reward_T[live_T]):
            row["critic/explained_variance"] = explained_variance(value_T, return_T)
    return row


def _returns_differ(return_T: Tensor, reward_T: Tensor) -> bool:
    """Return whether the variance of the returns is above 1e-4 of the largest reward squared.

    Below that, returns differ by little more than KL penalties, and the share of it that values explain says
    nothing.
    """
    largest = float(reward_T.abs().max()) if len(reward_T) else 0.0
    return largest > 0 and _variance(return_T) > 1e-4 * largest**2


def current_mismatch(batch: Batch, logprob_T: Tensor, known_T: Tensor, version: int) -> dict[str, float]:
    """Return how far engine and trainer differ on the tokens of one policy version; {} without such tokens.

    version: that of the trainer's log-probs logprob_T, of which those of known_T are used.
    Example: versions (3, 4) with log-probs (-1, -1) by the engine and (-3, -1.25) by version 4 of the trainer
    give 0.25 at version 4.
    """
    chosen_T = known_T & batch.live_T & (batch.version_T == version)
    difference_T = (logprob_T - batch.rollout_logprob_T)[chosen_T]
    return {"mismatch/current_mean_abs": _mean(difference_T.abs())} if len(difference_T) else {}


def _mean(x: Tensor) -> float:
    return float(x.mean()) if len(x) else 0.0


def _variance(x: Tensor) -> float:
    return float(x.var(correction=0)) if len(x) else 0.0


def explained_variance(value: Tensor, target: Tensor) -> float:
    """Return the explained variance 1 - Var[return - value] / Var[return]; 0 if the returns do not vary."""
    spread = float(target.var()) if len(target) > 1 else 0.0
    return 1 - float((target - value).var()) / spread if spread > 0 else 0.0
