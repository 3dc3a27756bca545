"""Compare the iteration time that `plan --asynchronous` predicts with that of measured runs.

    python tools/check_asynchronous_plan.py --calibrate runs/a --calibrate runs/b runs/c runs/d

The speeds of engine and trainer come from the runs of --calibrate: colocated runs whose tools take no time,
or asynchronous runs. Two runs with batches of different sizes are needed to separate the time of a step from
that of a sequence.

The lengths of episodes are those of each compared run. The times of tools are:

    environment.kind=slow_search:factory   those of the compared run, which follow from the seeds (for runs
                                           with one rank, or in the order of admission)
    other environments of the user         those of --tool-seconds
    the search environment                 none

Means over iterations are compared, not medians: if tool times have a long tail, an iteration that waits for
the tail is followed by one that does not, so a median shows little. Exits with 1 if an error is above
--limit.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # also when it is run as a file

from megatron_stppo.config import ConfigError
from megatron_stppo.plan import asynchronous, colocated
from megatron_stppo.plan.calibration import MeasuredRun, fit_engine, fit_trainer, read_run
from megatron_stppo.plan.simulation.buffer import BatchRule
from megatron_stppo.plan.simulation.speeds import EngineSpeed, TrainerSpeed
from megatron_stppo.plan.simulation.workload import (
    LogNormal,
    PlannedEpisode,
    RecordedWork,
    Sizes,
    ToolTimes,
)
from megatron_stppo.rollout.play import request_seed
from tools import slow_search


@dataclass(frozen=True)
class Machine:
    """Speeds from the measured runs, in seconds."""

    engine: EngineSpeed
    trainer: TrainerSpeed
    transfer: float  # pause of a replica for an update; 0 if only colocated runs were measured
    publish: float  # of the trainer, besides the transfers


def calibrate(runs: Sequence[MeasuredRun], ranks: int) -> Machine:
    counts = [engines(run, ranks) for run in runs]
    apart = [run.mean("serving/pause_ms") / 1000 for run in runs if run.is_asynchronous]
    transfer = statistics.fmean(apart) if apart else 0.0
    reshards = [
        run.mean("seconds/reshard") - (transfer * count if run.is_asynchronous else 0.0)
        for run, count in zip(runs, counts, strict=True)
    ]
    publish = max(0.0, statistics.fmean(reshards))
    return Machine(fit_engine(runs, counts[0]), fit_trainer(runs), transfer, publish)


def engines(run: MeasuredRun, ranks: int) -> int:
    return run.config.serving.replicas or ranks // run.config.engine_tensor


def work_of(run: MeasuredRun, calls: LogNormal | None) -> RecordedWork:
    """Return the recorded episodes of a run, with the seconds of their calls."""
    sizes = [(iteration, one) for iteration, row in enumerate(run.iterations) for one in row.episodes]
    places = [place for row in run.iterations for place in range(len(row.episodes))]
    episodes = tuple(
        PlannedEpisode(one, 0.0, waits(run, iteration, place, one, calls))
        for (iteration, one), place in zip(sizes, places, strict=True)
    )
    return RecordedWork(episodes, ToolTimes(at_once=run.config.environment.concurrency))


def waits(
    run: MeasuredRun, iteration: int, place: int, sizes: Sizes, calls: LogNormal | None
) -> tuple[float, ...]:
    """Return the seconds of the call after each turn. The answer, after the last turn, takes none."""
    kind, turns = run.config.environment.kind, range(1, len(sizes.turns))
    seed = request_seed(run.config.run.seed * 1_000_003 + iteration, place, 0)
    if kind == slow_search.KIND:
        between = [slow_search.seconds(seed, turn) for turn in turns]
    elif kind != "search" and calls is not None:
        chance = random.Random(seed)
        between = [calls.draw(chance) for _ in turns]
    else:
        between = [0.0 for _ in turns]
    return (*between, 0.0)


def predict(run: MeasuredRun, machine: Machine, calls: LogNormal | None, ranks: int) -> Sequence[float]:
    """Return the seconds of the simulated iterations of `run`, without the first."""
    config, serving, count = run.config, run.config.serving, len(run.iterations)
    work = work_of(run, calls)
    if not run.is_asynchronous:
        together = colocated.ColocatedRun(
            work,
            run.batch,
            machine.engine,
            machine.trainer,
            engines(run, ranks),
            machine.publish,
            config.rollout.overlap_tools,
        )
        return colocated.simulate(together, count).durations[1:]
    rollout = config.rollout
    apart = asynchronous.AsynchronousRun(
        work,
        BatchRule(
            rollout.tasks_per_iteration, serving.max_staleness, serving.order, rollout.samples_per_task
        ),
        machine.engine,
        machine.trainer,
        engines(run, ranks),
        serving.concurrency or rollout.max_sequences,
        serving.update,
        machine.transfer,
        machine.publish,
    )
    return asynchronous.simulate(apart, asynchronous.Window(1, count - 1)).durations


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--calibrate", action="append", type=Path, required=True, metavar="RUN_DIR")
    parser.add_argument("--tool-seconds", nargs=2, type=float, metavar=("MEDIAN", "P99"))
    parser.add_argument("--ranks", type=int, default=1, help="ranks of the colocated runs (default: 1)")
    parser.add_argument(
        "--own-training",
        action="store_true",
        help="take the mean time of training from each compared run, for a machine whose load changes",
    )
    parser.add_argument("--limit", type=float, default=0.15, help="largest relative error (default: 0.15)")
    arguments = parser.parse_args(argv)
    calls = LogNormal(*arguments.tool_seconds) if arguments.tool_seconds else None
    try:
        machine = calibrate([read_run(folder) for folder in arguments.calibrate], arguments.ranks)
        runs = [read_run(folder) for folder in arguments.runs]
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    engine, trainer = machine.engine, machine.trainer
    print(
        f"engine: {engine.step * 1e3:.2f} ms per step, {engine.sequence * 1e3:.3f} ms per sequence, "
        f"{engine.prefill * 1e3:.3f} ms per token of a prompt\n"
        f"trainer: {trainer.batch:.3f} s per batch, {trainer.token * 1e3:.3f} ms per token\n"
        f"update: {machine.transfer:.3f} s per replica, and {machine.publish:.3f} s\n"
        "seconds of an iteration, mean (median)"
    )
    worst = 0.0
    for run in runs:
        measured = [one.seconds for one in run.warm]
        trained = TrainerSpeed(statistics.fmean(one.training for one in run.warm))
        own = replace(machine, trainer=trained) if arguments.own_training else machine
        predicted = predict(run, own, calls, arguments.ranks)
        error = statistics.fmean(predicted) / statistics.fmean(measured) - 1
        worst = max(worst, abs(error))
        print(
            f"{run.folder.name}: measured {shown(measured)} in {len(measured)} iterations, "
            f"predicted {shown(predicted)}: {error:+.0%}"
        )
    return int(worst > arguments.limit)


def shown(seconds: Sequence[float]) -> str:
    return f"{statistics.fmean(seconds):.2f} ({statistics.median(seconds):.2f})"


if __name__ == "__main__":
    sys.exit(main())
