"""Output of benchmark_kernels: tables, the limits and whether they are met, a JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.kernels.measure import Row
from tools.measuring import headline, markdown

EAGER, COMPILED = "token-level PPO, eager", "token-level PPO, torch.compile"
FUSED_TOKEN, COPY = "fused token-level PPO", "of copy bandwidth"
GATHER, BOTH, GEMM = "log_softmax + gather", "forward + backward", "one GEMM"
# {section: the variant with which the others are compared}; of linear_loss, times / that of one product
BASELINES = {
    "clipped_surrogate": EAGER,
    "vocab_logprob": GATHER,
    "linear_loss": GEMM,
    "bucket_copy": "copy_ loop",
    "bucket_checksum": "fallback",
}


def tables(about: dict[str, Any], rows: Sequence[Row]) -> str:
    kind = "device time, cold cache" if about["device"] == "cuda" else "a call, warm cache"
    parts = [
        f"{headline(about)}; copy bandwidth {about['copy_bandwidth'] / 1e9:.1f} GB/s",
        f"Times: {kind}; median, then p10-p90. x: against the variant marked *. of copy: cold cache.",
    ]
    for section in dict.fromkeys(row.section for row in rows):
        parts += [f"## {section}", _table(about, [row for row in rows if row.section == section])]
    verdicts = [
        [x["what"], f"{x['measured']:.2f}", f"{x['at_p10']:.2f}", f"{x['bound']:.2g}", x["reached"]]
        for x in limits(about, rows)
    ]
    head = ("limit", "at medians", "at p10s", "bound", "reached")
    return "\n\n".join([*parts, "## Limits to reach", markdown(head, verdicts)])


def save(about: dict[str, Any], rows: Sequence[Row], path: Path) -> None:
    """Write {"machine": .., "rows": [..], "limits": [..]}. Times are [p10, median, p90] in seconds."""
    record = {
        "machine": about,
        "rows": [asdict(row) | {"of_copy": of_copy(about, row)} for row in rows],
        "limits": limits(about, rows),
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def of_copy(about: dict[str, Any], row: Row, at: int = 1) -> float | None:
    """Return the minimum bytes / cold time, as a fraction of copy bandwidth."""
    times = row.cold or row.warm
    return row.bytes / times[at] / about["copy_bandwidth"] if times else None


def _table(about: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return the table of a section: a row for each variant, a column for each size."""
    baseline, device = BASELINES[rows[0].section.split()[0]], about["device"]
    base = {row.size: row.seconds(device) for row in rows if row.variant == baseline}
    lines, left_out = [], ""
    for variant in dict.fromkeys(row.variant for row in rows):
        own = [row for row in rows if row.variant == variant]
        if all(row.missing for row in own):
            left_out += f"\n\nleft out: {variant} ({own[0].missing})"
            continue
        error = max((row.error_rel for row in own if row.error_rel is not None), default=None)
        cells = [_cell(about, row, base[row.size]) for row in own]
        marked = variant + " *" * (variant == baseline)
        lines.append([marked, *cells, "-" if error is None else f"{error:.0e}"])
    return markdown(["variant", *base, "largest relative error"], lines) + left_out


def _cell(about: dict[str, Any], row: Row, base: float | None) -> str:
    """Example: "0.23 ms (0.22-0.24), 8.7x, 52% of copy"."""
    if row.missing:
        return row.missing
    low, middle, high = (row.seconds(about["device"], at) or 0.0 for at in range(3))
    text = f"{1e3 * middle:.3g} ms ({1e3 * low:.3g}-{1e3 * high:.3g})"
    if row.gemm_times is not None:
        text += f", {row.gemm_times:.3g} products"
    elif base is not None:
        text += f", {base / middle:.3g}x"
        text += f", {of_copy(about, row):.0%} of copy" if row.cold else ""
    return text + (f", {row.peak_bytes / 2**20:.0f} MiB" if row.peak_bytes is not None else "")


def limits(about: dict[str, Any], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the project's limits for this device and these sizes, and whether the medians meet them."""
    device, out = about["device"], []
    of = {(row.section, row.size, row.variant): row for row in rows}
    for row in rows:
        if not (row.warm or row.cold):
            continue
        for against, bound in bounds(row, device).items():
            if against == COPY:
                measured, at_p10 = (of_copy(about, row, at) or 0.0 for at in (1, 0))
            elif against == GEMM:
                measured = at_p10 = row.gemm_times or 0.0
            else:
                other = of[row.section, row.size, against]
                if other.missing:
                    continue
                measured, at_p10 = (
                    (other.seconds(device, at) or 0) / (row.seconds(device, at) or 1) for at in (1, 0)
                )
            what = f"{row.section}, {row.size}: {row.variant}, {against}"
            reached = measured <= bound if against == GEMM else measured >= bound
            numbers = {"measured": measured, "at_p10": at_p10, "bound": bound}
            out.append({"what": what, **numbers, "reached": reached})
    return out


def bounds(row: Row, device: str) -> dict[str, float]:
    """Return {against: times its speed}; for COPY the fraction of its bandwidth, for GEMM the largest time /
    one product's. The products of linear_loss alone are 3; passes over the logits add 0.41 of one at hidden
    size 2,048 and 0.20 at 4,096."""
    kind, gpu = row.section.split()[0], device == "cuda"
    if kind == "clipped_surrogate" and row.variant.startswith("fused ST-PPO"):
        on_gpu = {EAGER: 10, COMPILED: 2, FUSED_TOKEN: 1 / 1.1, COPY: 0.85} if row.tokens >= 2**22 else {}
        return on_gpu if gpu else {EAGER: 8}
    if kind == "vocab_logprob" and row.variant == "fused" and gpu == (row.size != BOTH):
        if gpu:
            return {COPY: 0.9 if row.size == "forward" else 0.85}
        return {GATHER: 4 if "bfloat16" in row.section else 3}
    if gpu and row.variant == "linear_loss" and row.size == "valid 1":
        return {GEMM: 3.4 if row.hidden >= 4096 else 3.7}
    return {}
