"""Lengths of the episodes of a recorded run."""

from __future__ import annotations

from pathlib import Path

from megatron_stppo.base.types import Trajectory
from megatron_stppo.config import ConfigError
from megatron_stppo.observe import trajectory_log
from megatron_stppo.observe.trajectory_files import recorded
from megatron_stppo.plan.simulation.workload import RecordedLengths, Sizes


def read_lengths(folder: Path, last: int = 8) -> RecordedLengths:
    """Return the lengths of the episodes of a run's last `last` iterations. Raises ConfigError."""
    numbers = recorded(folder)[-last:]
    if not numbers:
        raise ConfigError(f"--from={folder}: holds no trajectories/; give the folder of a run, as runs/NAME")
    found = [sizes(one) for number in numbers for one in trajectory_log.read(folder, number) if one.turns]
    if not found:
        raise ConfigError(f"--from={folder}: no episode of its last iterations has a turn; give another run")
    return RecordedLengths(tuple(found))


def sizes(trajectory: Trajectory) -> Sizes:
    """Return the sizes of a trajectory with at least one turn."""
    read = [len(trajectory.prompt_ids), *(len(turn.observation_ids) for turn in trajectory.turns)]
    generated = [len(turn.token_ids) for turn in trajectory.turns]
    return Sizes(tuple(zip(read, generated, strict=False)))
