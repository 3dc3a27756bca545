"""Read metrics.jsonl for the report: columns of points, parts of a whole, and summary numbers."""

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_stppo.observe.report.lines import number, reading, short

Rows = dict[int, dict[str, float | None]]  # by iteration; None where the run wrote null or NaN
Points = tuple[list[int], list[float | None]]  # iterations, values
POINTS, BUCKETS = 1000, 200  # most points of a column, most buckets of the phases
PHASE, STALENESS = "seconds/", "staleness/tokens_"
SERVED = "serving/replicas"  # a column of asynchronous runs only


def read(folder: Path, notes: list[str]) -> dict[str, Any]:
    """Return {"columns": {name: [iterations, values]}, "phases": ..., "staleness": ..., "overview": ...}.

    Adds to `notes` what is damaged or missing.
    """
    rows = Rows()
    with reading(folder, "metrics.jsonl", notes) as lines:
        for _, record in lines:
            iteration = record.pop("iteration", None)
            if type(iteration) is not int or not 0 <= iteration < 2**53:
                lines.damaged += 1
                continue
            rows[iteration] = {
                name: number(value)
                for name, value in record.items()
                if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
            }
    rows = dict(sorted(rows.items()))
    names = dict.fromkeys(name for row in rows.values() for name in row)
    columns = {name: column(rows, name) for name in names if not name.startswith("share/")}
    columns = {name: points for name, points in columns.items() if any(v is not None for v in points[1])}
    if any(len(iterations) > POINTS for iterations, _ in columns.values()):
        notes.append(
            f"metrics.jsonl has {len(rows)} rows: a curve shows the lowest and the highest point of each of "
            f"{POINTS // 2} intervals"
        )
    return {
        "columns": {name: thin(*points) for name, points in columns.items()},
        "phases": stack(rows, PHASE, longest_first=True),
        "staleness": stack(rows if SERVED in columns else {}, STALENESS),
        "overview": overview(rows, columns),
    }


def column(rows: Rows, name: str) -> Points:
    """Return (iterations, values) of the rows that have the column."""
    found = [(iteration, row[name]) for iteration, row in rows.items() if name in row]
    return [iteration for iteration, _ in found], [value for _, value in found]


def thin(iterations: list[int], values: list[float | None], most: int = POINTS) -> Points:
    """Return about `most` points, so that neither a spike nor a gap is lost.

    Keeps the lowest, the highest and the first None of every range of points, and the last point.

    Example: values 0 5 1 1 9 0 2 of iterations 1 to 7, at most 4, give 0 5 9 0 2.
    """
    kept = list(range(len(values)))
    if len(values) > most:
        size = -(-len(values) // (most // 2))
        stretches = [kept[start : start + size] for start in range(0, len(kept), size)]
        kept = sorted({i for stretch in stretches for i in _ends(stretch, values)} | {len(values) - 1})
    return [iterations[i] for i in kept], [short(values[i]) for i in kept]


def _ends(stretch: list[int], values: list[float | None]) -> Iterator[int]:
    numbers = {i: value for i in stretch if (value := values[i]) is not None}
    if numbers:
        yield from (min(numbers, key=numbers.__getitem__), max(numbers, key=numbers.__getitem__))
    yield from itertools.islice((i for i in stretch if i not in numbers), 1)


def stack(rows: Rows, prefix: str, longest_first: bool = False) -> dict[str, Any]:
    """Return the columns that begin with `prefix`, which are parts of a whole, summed over buckets of rows.

    {"names": the rest of each column's name, "iterations": last of each bucket, "amounts": [bucket][name]}.
    Example: for "seconds/", one row of iteration 3 with {"seconds/score": 1, "seconds/update": 4} gives names
    score and update, iterations [3] and amounts [[1, 4]].
    """
    having = [(iteration, row) for iteration, row in rows.items() if any(n.startswith(prefix) for n in row)]

    def amount(name: str, bucket: Sequence[tuple[int, Mapping[str, float | None]]]) -> float:
        return sum(row.get(name) or 0.0 for _, row in bucket)

    names = sorted({name for _, row in having for name in row if name.startswith(prefix)})
    # else 10 after 2
    names.sort(key=lambda name: -amount(name, having) if longest_first else len(name))
    size = max(1, -(-len(having) // BUCKETS))
    buckets = [having[start : start + size] for start in range(0, len(having), size)]
    return {
        "names": [name.removeprefix(prefix) for name in names],
        "iterations": [bucket[-1][0] for bucket in buckets],
        "amounts": [[short(amount(name, bucket)) for name in names] for bucket in buckets],
    }


def overview(rows: Rows, columns: Mapping[str, Points]) -> dict[str, Any]:
    """Return the summary numbers in the order in which they are shown.

    Each is a number, or (first, last, best), or None without data. None values are ignored, but the first or
    last one may be None.
    """
    found: dict[str, Any] = {"iterations": max(rows, default=None)}
    for name, label in (
        ("evaluate/exact_match", "held-out exact match"),
        ("rollout/exact_match", "exact match in training"),
        ("reward/mean", "reward"),
    ):
        _, values = columns.get(name, ([], []))
        numbers = [value for value in values if value is not None]
        found[label] = [short(v) for v in (values[0], values[-1], max(numbers))] if numbers else None
    for name, label, of in (
        ("actor/clip_fraction", "share of tokens clipped, mean", statistics.fmean),
        ("actor/skipped", "share of actor steps refused, mean", statistics.fmean),
        ("update/distinct_share", "share of tokens computed in the update, mean", statistics.fmean),
        ("serving/trainer_idle_share", "share of time the trainer waits, mean", statistics.fmean),
        ("serving/idle_share", "share of time the replicas wait, mean", statistics.fmean),
        ("outcome/error", "episodes that failed: error", sum),
        ("outcome/timeout", "episodes that failed: timeout", sum),
        ("rollout/overlong_prompts", "prompts that are too long", sum),
        ("seconds", "seconds per iteration, median", statistics.median),
        ("seconds", "seconds in total", sum),
    ):
        numbers = [value for value in columns.get(name, ([], []))[1] if value is not None]
        found[label] = short(of(numbers)) if numbers else None
    return found
