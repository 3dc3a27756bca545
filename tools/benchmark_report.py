"""Output of benchmark_kernels: tables, the limits and whether they are met, a JSON file, a figure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
from benchmark_measure import Row
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot as plt

EAGER, COMPILED = "token-level PPO, eager", "token-level PPO, torch.compile"
FUSED_TOKEN, COPY = "fused token-level PPO", "of copy bandwidth"
# {section: (baseline variant, whether the ratio is time / baseline)}; otherwise it is baseline / time.
BASELINES = {
    "clipped_surrogate": (EAGER, False),
    "vocab_logprob": ("log_softmax + gather", False),
    "linear_loss": ("one GEMM", True),
    "bucket_copy": ("copy_ loop", False),
    "bucket_checksum": ("fallback", False),
}
BY_TOKENS = "clipped_surrogate by tokens"
# {variant: largest time / one GEMM's time, for hidden sizes below 4,096 and from there on}. The products
# alone are 3. Passes over the logits add 0.41 GEMM at 2,048 and 0.20 at 4,096 (docs/performance.md).
GEMM_TIMES = {"linear_loss": (3.7, 3.4)}
BOTH = "forward + backward"


def show(about: dict[str, Any], rows: Sequence[Row], console: Console | None = None) -> None:
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=190)
    console.print(headline(about))
    kind = "device time, cold cache" if about["device"] == "cuda" else "a call, warm cache"
    console.print(
        f"Times: {kind}; median, then p10-p90. x: against the variant marked *. of copy: cold cache.\n"
    )
    for section in dict.fromkeys(row.section for row in rows):
        console.print(_table(about, section, [row for row in rows if row.section == section]))
    table = Table(
        "limit", "at medians", "at p10s", "bound", "verdict", title="Limits to reach", title_justify="left"
    )
    for limit in limits(about, rows):
        style = "green" if limit["reached"] else "red"
        bound = next(f"{side} {limit[side]:.2g}" for side in ("at least", "at most") if side in limit)
        verdict = f"[{style}]{'reached' if limit['reached'] else 'not reached'}[/]"
        table.add_row(limit["what"], f"{limit['measured']:.2f}", f"{limit['at_p10']:.2f}", bound, verdict)
    console.print(table)


def save(about: dict[str, Any], rows: Sequence[Row], path: Path) -> None:
    """Write {"machine": .., "rows": [..], "limits": [..]}. Times are [p10, median, p90] in seconds."""
    record = {
        "machine": about,
        "rows": [asdict(row) | {"of_copy": of_copy(about, row)} for row in rows],
        "limits": limits(about, rows),
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def headline(about: dict[str, Any]) -> str:
    built = ", ".join(f"{device} {what}" for device, what in about["extension"].items())
    cuda = f", CUDA {about['cuda']}" if about["device"] == "cuda" else ""
    return (
        f"{about['name']} ({about['device']}), {about['threads']} threads of {about['cores']} cores, "
        f"{' '.join(about['cpu_flags'])}; torch {about['torch']}{cuda} ({about['vectors']['torch']}); "
        f"extension: {built} ({about['vectors']['extension']}); {about['date']}; "
        f"copy bandwidth {about['copy_bandwidth'] / 1e9:.1f} GB/s; load {about['load'][0]:g}"
    )


def of_copy(about: dict[str, Any], row: Row, at: int = 1) -> float | None:
    """Return the minimum bytes / cold time, as a fraction of copy bandwidth."""
    times = row.cold or row.warm
    return row.bytes / times[at] / about["copy_bandwidth"] if times else None


def ratio(rows: Sequence[Row], device: str, row: Row) -> float | None:
    """Return the speed relative to the section's baseline at this size, or the time relative to its GEMM."""
    name, inverse = BASELINES[row.section.split()[0]]
    base = next((x for x in rows if (x.section, x.size, x.variant) == (row.section, row.size, name)), None)
    mine, other = row.seconds(device), base.seconds(device) if base else None
    if mine is None or other is None:
        return None
    return mine / other if inverse else other / mine


def _table(about: dict[str, Any], section: str, rows: Sequence[Row]) -> Table:
    baseline, inverse = BASELINES[section.split()[0]]
    table = Table(title=section, title_justify="left", caption_justify="left", show_lines=True)
    table.add_column("variant")
    sizes, left_out = list(dict.fromkeys(row.size for row in rows)), []
    for size in sizes:
        table.add_column(size, justify="right")
    table.add_column("largest error\nabs, rel", justify="right")
    for variant in dict.fromkeys(row.variant for row in rows):
        mine = [row for row in rows if row.variant == variant]
        if all(row.missing for row in mine):
            left_out.append(f"{variant} ({mine[0].missing})")
            continue
        cells = {row.size: _cell(about, row, ratio(rows, about["device"], row), inverse) for row in mine}
        wrong = [(row.error_abs, row.error_rel) for row in mine if row.error_abs is not None]
        worst = f"{max(a for a, _ in wrong):.0e}\n{max(r for _, r in wrong):.0e}" if wrong else "-"
        table.add_row(
            variant + (" *" if variant == baseline else ""), *(cells.get(s, "") for s in sizes), worst
        )
    table.caption = f"left out: {'; '.join(left_out)}" if left_out else None
    return table


def _cell(about: dict[str, Any], row: Row, times: float | None, inverse: bool) -> str:
    if row.missing:
        return f"[dim]{row.missing}[/]"
    low, middle, high = (1e3 * (row.seconds(about["device"], at) or 0) for at in range(3))
    fraction = of_copy(about, row)
    lines = [
        f"{middle:.3g} ms" + (f"  {times:.3g}{' GEMM' if inverse else 'x'}" if times is not None else ""),
        f"[dim]{low:.3g}-{high:.3g}[/]",
    ]
    if fraction is not None and not inverse:
        lines.append(f"[dim]{fraction:.0%} of copy[/]" if row.cold else "")
    if row.launches is not None:
        lines.append(f"[dim]{row.launches} launches, {row.syncs} syncs[/]")
    if row.peak_bytes is not None:
        lines.append(f"[dim]{row.peak_bytes / 2**20:.0f} MiB[/]")
    return "\n".join(line for line in lines if line)


def limits(about: dict[str, Any], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the project's limits for this device and these sizes, and whether the medians meet them."""
    device, out = about["device"], []
    times = {(row.section, row.size, row.variant): row for row in rows}

    def limit(row: Row, against: str, bound: float) -> None:
        """Require `bound` times the speed of `against`, or that fraction of copy bandwidth for COPY."""
        if not (row.warm or row.cold):
            return
        if against == COPY:
            numbers = [of_copy(about, row, at) or 0.0 for at in (1, 0)]
        else:
            other = times.get((row.section, row.size, against))
            if other is None or other.missing:
                return
            numbers = [(other.seconds(device, at) or 0) / (row.seconds(device, at) or 1) for at in (1, 0)]
        what = f"{row.section}, {row.size}: {row.variant}, {'' if against == COPY else 'x '}{against}"
        out.append(_verdict(what, numbers, bound, numbers[0] >= bound))

    for row in rows:
        kind = row.section.split()[0]
        if row.section == "clipped_surrogate" and row.variant.startswith("fused ST-PPO"):
            if device == "cpu":
                limit(row, EAGER, 8)
            elif row.tokens >= 2**22:
                for against, bound in ((EAGER, 10), (COMPILED, 2), (FUSED_TOKEN, 1 / 1.1), (COPY, 0.85)):
                    limit(row, against, bound)
        elif kind == "vocab_logprob" and row.variant == "fused":
            if device == "cpu" and row.size == BOTH:
                limit(row, "log_softmax + gather", 4 if "bfloat16" in row.section else 3)
            elif device == "cuda" and row.size != BOTH:
                limit(row, COPY, 0.9 if row.size == "forward" else 0.85)
        elif (
            kind == "linear_loss" and device == "cuda" and "chunks" in row.extra and row.variant in GEMM_TIMES
        ):
            narrow, wide = GEMM_TIMES[row.variant]
            times_bound = wide if row.extra["hidden_size"] >= 4096 else narrow
            for name, bound in (("gemm_times", times_bound), ("chunks", 1.2)):
                number = row.extra[name]
                if name == "chunks" or row.size == "valid 1":
                    what = f"{row.section}, {row.size}: {row.variant}, {name}"
                    out.append(_verdict(what, [number, number], bound, number <= bound, "at most"))
    return out


def _verdict(
    what: str, numbers: Sequence[float], bound: float, reached: bool, side: str = "at least"
) -> dict[str, Any]:
    measured, at_p10 = numbers
    return {"what": what, "measured": measured, "at_p10": at_p10, side: bound, "reached": reached}


def draw(about: dict[str, Any], rows: Sequence[Row], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(15, 6.2), layout="constrained")
    figure.suptitle(headline(about), fontsize=9, wrap=True)
    _throughput(left, about["device"], [row for row in rows if row.section == BY_TOKENS])
    _fractions(right, about, rows)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _throughput(axes: Any, device: str, rows: Sequence[Row]) -> None:
    for variant in dict.fromkeys(row.variant for row in rows):
        points = [
            (row.tokens, row.tokens / s)
            for row in rows
            if row.variant == variant and (s := row.seconds(device))
        ]
        if points:
            ours = variant.startswith("fused")
            style = {"lw": 2.4} if ours else {"lw": 1.2, "ls": "--", "ms": 4}
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=variant, **style)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens",
        ylabel="tokens / s",
        title="Surrogate, forward + backward",
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)


def _fractions(axes: Any, about: dict[str, Any], rows: Sequence[Row]) -> None:
    """Draw bars of our variant and of the fastest opponent, for each op and size."""
    found = []
    for section, size in dict.fromkeys((row.section, row.size) for row in rows):
        if section == BY_TOKENS or section.startswith("linear"):
            continue
        here = [
            (of_copy(about, row), row.variant) for row in rows if (row.section, row.size) == (section, size)
        ]
        here = [(value, variant) for value, variant in here if value is not None]
        ours = [value for value, variant in here if variant.startswith("fused")]
        theirs = [value for value, variant in here if not variant.startswith(("fused", "fallback"))]
        if ours and theirs:
            found.append((f"{section}, {size}".replace("vocab_logprob ", ""), ours[0], max(theirs)))
    names, ours, theirs = zip(*found, strict=True) if found else ((), (), ())
    places = list(range(len(names)))
    axes.barh([p - 0.2 for p in places], ours, height=0.38, label="fused")
    axes.barh([p + 0.2 for p in places], theirs, height=0.38, color="0.75", label="fastest opponent")
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="k", lw=0.8)
    axes.set(
        xlabel="fraction of copy bandwidth",
        title="Bytes that must move / time, over copy bandwidth",
    )
    axes.grid(alpha=0.3, axis="x")
    axes.legend(fontsize=8, loc="lower right")
