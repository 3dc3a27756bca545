"""Checks whether a planned run fits in memory. Each violation is one line: field, value, remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_stppo.config import Config
from megatron_stppo.model.offload import Phase
from megatron_stppo.plan.hardware import GIB, Gpu
from megatron_stppo.plan.usage import EngineUse, StageUse, TrainingUse

NO_ENGINE = EngineUse(0, 0, 0, 1)  # of GPUs that train and do not serve


def broken(use: TrainingUse, gpu: Gpu, engine: EngineUse = NO_ENGINE, staging: int = 0) -> Iterator[str]:
    """Yield the violated limits, in the order in which a run would reach them: a line for every phase that
    does not fit, about the stage that needs most memory.

    staging: bytes of the reshard's buffers.
    """
    serves: tuple[Phase, ...] = ()
    if engine != NO_ENGINE:
        yield from serving_limit(use.config, engine, gpu)
        serves = ("rollout", "reshard")
    offload = use.config.update.offload
    for phase in (*serves, "score", "update"):
        fullest = max(use.stages, key=lambda one: one.totals(engine, staging, offload)[phase])
        taken = fullest.totals(engine, staging, offload)[phase]
        if taken > gpu.usable:
            where = f" of pipeline stage {fullest.stage}" if use.layout.pipeline > 1 else ""
            yield (
                f"{_remedy(use, phase, fullest, engine, gpu)} ({phase} needs {_gib(taken)} on a "
                f"GPU{where}, which has {_gib(gpu.usable)})"
            )


def serving_limit(config: Config, engine: EngineUse, gpu: Gpu) -> Iterator[str]:
    """Yield a line if the engine cannot hold its weights and one trajectory."""
    needed = config.max_context * engine.cache_per_token
    if engine.cache < needed:
        share = config.rollout.gpu_memory_utilization
        least = math.ceil(100 * (engine.weights + engine.working + needed) / gpu.memory) / 100
        remedy = f"at least {least}, or a " if least < 0.95 else "a "
        yield (
            f"rollout.gpu_memory_utilization={share}: {_gib(share * gpu.memory)} of a GPU must hold "
            f"{_gib(engine.weights)} of weights, {_gib(engine.working)} for a step, and {_gib(needed)} for "
            f"the keys and values of rollout.max_context={config.max_context} tokens; choose {remedy}larger "
            f"rollout.engine_tensor than {config.engine_tensor}"
        )


def _remedy(use: TrainingUse, phase: Phase, stage: StageUse, engine: EngineUse, gpu: Gpu) -> str:
    """Return the field whose change helps most, with its present value and the value to choose."""
    config, layout = use.config, use.layout
    parallel, update = config.parallel, config.update
    held = sum(stage.held(phase, update.offload).values())
    serves = phase in ("rollout", "reshard")
    if serves and update.offload != "all":
        better = "optimizer or all" if update.offload == "none" else "all"
        return (
            f"update.offload={update.offload}: the trainer keeps {_gib(held)}; choose {better}, or lower "
            f"rollout.gpu_memory_utilization={config.rollout.gpu_memory_utilization}"
        )
    if held + (engine.weights if serves else 0) > 0.9 * gpu.usable:
        return (
            f"parallel.pipeline={parallel.pipeline}: models, gradients and optimizers alone take "
            f"{_gib(held)}; raise it, parallel.tensor={parallel.tensor}, or the number of GPUs "
            f"({layout.world})"
        )
    if serves:
        share, most = config.rollout.gpu_memory_utilization, (gpu.usable - held) / gpu.memory
        return (
            f"rollout.gpu_memory_utilization={share}: lower it to {most - 0.005:.2f}; the trainer "
            f"keeps {_gib(held)}"
        )
    if config.model.recompute != "full" and phase == "update":
        return f"model.recompute={config.model.recompute}: choose full"
    budget, longest = update.tokens_per_microbatch * layout.context, config.max_context
    if budget > longest:
        return (
            f"update.tokens_per_microbatch={update.tokens_per_microbatch}: lower it, but not below "
            f"{-(-longest // layout.context)}, the share of one trajectory"
        )
    if stage.logits > 0.2 * gpu.usable:
        return f"update.logit_rows={update.logit_rows}: lower it; a chunk takes {_gib(stage.logits)}"
    return f"parallel.context={parallel.context}: raise it to split a trajectory over more ranks"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
