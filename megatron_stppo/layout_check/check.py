"""Runs every case, compares it with the first, prints a table and gives the verdict."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from megatron_stppo.config import Config
from megatron_stppo.launch import process
from megatron_stppo.layout_check.cases import Case, cases
from megatron_stppo.layout_check.measure import NUMBERS, Measured, measure, random_batch
from megatron_stppo.parallel.collectives import broadcast_bytes
from megatron_stppo.sharding.hf_names import read_shape
from megatron_stppo.telemetry.metrics import progress


@dataclass(frozen=True)
class Tolerance:
    """How far a case may lie from the first one."""

    logprob: float  # nats, the largest difference
    number: float  # relative; of a norm or a loss
    weights: float  # of the worst tensor: norm of the difference, over the norm of its change by the step


# Another layout adds in another order: in float32 tensors of a small model are apart by 1e-6, in bfloat16 by
# 0.02. A gradient that is summed twice, or not, is apart by 0.5 or more.
TOLERANCES = {
    torch.float32: Tolerance(logprob=5e-5, number=2e-4, weights=1e-3),
    torch.bfloat16: Tolerance(logprob=0.2, number=0.1, weights=0.3),
}


def check_invariance(config: Config, output: Path | None = None) -> int:
    """The number of cases that break; collective. `output` names a JSON file for all that was measured.

    The batch is random and small, the algorithm and the model are the configuration's, and so is the first
    case, which the others are compared with. Raises ConfigError.
    """
    process.start(config)
    broken = compare(config, output)
    process.stop()
    return broken


def compare(config: Config, output: Path | None = None) -> int:
    """The same in a default process group that is there."""
    shape, world, rank = read_shape(config.model.path), dist.get_world_size(), dist.get_rank()
    batch = random_batch(shape.vocab, 2 * max(4, world), config.run.seed)
    longest = int(batch.sequence_offsets.diff().max())
    budgets = [longest, 1, len(batch.tokens_P)]  # a few trajectories, one, all
    found = cases(shape, world, config.parallel, budgets)
    tolerance = TOLERANCES[process.dtype(config)]
    first: Measured | None = None
    rows: list[dict[str, Any]] = []
    for case in progress(found, "check-invariance", rank == 0):
        measured = measure(case, config, shape, batch, None if first is None else first.logprob_T)
        first = first or measured
        rows.append(_compare(case, world, measured, first, tolerance))
    if rank == 0:
        _show(rows, tolerance, Console(width=None if Console().is_terminal else 150))
        if output is not None:
            record = {
                "dtype": str(process.dtype(config)),
                "ranks": world,
                "tolerance": vars(tolerance),
                "cases": rows,
            }
            output.write_text(json.dumps(record, indent=1) + "\n")
    return int(broadcast_bytes(str(sum(bool(row["broken"]) for row in rows)).encode(), 0))


def _compare(case: Case, world: int, measured: Measured, first: Measured, limit: Tolerance) -> dict[str, Any]:
    """What was measured, how far it is from the first case, and what of it breaks the tolerance."""
    apart = {"logprob": float((measured.logprob_T - first.logprob_T).abs().max())}
    apart |= {
        name: abs(value - first.numbers[name]) / max(abs(first.numbers[name]), 1e-12)
        for name, value in measured.numbers.items()
    }
    bounds = {"logprob": limit.logprob} | dict.fromkeys(NUMBERS, limit.number)
    tensor = None
    if measured.after:
        tensors = _weights_apart(measured, first)
        tensor = max(tensors, key=lambda name: tensors[name])
        apart["weights"], bounds["weights"] = tensors[tensor], limit.weights
    broken = [name for name, bound in bounds.items() if not apart[name] <= bound]  # NaN too
    return {
        "case": case.name(world),
        "numbers": measured.numbers,
        "apart": apart,
        "tensor": tensor,  # of which the weights are furthest apart
        "broken": broken,
    }


def _weights_apart(measured: Measured, first: Measured) -> dict[str, float]:
    """Of each tensor, the norm of the difference between its two changes, over that of the first one.

    A tensor that nothing moves, an expert without tokens, is apart by 0 if nothing moves it elsewhere either.
    """
    apart = {}
    for name, after in first.after.items():
        moved = float((after.double() - first.before[name].double()).norm())
        difference = float((measured.after[name].double() - after.double()).norm())
        value = difference / max(moved, 1e-12)
        apart[name] = math.inf if math.isnan(value) else value  # or it would not be the largest
    return apart


def _show(rows: list[dict[str, Any]], limit: Tolerance, console: Console) -> None:
    table = Table(title="The same step, computed in other ways", title_justify="left")
    for title in ("layout, tokens per microbatch", "objective", "gradient", "critic loss", "gradient"):
        table.add_column(title, justify="left" if "," in title else "right")
    for title in ("log-prob", "numbers", "weights"):
        table.add_column(f"apart:\n{title}", justify="right")
    table.add_column("verdict")
    for row in rows:
        numbers, apart = row["numbers"], row["apart"]
        shown = ("actor/objective", "actor/gradient_norm", "critic/loss", "critic/gradient_norm")
        largest = max(apart[name] for name in NUMBERS)
        named = [f"weights ({row['tensor']})" if name == "weights" else name for name in row["broken"]]
        verdict = f"[red]differs: {', '.join(named)}[/]" if named else "[green]same[/]"
        cells = [f"{numbers[name]:.6g}" for name in shown]
        table.add_row(
            row["case"], *cells, *(f"{x:.1e}" for x in (apart["logprob"], largest, apart["weights"])), verdict
        )
    console.print(table)
    broken = sum(bool(row["broken"]) for row in rows)
    allowed = (
        f"log-probs {limit.logprob:g} nats, numbers {limit.number:g} relative, weights {limit.weights:g}"
    )
    console.print(f"{len(rows)} cases, {broken} differ. Allowed: {allowed} of a tensor's change.")
