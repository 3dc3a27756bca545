"""Readable records of the update of every turn: trajectories/iteration-NNNNN.turns.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from megatron_stppo.algorithm.ratio import segment_ratio, segment_sum
from megatron_stppo.base.types import Batch
from megatron_stppo.config import AlgorithmConfig
from megatron_stppo.training.update.ratios import StepRatios


def turns(batch: Batch, last: StepRatios | None, a: AlgorithmConfig) -> Iterator[list[dict[str, Any]]]:
    """Yield, for each trajectory, a list with one record per turn. Yield nothing if `last` is None.

    last: the ratios of the last step on each trajectory.
    Fields of a record: advantage and value are means over the turn's tokens. ratio is the importance ratio of
    the turn to the old policy, pooled by algorithm.pooling; it is of the turn even if the algorithm clips
    other segments. clipped is the number of clipped tokens. mismatch is the geometric mean of old policy /
    engine. Fields other than tokens are None if not finite, or if the trajectory carries no loss.

    Example: a turn of two tokens with log-probs 0.2 above the old ones and advantage 1 gives {"tokens": 2,
    "advantage": 1.0, "ratio": 1.2214, "clipped": 2.0, ...}.
    """
    if last is None:
        return
    old_T, advantage_T, offsets = batch.old_logprob_T, batch.advantage_T, batch.turn_offsets
    assert old_T is not None and advantage_T is not None
    ratio_S, count_S = last.ratio_S, offsets.diff()
    if a.segments != "turn":
        ratio_S, _ = segment_ratio(last.logprob_T, old_T, offsets, a.pooling)
    columns = {
        "advantage": segment_sum(advantage_T.double(), offsets) / count_S,
        "ratio": ratio_S,
        "clipped": segment_sum(last.clipped_T.double(), offsets),
        "mismatch": segment_ratio(old_T, batch.rollout_logprob_T, offsets)[0],
    }
    if batch.value_T is not None:
        columns["value"] = segment_sum(batch.value_T.double(), offsets) / count_S
    lists = {name: column.tolist() for name, column in columns.items()}
    records: list[list[dict[str, Any]]] = [[] for _ in batch.live_N]
    live, tokens = batch.live_N.tolist(), count_S.tolist()
    for s, n in enumerate(batch.turn_to_sequence_S.tolist()):
        of_turn = {name: _number(column[s]) if live[n] else None for name, column in lists.items()}
        records[n].append({"tokens": tokens[s]} | of_turn)
    yield from records


def _number(value: float) -> float | None:
    """Return the value rounded to six significant digits, or None if it is not finite (JSON has no NaN)."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
