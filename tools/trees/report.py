"""The tables of benchmark_trees, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def tables(record: dict[str, Any]) -> str:
    """Return the tables of tokens, of times and memory, and of operations if a step was profiled."""
    about = record["machine"]
    lines = [
        f"{about['name']} ({about['device']}), {record['threads']} threads of {about['cores']} cores; torch "
        f"{about['torch']}; load {about['load'][0]:g}; {about['date']}; model {record['model']}",
        "",
        *tokens(record["cases"]),
    ]
    if measured := {case: found for case, found in record["cases"].items() if "on" in found}:
        lines += ["", *times(measured, record["timed"])]
    for case, found in record["cases"].items():
        if "profile" in found:
            lines += ["", *operations(case, found["profile"])]
    return "\n".join(lines)


def summary(record: dict[str, Any]) -> dict[str, float]:
    """Return the ratios of the tokens, of the tokens per second and of the peak memory, by case."""
    found: dict[str, float] = {}
    for case, one in record["cases"].items():
        off, on = (seconds(one[arm]) for arm in ("off", "on"))
        n, peak = one["counts"], one["peak"]
        found |= {
            f"{case} tokens / computed": n["tokens"] / n["computed"][str(record["timed"])],
            f"{case} seconds, off / on": off / on,
            f"{case} tokens/s": n["tokens"] / on,
            f"{case} peak, on / off": peak["on"] / peak["off"],
            f"{case} difference": one["check"]["mean difference"],
        }
    return found


def tokens(cases: dict[str, Any]) -> list[str]:
    """Return the rows of tokens; a cell "4,663 (95 %)" has those computed and the share of the saving."""
    budgets = list(next(iter(cases.values()))["counts"]["computed"])
    head = ["case", "trajectories", "tokens", "action tokens", "distinct", "tokens / distinct"]
    lines = [row([*head, *(f"computed at {int(budget):,}" for budget in budgets)])]
    lines.append("|---" * (len(head) + len(budgets)) + "|")
    for case, found in cases.items():
        n = found["counts"]
        numbers = (n["trajectories"], n["tokens"], n["action tokens"], n["distinct"])
        cells = [f"{n['computed'][budget]:,} ({n['reached'][budget]:.0%})" for budget in budgets]
        lines.append(row([case, *(f"{x:,}" for x in numbers), f"{n['tokens'] / n['distinct']:.2f}", *cells]))
    return lines


def times(cases: dict[str, Any], budget: int) -> list[str]:
    """Return the rows of seconds, of the trajectories' tokens per second, and of memory.

    Ratios are those of a row to share_prefixes=on: 2.0x has half the tokens per second.
    """
    lines = [
        f"tokens_per_microbatch={budget:,}; seconds: median (least to most) of the rounds",
        "",
        "| case | share_prefixes | score | update | processor | tokens/s | on is faster by | peak GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, found in cases.items():
        arms = [name for name in found if name not in ("counts", "check", "peak", "profile")]
        whole = {arm: seconds(found[arm]) for arm in arms}
        for arm in arms:
            spreads = (
                spread([x.get(of, 0.0) for x in found[arm]]) for of in ("score", "update", "processor")
            )
            rate = f"{found['counts']['tokens'] / whole[arm]:,.0f}"
            gain = f"{whole[arm] / whole['on']:.2f}x"
            lines.append(row([case, arm, *spreads, rate, gain, f"{found['peak'][arm] / 2**30:.2f}"]))
    return lines


def operations(case: str, profile: dict[str, Any], most: int = 16) -> list[str]:
    """Return the rows of the operations with the most seconds of their own, with and without sharing."""
    off, on = ({name: (n, s) for name, n, s in profile[arm]["operations"]} for arm in ("off", "on"))
    lines = [f"{case}: seconds of the operations alone", ""]
    lines += [
        "| operation | off: calls | seconds | on: calls | seconds | off / on |",
        "|---|---|---|---|---|---|",
    ]
    for name in sorted(off.keys() & on.keys(), key=lambda name: -on[name][1])[:most]:
        (many, long), (few, short) = off[name], on[name]
        cells = [name, f"{many:,}", f"{long:.2f}", f"{few:,}", f"{short:.2f}", f"{long / short:.2f}"]
        lines.append(row(cells))
    return lines


def seconds(rounds: Sequence[dict[str, float]]) -> float:
    """Return the median of score and update together."""
    return statistics.median(x.get("score", 0.0) + x["update"] for x in rounds)


def spread(values: Sequence[float]) -> str:
    """Example: [3.0, 1.0, 2.0] is "2.00 (1.00 to 3.00)"."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
