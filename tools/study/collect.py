"""Write small result files from the folders of finished runs.

runs.csv         one row per run: its outcome and its means
curves.parquet   one row per run and iteration: METRICS as float32, NaN where a metric is missing
steps.parquet    one row per optimizer step of the probes: ||C|| by every estimator
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_stppo.atomic_replace import replacing
from megatron_stppo.telemetry.renamed import renamed
from megatron_stppo.telemetry.rows import column, read
from tools.study.judge import FINAL, THRESHOLDS, collapse_began, time_to
from tools.study.matrix import PILOT, Run

Row = dict[str, Any]
KEYS = ("setting", "algorithm", "seed")
EXACT_MATCH = "evaluate/exact_match"
METRICS = (
    EXACT_MATCH, "rollout/exact_match", "rollout/called_tool", "kl/reference",
    "actor/clip_fraction", "actor/kl_to_old", "actor/gradient_norm",
    "actor/clipping_bias", "actor/clipping_bias_logit", "actor/correction_scale", "actor/entropy",
    "actor/lr", "actor/effective_lr",
    "rollout/staleness", "rollout/staleness_max", "rollout/response_tokens", "rollout/turns",
    "critic/explained_variance", "seconds", "seconds/update", "seconds/evaluate",
)  # fmt: skip
STEP_METRICS = (
    "actor/clip_fraction", "actor/gradient_norm", "actor/clipping_bias_coefficient",
    "actor/clipping_bias_logit", "actor/clipping_bias_gradient", "actor/correction_scale",
)  # fmt: skip
MUST_BE_FINITE = ("actor/gradient_norm", "actor/kl_to_old")


def summary(run: Run, rows: Sequence[Row], not_finite: bool, seconds: float) -> Row:
    """Return the row of a run in runs.csv. `seconds` is the time of its processes, including their start.

    A run has collapsed if held-out exact match stays below half of its best for 10 evaluations
    (judge.collapse_began), or if a number of an update is not finite, or if the run was ended because of such
    numbers (`not_finite`). The time of an event that did not occur is empty.
    """
    iterations, exact_match = column(list(rows), EXACT_MATCH)
    updates = [row for row in rows if row["iteration"] > 0]
    finite = not not_finite and all(row.get(name) is not None for row in updates for name in MUST_BE_FINITE)
    began = collapse_began(iterations, exact_match)
    in_rows = sum(row["seconds"] for row in rows)
    return {
        **{name: getattr(run, name) for name in KEYS},
        "iterations": rows[-1]["iteration"],
        "collapsed": int(began is not None or not finite),
        "collapse_began": began,
        "not_finite": int(not finite),
        "first": exact_match[0],
        "best": max(exact_match),
        "final": statistics.fmean(exact_match[-FINAL:]),
        **{f"to_{threshold}": time_to(iterations, exact_match, threshold) for threshold in THRESHOLDS},
        "clip_fraction": _mean(updates, "actor/clip_fraction"),
        "kl_to_old": _mean(updates, "actor/kl_to_old"),
        "gradient_norm": _quantile(updates, "actor/gradient_norm", 0.5),
        "gradient_norm_p95": _quantile(updates, "actor/gradient_norm", 0.95),
        "correction_scale": _mean(updates, "actor/correction_scale"),
        "seconds": round(seconds, 1),
        "seconds_outside": round(seconds - in_rows, 1),  # time for the start and the end of the process
        "seconds_update": _quantile(updates, "seconds/update", 0.5),
    }


def curves(run: Run, rows: Sequence[Row]) -> list[Row]:
    own = {name: getattr(run, name) for name in KEYS}
    return [own | {"iteration": row["iteration"]} | {name: row.get(name) for name in METRICS} for row in rows]


def steps(run: Run, folder: Path) -> list[Row]:
    """Return the rows of steps.jsonl of a probe, and no rows for other runs."""
    path, own = folder / "steps.jsonl", {name: getattr(run, name) for name in KEYS}
    return [
        own | {name: row[name] for name in ("iteration", "step", *STEP_METRICS)}
        for row in (read(path) if path.exists() else ())
    ]


def merge(folder: Path, summaries: list[Row], curve_rows: list[Row], step_rows: list[Row]) -> None:
    """Add the runs to the files of `folder`, where they replace earlier runs of the same name.

    Raises ValueError, without changes, if runs of one setting would have different lengths, as after a trial.
    """
    folder.mkdir(parents=True, exist_ok=True)
    new = {_key(row) for row in summaries}

    def with_kept(kept: Iterable[Row], added: list[Row]) -> list[Row]:
        rows = [row for row in kept if _key(row) not in new] + added
        return sorted(rows, key=lambda row: (*_key(row), row.get("iteration", 0), row.get("step", 0)))

    runs = with_kept(read_csv(folder / "runs.csv"), summaries)
    for setting in sorted({row["setting"] for row in runs}):
        counted = [row for row in runs if row["setting"] == setting and row["seed"] < PILOT]
        lengths = sorted({row["iterations"] for row in counted if not row["not_finite"]})
        if len(lengths) > 1:
            raise ValueError(
                f"{folder}: {setting} would hold runs of {lengths} iterations; give a trial its own --docs"
            )
    _write_csv(folder / "runs.csv", runs)
    for name, added, metrics in (("curves", curve_rows, METRICS), ("steps", step_rows, STEP_METRICS)):
        path = folder / f"{name}.parquet"
        rows = with_kept(read_parquet(path), added)
        if rows:
            _write_parquet(path, rows, metrics)


def read_csv(path: Path) -> list[Row]:
    """Return the rows with numbers as numbers. An empty cell is None."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [{name: _value(name, text) for name, text in row.items()} for row in csv.DictReader(file)]


def read_parquet(path: Path) -> list[Row]:
    """Return the rows. A missing number is None, also where the file lacks a column of METRICS."""
    rows = pq.read_table(path).to_pylist() if path.exists() else []
    return [dict.fromkeys(METRICS) | renamed(row) for row in rows]


def _value(name: str, text: str) -> Any:
    if name in ("setting", "algorithm"):
        return text
    if text == "":
        return None
    number = float(text)
    return int(number) if number.is_integer() and "." not in text else number


def _write_csv(path: Path, rows: list[Row]) -> None:
    with replacing(path) as scratch, scratch.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else list(KEYS), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def _write_parquet(path: Path, rows: list[Row], metrics: Sequence[str]) -> None:
    names = {name: pa.dictionary(pa.int8(), pa.string()) for name in ("setting", "algorithm")}
    counts = {name: pa.int16() for name in ("seed", "iteration", "step") if name in rows[0]}
    numbers = dict.fromkeys(metrics, pa.float32())
    schema = pa.schema(list((names | counts | numbers).items()))
    with replacing(path) as scratch:
        pq.write_table(pa.Table.from_pylist(rows, schema), scratch, compression="zstd")


def _key(row: Row) -> tuple[str, str, int]:
    return row["setting"], row["algorithm"], int(row["seed"])


def _numbers(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _mean(rows: Sequence[Row], name: str) -> float:
    values = _numbers(rows, name)
    return statistics.fmean(values) if values else math.nan


def _quantile(rows: Sequence[Row], name: str, share: float) -> float:
    """Return the smallest of the numbers that at least `share` of them do not exceed."""
    values = sorted(_numbers(rows, name))
    return values[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan
