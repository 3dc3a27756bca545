"""Judge the reports of all ranks: a row per check, with the ranks or nodes that fail. Measures nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from examples.slurm.preflight.exchange import RankReport
from examples.slurm.preflight.limits import LIMITS, SWAPS, Limit, derived
from megatron_stppo.cluster.launch.rendezvous import files_needed

GPU_ONLY = (*SWAPS, *SWAPS.values())  # a number that gloo measured is shown, but has no limit
ANSWERS = "ranks answer, without a fault"


@dataclass(frozen=True)
class CheckRow:
    """One check. `who`: the ranks or nodes that fail, each with its value."""

    name: str
    value: str
    limit: str
    verdict: Literal["pass", "fail", "not checked"]
    who: tuple[str, ...] = ()
    remedy: str = ""


def judge(
    world: int,
    alone: Mapping[int, RankReport],
    together: Mapping[int, RankReport],
    limits: Mapping[str, float],
) -> list[CheckRow]:
    """Return the rows of the table.

    alone: {rank: report} of the ranks that answered in time before they measured with others. together: after
    that; empty if some ranks did not answer before.
    """
    reports = {**alone, **together}
    who = {r: f"rank {r} ({reports[r].node})" if r in reports else f"rank {r}" for r in range(world)}
    rows = [_answers(who, alone, together, reports)]
    for name in dict.fromkeys(name for report in reports.values() for name in report.texts):
        values = {who[rank]: report.texts.get(name, "missing") for rank, report in reports.items()}
        rows.append(_equal(name, values))
    numbers = [number for report in reports.values() for number in report.numbers]
    gpus = any(name == "min_compute" for name, _, _ in numbers)
    limits = derived(numbers) | dict(limits)
    limits["min_open_files"] = max(limits["min_open_files"], files_needed(world))
    for limit in LIMITS:
        row = _bounded(limit, limits[limit.name], worst_of(limit.name, numbers))
        if limit.name in GPU_ONLY and not gpus:
            row = CheckRow(row.name, row.value, row.limit, "not checked", remedy="no GPU: not checked")
        rows.append(row)
    return rows


def worst_of(name: str, numbers: Iterable[tuple[str, str, float]]) -> dict[str, float]:
    """Return {rank, node or group: its worst value} of the limit `name`.

    The bandwidth of a group is that of its slowest rank; a matrix product is compared with the median rank.
    """
    worst, found = max if name.startswith("max_") else min, dict[str, float]()
    for _, who, value in (number for number in numbers if number[0] == name):
        found[who] = worst(value, found.get(who, value))
    if name == "min_compute" and found:
        middle = median(found.values())
        found = {who: value / middle for who, value in found.items()}
    return found


def _answers(
    who: Mapping[int, str],
    alone: Mapping[int, RankReport],
    together: Mapping[int, RankReport],
    reports: Mapping[int, RankReport],
) -> CheckRow:
    """Return the row about ranks that did not answer, and faults that ranks report."""
    bad = {name: "did not start, or hangs" for rank, name in who.items() if rank not in alone}
    if together:
        bad |= {who[rank]: "stopped answering" for rank in alone if rank not in together}
    for rank, report in reports.items():
        if report.faults:
            bad[who[rank]] = "; ".join(f"{what}: {fault}" for what, fault in report.faults.items())
    remedy = "read the rank's log; if it has no entry, look at its node with sinfo -R"
    return _row(ANSWERS, f"{len(alone)}", f"all {len(who)}", bad, remedy)


def _equal(name: str, values: Mapping[str, str]) -> CheckRow:
    """Return a row that passes if all values are the same; else those that differ from most are named."""
    counts = Counter(values.values())
    common, _ = counts.most_common(1)[0]
    bad = {who: value for who, value in values.items() if value != common}
    value = f"{common}; {len(counts)} values" if bad else common
    remedy = "install the same environment or image on all nodes; request nodes of one kind"
    return _row(name, value, "the same on all ranks", bad, remedy)


def _bounded(limit: Limit, bound: float, values: Mapping[str, float]) -> CheckRow:
    """Return the row of a limit, which shows the worst of `values`; without values it is not checked.

    Example: {"a": 3.0, "b": 1.0} with min_write 2.0 fails, with value "1 GB/s" and who ("b: 1 GB/s",).
    """
    lower = limit.name.startswith("min_")
    shown = f"{'at least' if lower else 'at most'} {bound:g} {limit.unit}"
    if not values:
        return CheckRow(limit.row, "not measured", shown, "not checked")
    worst_first = sorted(values, key=values.__getitem__, reverse=not lower)
    bad = {
        who: _number(values[who], limit.unit)
        for who in worst_first
        if (values[who] < bound if lower else values[who] > bound)
    }
    return _row(limit.row, _number(values[worst_first[0]], limit.unit), shown, bad, limit.remedy)


def _row(name: str, value: str, limit: str, bad: Mapping[str, str], remedy: str) -> CheckRow:
    """Return a row that fails if `bad`, {rank or node: problem}, is not empty."""
    who = tuple(f"{who}: {problem}" for who, problem in bad.items())
    row = CheckRow(name, value, limit, "pass")
    return replace(row, verdict="fail", who=who, remedy=remedy) if bad else row


def _number(value: float, unit: str) -> str:
    """Return three digits, or a whole number as it is. Examples: "0.769 GB/s", "65536 files"."""
    return f"{value:.0f} {unit}" if value % 1 == 0 or value >= 1000 else f"{value:.3g} {unit}"
