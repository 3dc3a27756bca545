"""Speeds of engine and trainer from runs that were measured, and the lengths of their episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.config_file import load
from megatron_stppo.plan.colocated import ColocatedRun, play
from megatron_stppo.plan.simulation.fit import fit
from megatron_stppo.plan.simulation.speeds import EngineSpeed, TrainerSpeed
from megatron_stppo.plan.simulation.workload import (
    PlannedEpisode,
    RecordedLengths,
    RecordedWork,
    Sizes,
    ToolTimes,
)
from megatron_stppo.telemetry import rows, trajectory_log
from megatron_stppo.telemetry.trajectory_files import recorded
from megatron_stppo.types import Trajectory

METRICS, CONFIG = "metrics.jsonl", "config.yaml"
NOT_TRAINING = ("rollout", "reshard", "evaluate", "checkpoint")  # phases


@dataclass(frozen=True)
class MeasuredIteration:
    """A row of metrics.jsonl, and the sizes of its episodes in the order of trajectories/."""

    row: Mapping[str, Any]
    episodes: tuple[Sizes, ...]

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.episodes)

    @property
    def seconds(self) -> float:
        """The duration without evaluation and checkpoint, which are not part of a forecast."""
        return float(self.row["seconds"]) - self.phase("evaluate") - self.phase("checkpoint")

    @property
    def training(self) -> float:
        """The duration of everything but rollout and reshard: scores, updates and logs."""
        return float(self.row["seconds"]) - sum(self.phase(name) for name in NOT_TRAINING)

    def phase(self, name: str) -> float:
        return float(self.row.get(f"seconds/{name}") or 0.0)


@dataclass(frozen=True)
class MeasuredRun:
    """A run's folder."""

    folder: Path
    config: Config
    iterations: tuple[MeasuredIteration, ...]  # at least 3

    @property
    def warm(self) -> tuple[MeasuredIteration, ...]:
        """All iterations but the first, in which everything is called for the first time."""
        return self.iterations[1:]

    @property
    def is_asynchronous(self) -> bool:
        return self.config.serving.replicas is not None

    @property
    def batch(self) -> int:
        return self.config.rollout.tasks_per_iteration * self.config.rollout.samples_per_task

    def mean(self, column: str) -> float:
        """Return the mean of a column, over the rows that have it; 0 if none has."""
        found = [float(one.row[column]) for one in self.warm if one.row.get(column) is not None]
        return sum(found) / len(found) if found else 0.0


def read_lengths(folder: Path, last: int = 8) -> RecordedLengths:
    """Return the lengths of the episodes of a run's last `last` iterations. Raises ConfigError."""
    numbers = recorded(folder)[-last:]
    if not numbers:
        raise ConfigError(f"--from={folder}: holds no trajectories/; give the folder of a run, as runs/NAME")
    found = [sizes(one) for number in numbers for one in trajectory_log.read(folder, number) if one.turns]
    if not found:
        raise ConfigError(f"--from={folder}: no episode of its last iterations has a turn; give another run")
    return RecordedLengths(tuple(found))


def read_run(folder: Path) -> MeasuredRun:
    """Read configuration, metrics and trajectories of a run. Raises ConfigError."""
    if not (folder / METRICS).is_file() or not (folder / CONFIG).is_file():
        raise ConfigError(f"RUN_DIR={folder}: holds no {METRICS} and {CONFIG}; give the folder of a run")
    config = load(folder / CONFIG)
    try:
        measured = {row["iteration"]: row for row in rows.read(folder / METRICS) if "seconds/rollout" in row}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / METRICS}: cannot be read ({error}); give another run") from None
    numbers = [number for number in recorded(folder) if number in measured]
    if len(numbers) < 3:
        raise ConfigError(f"RUN_DIR={folder}: has fewer than 3 complete iterations; give a longer run")
    iterations = []
    for number in numbers:
        episodes = tuple(sizes(one) for one in trajectory_log.read(folder, number) if one.turns)
        iterations.append(MeasuredIteration(measured[number], episodes))
    return MeasuredRun(folder, config, tuple(iterations))


def sizes(trajectory: Trajectory) -> Sizes:
    """Return the sizes of a trajectory with at least one turn."""
    read = [len(trajectory.prompt_ids), *(len(turn.observation_ids) for turn in trajectory.turns)]
    generated = [len(turn.token_ids) for turn in trajectory.turns]
    return Sizes(tuple(zip(read, generated, strict=False)))


def fit_trainer(runs: Sequence[MeasuredRun]) -> TrainerSpeed:
    """Return the speed that fits the measured times of everything but rollout and reshard."""
    iterations = [one for run in runs for one in run.warm]
    columns = [[1.0] * len(iterations), [float(one.tokens) for one in iterations]]
    return TrainerSpeed(*fit(columns, [one.training for one in iterations]))


def fit_engine(runs: Sequence[MeasuredRun], replicas: int = 1) -> EngineSpeed:
    """Return the speed that fits the measured times of engine steps.

    An asynchronous run counts its steps, but not the tokens of prompts, whose time becomes a part of that of
    a sequence. The steps of a colocated run, which has `replicas` engines, follow from the lengths of its
    episodes, if its tools take no time.
    """
    found = []
    for run in runs:
        found += _counted(run) if run.is_asynchronous else _simulated(run, replicas)
    steps, generated, prefilled, seconds = (list(column) for column in zip(*found, strict=True))
    step, sequence, prefill = fit((steps, generated, prefilled), seconds)
    return EngineSpeed(step, sequence, prefill)


def _counted(run: MeasuredRun) -> list[tuple[float, float, float, float]]:
    """Return (steps, tokens generated, 0, seconds in steps) of all replicas, by iteration."""
    names = [f"serving/{name}" for name in ("generated_tokens", "tokens_per_step", "step_ms")]
    counted = [[one.row.get(name) for name in names] for one in run.warm]
    found = [
        (tokens / at_once, tokens, 0.0, tokens / at_once * ms / 1000)
        for tokens, at_once, ms in counted
        if tokens and at_once and ms  # absent in an iteration in which no replica made a step
    ]
    if not found:
        raise ConfigError(f"{run.folder / METRICS}: no row has {' and '.join(names)}; use another run")
    return found


def _simulated(run: MeasuredRun, replicas: int) -> list[tuple[float, float, float, float]]:
    """Return (steps, tokens generated, tokens of prompts, seconds) of one replica, by iteration."""
    found = []
    for one in run.warm:
        episodes = tuple(PlannedEpisode(size, 0.0, (0.0,) * len(size.turns)) for size in one.episodes)
        speed = EngineSpeed(1.0, most_sequences=run.config.rollout.max_sequences)
        made = ColocatedRun(
            RecordedWork(episodes, ToolTimes()), len(episodes), speed, TrainerSpeed(0.0), replicas
        )
        counts = play(made, 0)
        each = [value / replicas for value in (counts.steps, counts.generated, counts.prefilled)]
        found.append((each[0], each[1], each[2], one.phase("rollout")))
    return found
