"""metrics.jsonl as what a page draws: columns of points, the share of every phase, and a few headlines."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from megatron_stppo.report.lines import Lines, number, short

Rows = dict[int, dict[str, float]]  # by iteration; numbers only
POINTS, BUCKETS = 1000, 200  # at most, of a column and of the phases
PHASE = "seconds/"


def read(folder: Path, notes: list[str]) -> dict[str, Any]:
    """{"columns": {name: [iterations, values]}, "phases": ..., "overview": ...}; adds to `notes` what was
    damaged or is missing."""
    lines, rows = Lines(folder / "metrics.jsonl"), Rows()
    try:
        for _, record in lines:
            iteration = record.pop("iteration", None)
            if type(iteration) is not int or not 0 <= iteration < 2**53:
                lines.damaged += 1
                continue
            numbers = {name: number(value) for name, value in record.items()}
            rows[iteration] = {name: value for name, value in numbers.items() if value is not None}
    except OSError as error:
        notes.append(f"metrics.jsonl cannot be read: {error.strerror}")
    if lines.damaged:
        notes.append(f"metrics.jsonl: {lines.damaged} damaged lines left out")
    rows = dict(sorted(rows.items()))
    names = dict.fromkeys(name for row in rows.values() for name in row)
    columns = {name: column(rows, name) for name in names if not name.startswith("share/")}
    if any(len(iterations) > POINTS for iterations, _ in columns.values()):
        notes.append(
            f"metrics.jsonl has {len(rows)} rows: curves are drawn from the lowest and highest points of "
            f"{POINTS // 2} stretches"
        )
    return {
        "columns": {name: thin(*points) for name, points in columns.items()},
        "phases": phases(rows),
        "overview": overview(rows, columns),
    }


def column(rows: Rows, name: str) -> tuple[list[int], list[float]]:
    """(iterations, values) of the rows that have it."""
    found = [(iteration, row[name]) for iteration, row in rows.items() if name in row]
    return [iteration for iteration, _ in found], [value for _, value in found]


def thin(iterations: list[int], values: list[float], most: int = POINTS) -> tuple[list[int], list[float]]:
    """At most `most` points and the last: of every stretch its lowest and highest, so that no spike is lost.

    Example: values 0 5 1 1 9 0 2 of iterations 1 to 7, at most 4, give 0 5 9 0 2.
    """
    kept = list(range(len(values)))
    if len(values) > most:
        size = -(-len(values) // (most // 2))
        stretches = [kept[start : start + size] for start in range(0, len(kept), size)]
        ends = {end(stretch, key=values.__getitem__) for stretch in stretches for end in (min, max)}
        kept = sorted(ends | {len(values) - 1})
    return [iterations[i] for i in kept], [short(values[i]) for i in kept]


def phases(rows: Rows) -> dict[str, Any]:
    """{"names": the dearest first, "iterations": the last one of each bucket, "seconds": [bucket][phase]}."""
    timed = [
        (iteration, row) for iteration, row in rows.items() if any(name.startswith(PHASE) for name in row)
    ]
    names = {name for _, row in timed for name in row if name.startswith(PHASE)}
    sums = {name: sum(row.get(name, 0.0) for _, row in timed) for name in names}
    order = sorted(names, key=lambda name: (-sums[name], name))
    size = max(1, -(-len(timed) // BUCKETS))
    buckets = [timed[start : start + size] for start in range(0, len(timed), size)]
    return {
        "names": [name.removeprefix(PHASE) for name in order],
        "iterations": [bucket[-1][0] for bucket in buckets],
        "seconds": [
            [short(sum(row.get(name, 0.0) for _, row in bucket)) for name in order] for bucket in buckets
        ],
    }


def overview(rows: Rows, columns: dict[str, tuple[list[int], list[float]]]) -> dict[str, Any]:
    """Headlines, in the order they are shown, a number or (first, last, best); None without."""
    found: dict[str, Any] = {"iterations": max(rows, default=None)}
    for name, label in (
        ("evaluate/exact_match", "held-out exact match"),
        ("rollout/exact_match", "exact match in training"),
        ("reward/mean", "reward"),
    ):
        _, values = columns.get(name, ([], []))
        found[label] = [short(value) for value in (values[0], values[-1], max(values))] if values else None
    for name, label, of in (
        ("actor/clip_fraction", "share of tokens clipped, mean", statistics.fmean),
        ("actor/skipped", "share of actor steps refused, mean", statistics.fmean),
        ("seconds", "seconds per iteration, median", statistics.median),
        ("seconds", "seconds in all", sum),
    ):
        found[label] = short(of(columns[name][1])) if name in columns else None
    return found
