"""How many tokens score and update compute where trajectories share prefixes, measured on a recorded run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from megatron_stppo.base.types import Batch
from megatron_stppo.config import Config, ConfigError
from megatron_stppo.data.division import Packer
from megatron_stppo.data.packing import microbatch_runs, prefixes_of, to_batch
from megatron_stppo.model.pipeline import sharing_obstacle
from megatron_stppo.observe import trajectory_log
from megatron_stppo.observe.run_files import recorded

NO_RUN = "prefixes that they share are not counted; --from RUN_DIR measures them"


@dataclass(frozen=True)
class RecordedBatch:
    """A batch that a run recorded, and how the planned run divides it into minibatches."""

    folder: Path
    episodes: int
    batch: Batch
    minibatches: Sequence[Sequence[int]]  # trajectories


@dataclass(frozen=True)
class Sharing:
    """Example: Sharing(0.43, "prefixes shared, measured on runs/first")."""

    distinct: float  # tokens that are computed / tokens of the trajectories
    reason: str  # where the number comes from, or why it is 1

    @classmethod
    def of(cls, config: Config, packer: Packer, source: RecordedBatch | None) -> Sharing:
        """Return the share over all data-parallel ranks, with the planned minibatches and micro-batches."""
        if obstacle := sharing_obstacle(config, packer.mesh.layout):
            return cls(1.0, obstacle)
        if source is None:
            return cls(1.0, NO_RUN)
        computed = tokens = 0
        for chosen in source.minibatches:
            for part in packer.divide(source.batch, chosen).parts:
                tree = prefixes_of(source.batch, part, packer.spec)
                runs = microbatch_runs(tree, packer.spec)
                computed += sum(int(tree.packed(run).lengths.sum()) for run in runs)
                tokens += int(tree.lengths.sum())
        planned = config.rollout.tasks_per_iteration * config.rollout.samples_per_task
        fewer = f", on {source.episodes} episodes instead of {planned}" if source.episodes < planned else ""
        routed = ", if the engine's experts agree on them" if packer.by_route else ""
        reason = f"prefixes shared{routed}, measured on {source.folder}{fewer}"
        return cls(computed / tokens if tokens else 1.0, reason)


def newest_batch(folder: Path, episodes: int) -> tuple[Batch, int]:
    """Return the first `episodes` episodes of a run's last iteration, and how many there are.

    Raises ConfigError.
    """
    if not (numbers := recorded(folder)):
        raise ConfigError(f"--from={folder}: holds no trajectories/; give the folder of a run, as runs/NAME")
    played = trajectory_log.read(folder, numbers[-1])
    number = list(accumulate(int(one.branch == 0) for one in played))  # of each trajectory's episode, from 1
    kept = [one for one, n in zip(played, number, strict=True) if n <= episodes]
    return to_batch(kept), min(number[-1], episodes)
