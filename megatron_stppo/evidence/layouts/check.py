"""Comparison of the same step under different layouts: every case is compared with the first one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_stppo.cluster.launch import process
from megatron_stppo.config import Config
from megatron_stppo.evidence.layouts.cases import Case, cases
from megatron_stppo.evidence.layouts.measure import NUMBERS, Measured, measure, random_batch
from megatron_stppo.parallel.collectives import broadcast_record
from megatron_stppo.weights.sharding.hf_names import ModelShape, read_shape


@dataclass(frozen=True)
class Tolerance:
    """The largest allowed differences between a case and the first one."""

    logprob: float  # nats, the largest difference of a log-prob
    number: float  # relative difference of each of NUMBERS
    weights: float  # per tensor: norm of the difference / norm of the tensor's change in the step


# Another layout adds in another order: tensors of a small model differ by 1e-6 in float32 and by 0.02 in
# bfloat16. A gradient that is wrongly summed twice, or not summed, gives a difference of at least 0.5.
TOLERANCES = {
    torch.float32: Tolerance(logprob=5e-5, number=2e-4, weights=1e-3),
    torch.bfloat16: Tolerance(logprob=0.2, number=0.1, weights=0.3),
}


def check_layouts(config: Config, output: Path | None = None) -> int:
    """Return the number of cases that differ from the first one. Collective.

    The batch is random and small. The algorithm and the model are those of the configuration. The first case
    is the layout of the configuration. `output`: a JSON file for all measurements. Raises ConfigError.
    """
    process.start(config)
    broken = compare(config, output)
    process.stop()
    return broken


def compare(config: Config, output: Path | None = None) -> int:
    """Do the work of check_layouts in a default process group that already exists."""
    shape, world, rank = read_shape(config.model.path), dist.get_world_size(), dist.get_rank()
    tolerance = TOLERANCES[process.dtype(config)]
    rows: list[dict[str, Any]] = []
    for row in compared(config, shape, partial(cases, shape, world, config.parallel)):
        rows.append(row)
        if rank == 0:
            print(_line(row), flush=True)
    broken = broadcast_record(sum(bool(row["broken"]) for row in rows), int, source=0)
    if rank == 0:
        print(
            f"{len(rows)} cases, {broken} differ. Allowed: log-probs {tolerance.logprob:g} nats, numbers "
            f"{tolerance.number:g} relative, weights {tolerance.weights:g} of the change of a tensor."
        )
        if output is not None:
            about = {"dtype": str(process.dtype(config)), "ranks": world, "tolerance": vars(tolerance)}
            output.write_text(json.dumps(about | {"cases": rows}, indent=1) + "\n", encoding="utf-8")
    return broken


def compared(
    config: Config, shape: ModelShape, cases_of: Callable[[list[int]], list[Case]]
) -> Iterator[dict[str, Any]]:
    """Yield the measurements of each case, as compare_case; the first rank has the weights. Collective.

    cases_of: returns the cases for sizes of micro-batches: a few trajectories, one, and all.
    """
    world, tolerance = dist.get_world_size(), TOLERANCES[process.dtype(config)]
    batch = random_batch(shape.vocab, 2 * max(4, world), config.run.seed)
    longest = int(batch.sequence_offsets.diff().max())
    first: Measured | None = None
    for case in cases_of([longest, 1, batch.tokens]):
        measured = measure(case, config, shape, batch, None if first is None else first.logprob_T)
        first = first or measured
        yield compare_case(case, world, measured, first, tolerance)


def compare_case(
    case: Case, world: int, measured: Measured, first: Measured, limit: Tolerance
) -> dict[str, Any]:
    """Return the measurements of a case, their differences from the first case, and those above the limit."""
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
        "tensor": tensor,  # the one with the largest difference of weights
        "broken": broken,
    }


def _weights_apart(measured: Measured, first: Measured) -> dict[str, float]:
    """Return the relative difference of each tensor's weights after the step.

    It is the norm of the difference between both cases, divided by the norm of the change in the first case.
    A tensor that the step does not change in either case, such as an expert without tokens, has a difference
    of 0.
    """
    apart = {}
    for name, after in first.after.items():
        moved = float((after.double() - first.before[name].double()).norm())
        difference = float((measured.after[name].double() - after.double()).norm())
        value = difference / max(moved, 1e-12)
        apart[name] = math.inf if math.isnan(value) else value  # so that max() finds a NaN
    return apart


def _line(row: dict[str, Any]) -> str:
    """Return the largest differences of a case in one line, and its verdict."""
    apart = row["apart"]
    largest = {"log-prob": apart["logprob"], "numbers": max(apart[name] for name in NUMBERS)}
    largest["weights"] = apart["weights"]
    numbers = "".join(f"{f'{name} {value:.1e}':20}" for name, value in largest.items())
    named = [f"weights ({row['tensor']})" if name == "weights" else name for name in row["broken"]]
    verdict = f"differs: {', '.join(named)}" if named else "same"
    return f"{row['case']:39} {numbers}{verdict}"
