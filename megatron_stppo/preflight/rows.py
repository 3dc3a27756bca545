"""The rows of the cluster check's table, and how values of many ranks become one row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_stppo.preflight.limits import UNITS

EXCLUDE = "exclude the node (sbatch --exclude) and report it to the administrators"
NO_GPU = "no GPU: not checked"
Verdict = Literal["pass", "fail", "not checked"]


@dataclass(frozen=True)
class CheckRow:
    """One check. `who`: the ranks or nodes that fail, each with its value."""

    name: str
    value: str
    limit: str
    verdict: Verdict
    who: tuple[str, ...] = ()
    remedy: str = ""


def bounded(
    name: str, values: Mapping[str, float | None], key: str, bound: float, unit: str, remedy: str
) -> CheckRow:
    """Return a row whose value is the worst of `values`, {rank or node: value}.

    key: the limit's name; min_... is a lower bound, max_... an upper bound. Values that are None are left
    out; without any value the row is not checked.
    Example: {"a": 3.0, "b": 1.0} with min_write 2.0 fails, with value "1 GB/s" and who ("b: 1 GB/s",).
    """
    known = {who: value for who, value in values.items() if value is not None}
    lower = key.startswith("min_")
    limit = f"{'at least' if lower else 'at most'} {bound:g} {unit}"
    if not known:
        return CheckRow(name, "not measured", limit, "not checked")
    worst = min(known.values()) if lower else max(known.values())
    bad = sorted(
        (who for who, value in known.items() if (value < bound if lower else value > bound)),
        key=lambda who: known[who],
        reverse=not lower,
    )
    if not bad:
        return CheckRow(name, _number(worst, unit), limit, "pass")
    return CheckRow(
        name,
        _number(worst, unit),
        limit,
        "fail",
        tuple(f"{who}: {_number(known[who], unit)}" for who in bad),
        remedy,
    )


def _number(value: float, unit: str) -> str:
    """Return three digits, or a whole number as it is. Examples: "0.769 GB/s", "65536 files"."""
    if 0 < value < 0.001:
        return f"below 0.001 {unit}"
    return f"{value:.0f} {unit}" if value % 1 == 0 or value >= 1000 else f"{value:.3g} {unit}"


def equal(name: str, values: Mapping[str, str], remedy: str) -> CheckRow:
    """Return a row that passes if all values are the same; else those that differ from most are named."""
    counts = Counter(values.values())
    common, _ = counts.most_common(1)[0]
    limit = "the same on all ranks"
    if len(counts) == 1:
        return CheckRow(name, common, limit, "pass")
    bad = tuple(f"{who}: {value}" for who, value in values.items() if value != common)
    return CheckRow(name, f"{common}; {len(counts)} values", limit, "fail", bad, remedy)


def none_of(name: str, found: Mapping[str, str], limit: str, remedy: str, value: str = "none") -> CheckRow:
    """Return a row that fails if `found`, {rank or node: problem}, is not empty."""
    if not found:
        return CheckRow(name, value, limit, "pass")
    return CheckRow(
        name, f"{len(found)}", limit, "fail", tuple(f"{who}: {x}" for who, x in found.items()), remedy
    )


def unchecked(name: str, value: str = "") -> CheckRow:
    """Return the row of a check that needs a GPU, where there is none."""
    return CheckRow(name, value, "", "not checked", remedy=NO_GPU)


@dataclass(frozen=True)
class Rule:
    """A row about one number of every rank, GPU or node."""

    name: str
    limit: str  # of limits.LIMITS
    value: Callable[[Any], float | None]
    remedy: str


def judged(rule: Rule, records: Mapping[str, Any], limits: Mapping[str, float]) -> CheckRow:
    """Return the row of a rule. records: {rank or node: what rule.value takes}."""
    values = {who: rule.value(record) for who, record in records.items()}
    return bounded(rule.name, values, rule.limit, limits[rule.limit], UNITS[rule.limit], rule.remedy)
