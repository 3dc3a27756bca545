"""What a run uses, and whether it fits: the memory of a GPU in each phase, the host memory of a node, the
size of a checkpoint. Each violation is one line: field, value, remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from megatron_stppo.config import Config
from megatron_stppo.model.offload import MAY_LEAVE, NEEDED, Offload, Phase
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.plan.assumptions import GIB, Gpu, communicator
from megatron_stppo.plan.memory import ModelUse
from megatron_stppo.plan.work import Sharing, Work
from megatron_stppo.weights.sharding.hf_names import HEAD, ModelShape, hf_shapes
from megatron_stppo.weights.sharding.low_rank import adapter_shapes
from megatron_stppo.weights.sharding.tiles import Spans

PREFILL = 8192  # tokens of one step, as rollout/vllm/vllm_setup.py sets them


@dataclass(frozen=True)
class EngineUse:
    """An arithmetic estimate of vLLM's memory on one GPU, in bytes. vLLM's modules are not built for a plan.

    The share rollout.gpu_memory_utilization is divided into weights, working and cache.
    """

    weights: int
    working: int  # activations of a step, logits of a sample, states of recurrent layers
    cache: int  # the rest, for keys and values; negative if weights and working exceed the share
    cache_per_token: int
    state: int = 0  # of a sequence, in recurrent layers
    communicators: int = 0  # of the engine, and of the reshard or the links to it

    @property
    def cached_tokens(self) -> int:
        return max(0, self.cache) // self.cache_per_token

    @classmethod
    def of(cls, config: Config, shape: ModelShape, weights: int, size: int, gpu: Gpu) -> EngineUse:
        """Return the estimate. weights: bytes of an engine's shard; size: bytes per element."""
        tensor, sequences = config.engine_tensor, config.rollout.max_sequences
        # The peak of a step: the residual stream twice, an MLP's input, gate, up and their product.
        step = max(PREFILL, sequences) * (3 * shape.hidden + 3 * shape.ffn // tensor) * size
        # The sampler needs whole rows in float32: logits, their softmax and a sorted copy.
        working = step + 3 * sequences * shape.vocab * 4
        state = sum(mixer.state(size) for mixer in shape.mixers) // tensor
        working += sequences * state
        budget = int(config.rollout.gpu_memory_utilization * gpu.memory)
        per_token = size * sum(mixer.cached(tensor) for mixer in shape.mixers)
        own = communicator(range(tensor), "sum", gpu.per_node) if tensor > 1 and gpu.is_cuda else 0
        own *= 1 + (shape.experts > 0)  # vLLM makes another one for experts, over the same ranks
        return cls(weights, working, budget - weights - working, per_token, state, own)


NO_ENGINE = EngineUse(0, 0, 0, 1)  # of GPUs that train and do not serve


@dataclass(frozen=True)
class StageUse:
    """The memory of each rank of one pipeline stage, in bytes. All ranks of a stage hold the same."""

    stage: int
    ranks: int
    layers: int
    models: Mapping[str, ModelUse]  # by role
    scored: tuple[str, ...]  # roles of the models that are scored
    in_flight: Mapping[str, int]  # by role
    trunk: int  # frozen weights that all models share; 0 without adapters
    buffers: int  # of megatron, shared by all models
    communicators: int
    logits: int  # one chunk of logits on the last stage; already included in the models' numbers

    def held(self, phase: Phase, offload: Offload) -> dict[str, int]:
        """Return the bytes that stay on the GPU during the whole phase, by item."""
        away = set(MAY_LEAVE[offload]) - set(NEEDED[phase])
        models = self.models.values()
        shared = {"frozen weights": 0 if "trunk" in away else self.trunk} if self.trunk else {}
        return shared | {
            "weights": sum(use.weights for role, use in self.models.items() if role not in away),
            "gradients": 0 if "gradients" in away else sum(use.gradients for use in models),
            "optimizer": 0 if "optimizer" in away else sum(use.optimizer for use in models),
            "buffers": self.buffers + sum(use.buffers for use in models),
            "communicators": self.communicators,
        }

    def updating(self, role: str) -> int:
        """Return the largest number of bytes that an update of a model adds."""
        use = self.models[role]
        return max(self.in_flight[role] + use.working + use.set_aside, use.stepping)

    def phases(self, engine: EngineUse, staging: int, offload: Offload) -> dict[Phase, dict[str, int]]:
        """Return bytes by phase and item. In score and update one model computes at a time.

        staging: bytes of the reshard's buffers; offload: update.offload.
        """
        models = self.models
        updating = {role: self.updating(role) for role in models}
        busiest = max(updating, key=updating.__getitem__)
        kept = self.in_flight[busiest]
        serving = {"engine weights": engine.weights, "engine at work": engine.working}
        at_work: dict[Phase, dict[str, int]] = {
            "rollout": serving | {"KV cache": max(0, engine.cache)},
            "reshard": {"engine weights": engine.weights, "reshard buffers": staging},
            "score": {"at work": max((models[role].scoring for role in self.scored), default=0)},
            "update": {"in flight": kept, "at work": updating[busiest] - kept},
        }
        every = {"communicators": self.communicators + engine.communicators}
        return {phase: self.held(phase, offload) | every | items for phase, items in at_work.items()}

    def totals(self, engine: EngineUse, staging: int, offload: Offload) -> dict[Phase, int]:
        phases = self.phases(engine, staging, offload)
        return {phase: sum(items.values()) for phase, items in phases.items()}

    def offloaded(self, offload: Offload) -> int:
        """Return the bytes of a rank that the host keeps with update.offload. Gradients are not kept."""
        names = MAY_LEAVE[offload]
        return (
            sum(use.optimizer for use in self.models.values() if "optimizer" in names)
            + sum(use.weights for role, use in self.models.items() if role in names)
            + (self.trunk if "trunk" in names else 0)
        )


@dataclass(frozen=True)
class TrainingUse:
    """What training takes on the GPUs that train. `config` has megatron's settings for the planned device."""

    config: Config
    layout: Layout
    layers: str
    dtype: torch.dtype
    spans: Mapping[int, Spans]  # by rank
    work: Work
    microbatch_tokens: int  # on one rank, of the micro-batch that was measured
    sharing: Sharing
    stages: tuple[StageUse, ...]  # by number


@dataclass(frozen=True)
class HostUse:
    """Bytes. Memory is that of the node that needs most, without what the programs themselves need."""

    checkpoint: int  # of one step on disk
    copies: int  # the ranks' copies of what they write, while a checkpoint is saved in the background
    offloaded: int  # what update.offload keeps on the host

    @classmethod
    def of(cls, use: TrainingUse, shape: ModelShape, per_node: int) -> HostUse:
        """Return the use of a run. per_node: GPUs of a node.

        A rank copies its share of the optimizer's states, and the first of the ranks with the same weights
        copies these. Stages count as equal, small tensors that all tensor-parallel ranks hold as divided, and
        the padding of adapters not at all.
        """
        config, layout, lora = use.config, use.layout, use.config.model.lora
        shapes = adapter_shapes(shape, lora.rank, lora.names) if lora.rank else hf_shapes(shape)
        share = min(1.0, per_node / layout.world)  # of a node, of all ranks
        # Ranks of a pipeline stage that copy weights; of experts, which are most of a model that has them.
        copying = layout.tensor * layout.expert
        stages = max(1, per_node // (layout.tensor * layout.context * layout.data))  # of a node
        first = min(1.0, min(per_node, copying * stages) / (copying * layout.pipeline))  # of a node, of these
        checkpoint, copies = 0, 0.0
        for role in ("actor", "critic")[: 1 + config.needs_critic]:
            keys = shapes.keys() - ({HEAD} if role == "critic" else set())
            elements = sum(math.prod(shapes[key]) for key in keys)
            shares = config.update.optimizer(role).distributed
            # Adam's moments, and float32 weights where the model has another type. In float32 the
            # distributed optimizer writes the weights as its own once more.
            states = elements * (8 if use.dtype == torch.float32 and not shares else 12)
            weights = elements * use.dtype.itemsize
            checkpoint += states + weights
            copies += states * (share if shares else first) + weights * first
        away = max(stage.offloaded(config.update.offload) for stage in use.stages)
        kept = round(copies) if config.run.async_checkpoints else 0
        return cls(checkpoint, kept, away * min(per_node, layout.world))


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
        fullest = max(use.stages, key=lambda stage: stage.totals(engine, staging, offload)[phase])
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


def replica_limit(config: Config, engine: EngineUse, gpu: Gpu) -> Iterator[str]:
    """Yield the lines of serving_limit, and one if communicators do not fit beside the engine's share."""
    yield from serving_limit(config, engine, gpu)
    share, most = config.rollout.gpu_memory_utilization, (gpu.usable - engine.communicators) / gpu.memory
    if share > most:
        yield (
            f"rollout.gpu_memory_utilization={share} of a replica: {_gib(engine.communicators)} of "
            f"communicators do not fit beside it; choose at most {math.floor(100 * most) / 100} (here "
            "--assume replica_memory)"
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
