"""The ways to divide GPUs between a trainer and replicas, as far as layout and batch allow.

Uses neither torch nor a process group.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.validation.checks import check_trajectories
from megatron_stppo.validation.model_layout import check_parallel


@dataclass(frozen=True)
class Candidates:
    """Divisions of a number of GPUs.

    Example: 64 GPUs, a layout of 16 GPUs and engines of 8 give the trainers (16, 32) if the batch can be
    divided by 2 but not by 3 data-parallel ranks.
    """

    trainers: tuple[int, ...]  # GPUs of the trainer, ascending; the remaining ones serve
    left_out: dict[int, str]  # GPUs of the trainer: why that is impossible


def candidates(config: Config, gpus: int) -> Candidates:
    """Return the divisions in which every GPU trains or serves, with at least one replica."""
    parallel = config.parallel
    unit, found, left_out = (
        parallel.tensor * parallel.context * parallel.pipeline,
        list[int](),
        dict[int, str](),
    )
    batch = config.rollout.tasks_per_iteration * config.rollout.samples_per_task
    for trainer in range(unit, gpus, unit):
        if (gpus - trainer) % config.engine_tensor:
            continue
        try:
            check_trajectories(config, check_parallel(config, trainer), batch)
        except ConfigError as error:
            left_out[trainer] = str(error)
        else:
            found.append(trainer)
    return Candidates(tuple(found), left_out)
