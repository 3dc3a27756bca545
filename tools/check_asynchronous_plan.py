"""Compare the iteration time that `plan --asynchronous` predicts with that of measured asynchronous runs.

    python tools/check_asynchronous_plan.py --calibrate runs/a --calibrate runs/b runs/c runs/d

The speeds of engine and trainer come from the runs of --calibrate. Two runs with batches of different sizes
are needed to separate the time of a step from that of a sequence. A run does not record the tokens of prompts
per step, so their time is a part of that of a sequence.

The lengths of episodes are those of each compared run. With environment.kind=slow_search:factory the times of
tools are those of the compared run, which follow from the seeds. In other environments tools take no time.

Means over iterations are compared, not medians: if tool times have a long tail, an iteration that waits for
the tail is followed by one that does not, so a median shows little. Exits with 1 if an error is above
--limit.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))  # also when it is run as a file

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.config.file import load
from megatron_stppo.observe import rows, trajectory_log
from megatron_stppo.observe.trajectory_files import recorded
from megatron_stppo.plan.simulation.asynchronous import AsynchronousRun, Window, simulate
from megatron_stppo.plan.simulation.buffer import BatchRule
from megatron_stppo.plan.simulation.engine import EngineSpeed, TrainerSpeed
from megatron_stppo.plan.simulation.recorded import sizes
from megatron_stppo.plan.simulation.workload import PlannedEpisode, RecordedWork, Sizes, ToolTimes
from megatron_stppo.rollout.episodes.play import request_seed
from tools import slow_search

METRICS, CONFIG = "metrics.jsonl", "config.yaml"
COUNTED = ("serving/generated_tokens", "serving/tokens_per_step", "serving/step_ms")
ROUNDS = 50  # of a fit


@dataclass(frozen=True)
class Iteration:
    """A row of metrics.jsonl, and the sizes of its episodes in the order of trajectories/."""

    row: Mapping[str, Any]
    episodes: tuple[Sizes, ...]

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.episodes)

    def without(self, *phases: str) -> float:
        """Return the seconds of the iteration without those of some phases."""
        return float(self.row["seconds"]) - sum(float(self.row.get(f"seconds/{x}") or 0.0) for x in phases)

    @property
    def seconds(self) -> float:
        return self.without("evaluate", "checkpoint")  # they are not part of a forecast

    @property
    def training(self) -> float:
        return self.without("evaluate", "checkpoint", "rollout", "reshard")


@dataclass(frozen=True)
class MeasuredRun:
    """The folder of an asynchronous run with at least 3 iterations."""

    folder: Path
    config: Config
    iterations: tuple[Iteration, ...]

    @property
    def warm(self) -> tuple[Iteration, ...]:
        """All iterations but the first, in which everything is called for the first time."""
        return self.iterations[1:]

    def mean(self, column: str) -> float:
        """Return the mean of a column, over the rows that have it; 0 if none has."""
        found = [float(one.row[column]) for one in self.warm if one.row.get(column) is not None]
        return statistics.fmean(found) if found else 0.0


@dataclass(frozen=True)
class Machine:
    """Speeds from the measured runs, in seconds."""

    engine: EngineSpeed
    trainer: TrainerSpeed
    transfer: float  # pause of a replica for an update
    publish: float  # of the trainer, besides the transfers


def read_run(folder: Path) -> MeasuredRun:
    """Read configuration, metrics and trajectories of a run. Raises ConfigError."""
    if not (folder / METRICS).is_file() or not (folder / CONFIG).is_file():
        raise ConfigError(f"RUN_DIR={folder}: holds no {METRICS} and {CONFIG}; give the folder of a run")
    config = load(folder / CONFIG)
    if config.serving.replicas is None:
        raise ConfigError(f"RUN_DIR={folder}: serving.replicas=null; give an asynchronous run")
    try:
        measured = {row["iteration"]: row for row in rows.read(folder / METRICS) if "seconds/rollout" in row}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / METRICS}: cannot be read ({error}); give another run") from None
    numbers = [number for number in recorded(folder) if number in measured]
    if len(numbers) < 3:
        raise ConfigError(f"RUN_DIR={folder}: has fewer than 3 complete iterations; give a longer run")
    played = [
        tuple(sizes(one) for one in trajectory_log.read(folder, number) if one.turns) for number in numbers
    ]
    iterations = [Iteration(measured[number], one) for number, one in zip(numbers, played, strict=True)]
    return MeasuredRun(folder, config, tuple(iterations))


def calibrate(runs: Sequence[MeasuredRun]) -> Machine:
    """Return the speeds that fit the counted engine steps, and the times of everything but the rollout."""
    iterations = [one for run in runs for one in run.warm]
    found = [[one.row.get(name) for name in COUNTED] for one in iterations]
    counts = [row for row in found if all(row)]  # without iterations in which no replica made a step
    if not counts:
        raise ConfigError(f"--calibrate: no row of {METRICS} has {' and '.join(COUNTED)}; use other runs")
    steps = [tokens / at_once for tokens, at_once, _ in counts]
    generated = [tokens for tokens, _, _ in counts]
    in_steps = [count * ms / 1000 for count, (_, _, ms) in zip(steps, counts, strict=True)]
    tokens = [[1.0] * len(iterations), [float(one.tokens) for one in iterations]]
    transfer = statistics.fmean(run.mean("serving/pause_ms") / 1000 for run in runs)
    reshards = [run.mean("seconds/reshard") - transfer * (run.config.serving.replicas or 0) for run in runs]
    return Machine(
        EngineSpeed(*fit((steps, generated), in_steps)),
        TrainerSpeed(*fit(tokens, [one.training for one in iterations])),
        transfer,
        max(0.0, statistics.fmean(reshards)),
    )


def fit(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the coefficients c >= 0, one per column, with the least sum of |values - columns c|.

    Absolute deviations instead of squares: a few measurements that were disturbed by other work then have no
    influence. All subsets of columns are tried.
    Example: columns (1, 1, 1, 1) and (0, 1, 2, 3) with values (2, 3, 4, 50) give [2, 1].
    """
    target = np.asarray(values, dtype=float)
    best, least = [0.0] * len(columns), float(np.abs(target).sum())
    for count in range(1, len(columns) + 1):
        for chosen in itertools.combinations(range(len(columns)), count):
            matrix = np.stack([np.asarray(columns[k], dtype=float) for k in chosen], axis=1)
            found = _least_deviations(matrix, target)
            error = float(np.abs(target - matrix @ found).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = [0.0] * len(columns), error
                for k, value in zip(chosen, found, strict=True):
                    best[k] = float(value)
    return best


def _least_deviations(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the coefficients by least squares with weights that make squares absolute deviations."""
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    weights = np.ones(len(target))
    for _ in range(ROUNDS):
        root = np.sqrt(weights)
        found = np.linalg.lstsq(matrix / scale * root[:, None], target * root, rcond=None)[0]
        deviations = np.abs(target - matrix / scale @ found)
        weights = 1 / np.maximum(deviations, 1e-9 * max(1e-300, float(np.abs(target).max())))
    return found / scale


def work_of(run: MeasuredRun) -> RecordedWork:
    """Return the recorded episodes of a run, with the seconds of their calls."""
    slow = run.config.environment.kind == slow_search.KIND
    episodes = []
    for iteration, row in enumerate(run.iterations):
        for place, one in enumerate(row.episodes):
            seed = request_seed(run.config.run.seed * 1_000_003 + iteration, place, 0)
            turns = range(1, len(one.turns))
            waits = tuple(slow_search.seconds(seed, turn) if slow else 0.0 for turn in turns)
            episodes.append(PlannedEpisode(one, waits))
    return RecordedWork(tuple(episodes), ToolTimes(at_once=run.config.environment.concurrency))


def predict(run: MeasuredRun, machine: Machine) -> Sequence[float]:
    """Return the seconds of the simulated iterations of `run`, without the first."""
    rollout, serving = run.config.rollout, run.config.serving
    simulated = AsynchronousRun(
        work_of(run),
        BatchRule(
            rollout.tasks_per_iteration, serving.max_staleness, serving.order, rollout.samples_per_task
        ),
        machine.engine,
        machine.trainer,
        serving.replicas or 0,
        serving.concurrency or rollout.max_sequences,
        serving.update,
        machine.transfer,
        machine.publish,
    )
    return simulate(simulated, Window(1, len(run.iterations) - 1)).durations


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--calibrate", action="append", type=Path, required=True, metavar="RUN_DIR")
    parser.add_argument(
        "--own-training",
        action="store_true",
        help="take the mean time of training from each compared run, for a machine whose load changes",
    )
    parser.add_argument("--limit", type=float, default=0.15, help="largest relative error (default: 0.15)")
    arguments = parser.parse_args(argv)
    try:
        machine = calibrate([read_run(folder) for folder in arguments.calibrate])
        runs = [read_run(folder) for folder in arguments.runs]
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    engine, trainer = machine.engine, machine.trainer
    print(
        f"engine: {engine.step * 1e3:.2f} ms per step, {engine.sequence * 1e3:.3f} ms per sequence\n"
        f"trainer: {trainer.batch:.3f} s per batch, {trainer.token * 1e3:.3f} ms per token\n"
        f"update: {machine.transfer:.3f} s per replica, and {machine.publish:.3f} s\n"
        "seconds of an iteration, mean (median)"
    )
    worst = 0.0
    for run in runs:
        measured = [one.seconds for one in run.warm]
        trained = TrainerSpeed(statistics.fmean(one.training for one in run.warm))
        own = replace(machine, trainer=trained) if arguments.own_training else machine
        predicted = predict(run, own)
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
