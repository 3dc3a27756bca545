"""Numbers of tokens of some trajectories (all, distinct, computed by a packing), and the tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from megatron_stppo.base.types import Trajectory
from megatron_stppo.data.packing import PackingSpec, pack, to_batch
from tools.measuring import headline, markdown

PARTS = ("score", "update", "processor")


def counts(played: Sequence[Trajectory], budgets: Sequence[int]) -> dict[str, Any]:
    """Return the numbers of tokens; `computed` has one for each budget, a number of tokens_per_microbatch.

    `distinct` is the size of the trie of all trajectories, which no packing can go below. `reached` is the
    share of its saving that the packing reaches.
    Example: three trajectories of 10 tokens of which 5 are common have 30 tokens and 20 distinct ones. If two
    of them fit into a microbatch, 25 are computed: half of the saving.
    """
    tokens, fewest = sum(len(t.token_ids) for t in played), distinct(played)
    batch, computed = to_batch(played), {}
    for budget in budgets:
        packs = pack(batch, range(len(played)), PackingSpec(budget, share_prefixes=True))
        computed[str(budget)] = sum(microbatch.distinct[0] for microbatch in packs)
    return {
        "trajectories": len(played),
        "tokens": tokens,
        "action tokens": sum(len(turn.token_ids) for t in played for turn in t.turns),
        "distinct": fewest,
        "computed": computed,
        "reached": {budget: (tokens - n) / max(1, tokens - fewest) for budget, n in computed.items()},
    }


def distinct(played: Sequence[Trajectory]) -> int:
    """Return the number of different beginnings of trajectories: the nodes of their trie."""
    rows = sorted(t.token_ids for t in played)
    same = ([x == y for x, y in zip(a, b, strict=False)] for a, b in pairwise(rows))
    common = sum([*equal, False].index(False) for equal in same)
    return sum(map(len, rows)) - common


def tables(record: dict[str, Any]) -> str:
    """Return the tables of tokens, and of times and memory if they were measured."""
    cases = record["cases"]
    parts = [f"{headline(record['machine'])}; model {record['model']}", tokens(cases)]
    if measured := {case: found for case, found in cases.items() if "on" in found}:
        parts += [
            f"tokens_per_microbatch={record['timed']:,}; seconds: median (least to most) of the rounds",
            times(measured),
        ]
    return "\n\n".join(parts)


def summary(record: dict[str, Any]) -> dict[str, float]:
    """Return the ratios of the tokens, of the tokens per second and of the peak memory, by case."""
    found: dict[str, float] = {}
    for case, measured in record["cases"].items():
        off, on = (seconds(measured[arm]) for arm in ("off", "on"))
        n, peak = measured["counts"], measured["peak"]
        found |= {
            f"{case} tokens / computed": n["tokens"] / n["computed"][str(record["timed"])],
            f"{case} seconds, off / on": off / on,
            f"{case} tokens/s": n["tokens"] / on,
            f"{case} peak, on / off": peak["on"] / peak["off"],
            f"{case} difference": measured["check"]["mean difference"],
        }
    return found


def tokens(cases: dict[str, Any]) -> str:
    """Return the table of tokens; a cell "4,663 (95%)" has those computed and the share of the saving."""
    budgets, lines = list(next(iter(cases.values()))["counts"]["computed"]), []
    for case, found in cases.items():
        n = found["counts"]
        numbers = [f"{n[name]:,}" for name in ("trajectories", "tokens", "action tokens", "distinct")]
        cells = [f"{n['computed'][budget]:,} ({n['reached'][budget]:.0%})" for budget in budgets]
        lines.append([case, *numbers, f"{n['tokens'] / n['distinct']:.2f}", *cells])
    head = ["case", "trajectories", "tokens", "action tokens", "distinct", "tokens / distinct"]
    return markdown([*head, *(f"computed at {int(budget):,}" for budget in budgets)], lines)


def times(cases: dict[str, Any]) -> str:
    """Return the table of seconds, of the trajectories' tokens per second, and of memory.

    Ratios are those of a row to share_prefixes=on: 2.0x has half the tokens per second.
    """
    lines = []
    for case, found in cases.items():
        whole = {arm: seconds(found[arm]) for arm in found if arm not in ("counts", "check", "peak")}
        for arm, least in whole.items():
            spreads = (spread([x.get(of, 0.0) for x in found[arm]]) for of in PARTS)
            rate = f"{found['counts']['tokens'] / least:,.0f}"
            gain, peak = f"{least / whole['on']:.2f}x", f"{found['peak'][arm] / 2**30:.2f}"
            lines.append([case, arm, *spreads, rate, gain, peak])
    head = ["case", "share_prefixes", *PARTS, "tokens/s", "on is faster by", "peak GiB"]
    return markdown(head, lines)


def seconds(rounds: Sequence[dict[str, float]]) -> float:
    """Return the median of score and update together."""
    return statistics.median(x.get("score", 0.0) + x["update"] for x in rounds)


def spread(values: Sequence[float]) -> str:
    """Example: [3.0, 1.0, 2.0] is "2.00 (1.00 to 3.00)"."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
