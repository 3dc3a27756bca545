"""The ways to divide GPUs between a trainer and replicas, as far as layout and batch allow.

Uses neither torch nor a process group.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.validation import checks, model_folder
from megatron_stppo.validation.model_layout import check_engine, check_parallel


@dataclass(frozen=True)
class Candidates:
    """Divisions of a number of GPUs.

    Example: 64 GPUs, a layout of 16 GPUs and engines of 8 give the trainers (16, 32) if the batch can be
    divided by 2 but not by 3 data-parallel ranks.
    """

    trainers: tuple[int, ...]  # GPUs of the trainer, ascending; the remaining ones serve
    left_out: tuple[str, ...]  # what is not possible, and why
    refusal: str  # why colocated training is not possible; empty if layout and batch allow it


def candidates(config: Config, gpus: int) -> Candidates:
    """Return the divisions in which every GPU trains or serves, with at least one replica.

    Raises ConfigError for a configuration that no division can have.
    """
    model_folder.check_model(config)
    check_engine(config, config.engine_tensor)
    checks.check_context(config)
    parallel = config.parallel
    unit = parallel.tensor * parallel.context * parallel.pipeline
    batch = config.rollout.tasks_per_iteration * config.rollout.samples_per_task
    trainers, uneven, left_out = list[int](), list[int](), list[str]()
    for trainer in range(unit, gpus, unit):
        if (gpus - trainer) % config.engine_tensor:
            continue
        try:
            layout = check_parallel(config, trainer)
        except ConfigError as error:
            left_out.append(f"{trainer} GPUs for training: {error}")
            continue
        model_folder.check_reference(config, layout, tokenizers=False)
        is_even = batch % (config.update.minibatches * layout.data) == 0
        (trainers if is_even else uneven).append(trainer)
    if uneven:
        left_out.append(
            f"{', '.join(map(str, uneven))} GPUs for training: the {batch} trajectories of a batch are not a "
            f"multiple of update.minibatches={config.update.minibatches} * data-parallel ranks"
        )
    if gpus <= unit:
        left_out.append(
            f"{gpus} GPUs: parallel.tensor * context * pipeline = {unit} GPUs train, and none is left for a "
            "replica"
        )
    return Candidates(tuple(trainers), tuple(left_out), _refusal(config, gpus))


def _refusal(config: Config, gpus: int) -> str:
    try:
        checks.check(config.changed(serving={"replicas": None}), gpus, "plan")
    except ConfigError as error:
        return str(error)
    return ""
