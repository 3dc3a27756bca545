"""One step of training on a stand-in for a GPU, in a process of its own: see tests/test_host_waits.py."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

from megatron_stppo.cluster.launch import process

LENGTH = 96  # tokens of a trajectory
IN_MICROBATCH = 2  # trajectories
SHAPES = "megatron: pipeline_parallel/p2p_communication.py P2PCommunicator._communicate_shapes"


def start() -> None:
    """Make this process one of a machine with a stand-in for a GPU."""
    process.prepare(engine=False, device="cuda")
    from tests import stand_in_gpu

    stand_in_gpu.install()


def step(
    folder: str, parallel: dict[str, Any], rank: int, trajectories: int
) -> tuple[dict[str, Counter[tuple[str, str]]], dict[str, int]]:
    """Return {stage: how often the host waits in each place} and {stage: launches} of a step on one of two
    ranks.

    The actor, the critic and the reference are those of an untrained model.
    """
    import torch

    from megatron_stppo.config import Config
    from megatron_stppo.data import division
    from megatron_stppo.data.packing import to_batch
    from megatron_stppo.data.validity import columns
    from megatron_stppo.plan.meter import route_evenly
    from megatron_stppo.plan.work import standing_at, trajectory
    from megatron_stppo.training import stages
    from megatron_stppo.training.advantage import estimate
    from megatron_stppo.training.stages import divided, score, update
    from megatron_stppo.weights.sharding.hf_names import read_shape
    from tests.stand_in_gpu import StandInGpu

    config = Config.model_validate(
        {
            "model": {"path": folder, "dtype": "bfloat16", "head_dtype": "float32", "layers": "local"},
            "parallel": parallel,
            "environment": {"max_turns": 2, "max_observation_tokens": 16},
            "rollout": {
                "tasks_per_iteration": trajectories,
                "max_turn_tokens": 24,
                "max_prompt_tokens": 32,
                "max_context": LENGTH,
            },
            "update": {"minibatches": 1, "tokens_per_microbatch": IN_MICROBATCH * LENGTH, "logit_rows": 40},
            "algorithm": {"preset": "st_ppo"},
            "megatron": {"use_cpu_initialization": False, "perform_initialization": False},
        }
    )
    stages.LEAST = IN_MICROBATCH  # one whole microbatch for actor/kl_after, however many trajectories
    shape, found, launches = read_shape(config.model.path), {}, {}
    one = trajectory(config, LENGTH)
    played = [replace(one, prompt_ids=(n, *one.prompt_ids[1:])) for n in range(trajectories)]
    # a pipeline stage asks the one before or after it for the shape of what it sends
    read = {SHAPES: torch.tensor([IN_MICROBATCH * LENGTH, 1, shape.hidden])}
    with standing_at(rank, 2, config) as mesh, StandInGpu(read) as gpu, ExitStack() as stack:

        def stage(name: str, call: Any) -> Any:
            gpu.waits.clear()
            before = gpu.launches
            out = call()
            found[name], launches[name] = Counter(gpu.waits), gpu.launches - before
            return out

        learner = _learner(config, shape, mesh)
        for chunks in (learner.policy, learner.critic.chunks, learner.reference):
            route_evenly(chunks)
        _check_models(learner)
        batch = to_batch(played)
        _check_microbatches(learner, batch)
        group_N = torch.arange(trajectories)
        packs = stack.enter_context(mock.patch.object(division, "pack", wraps=division.pack))
        batch = stage("score", lambda: score(learner, divided(learner, batch, 0)))
        assert packs.call_count == 1  # for the three models, and for the update
        batch = stage("advantage", lambda: estimate(batch, config.algorithm, group_N))
        assert not any(column.is_cuda for column in columns(batch).values())
        stage("update", lambda: update(learner, batch, 0))
        assert packs.call_count == 2 and not learner.packer.kept  # again for actor/kl_after
        _check_models(learner)
        reshard = _reshard(learner)
        reshard.sync(0)
        stage("reshard", lambda: reshard.sync(1))
    return found, launches


def every_way_to_wait() -> list[str]:
    """Return what StandInGpu counts for some operations, most of which make the host wait."""
    import torch

    from tests.stand_in_gpu import StandInGpu

    with StandInGpu() as gpu:
        x, host = torch.ones(4, device="cuda"), torch.ones(4)
        assert x.is_cuda and str((x + 1)[1:].device) == "cuda:0"
        bool((x > 0).all()), x.tolist(), x[x > 0], x.nonzero(), torch.masked_select(x, x > 0)
        x.copy_(host), host.to("cuda"), host.to("cuda", non_blocking=True), x[torch.arange(4)]
        torch.cuda.synchronize()
        # these do not wait
        x[x > 0] = 0
        host.pin_memory().to("cuda", non_blocking=True)
        x.to("cpu", non_blocking=True)
        try:
            x + host
        except AssertionError:
            gpu.waits["refused", ""] += 1
        return sorted(what for what, _ in gpu.waits.elements())


def _learner(config: Any, shape: Any, mesh: Any) -> Any:
    import torch

    from megatron_stppo.model import build
    from megatron_stppo.model.learner import Learner
    from megatron_stppo.model.offload import Offloader
    from megatron_stppo.model.optimizer import Trainer
    from megatron_stppo.model.pipeline import packer_of

    def trainer(role: Any, settings: Any) -> Trainer:
        chunks = build.build(role, shape, config, mesh, torch.bfloat16)
        return Trainer(build.data_parallel(chunks, settings.distributed), settings, 1)

    actor = trainer("actor", config.update.actor)
    critic = trainer("critic", config.update.critic)
    trainers = {"actor": actor, "critic": critic}
    packer = packer_of(config, shape, mesh)
    reference = build.build("reference", shape, config, mesh, torch.bfloat16)
    offloader = Offloader(trainers, reference, "none")
    return Learner(config, mesh, shape, actor.chunks, actor, critic, reference, packer, offloader)


def _check_microbatches(learner: Any, batch: Any) -> None:
    on_gpu = {"tokens_P", "position_P", "sequence_offsets", "hidden_index_T", "target_T"}
    for microbatch in learner.packer.pack(batch, learner.packer.whole(batch)):
        given = vars(microbatch).items()
        assert {name for name, x in given if getattr(x, "is_cuda", False)} == on_gpu


def _check_models(learner: Any) -> None:
    for trainer in learner.trainers.values():
        for chunk in trainer.chunks:
            assert all(x.is_cuda for x in (*chunk.parameters(), *chunk.buffers()))
        assert all(x.is_cuda for x in (*trainer.states(), *trainer.gradient_buffers()))


def _reshard(learner: Any) -> Any:
    import torch

    from megatron_stppo.model import build
    from megatron_stppo.weights.reshard.resharder import Resharder
    from megatron_stppo.weights.sharding.spans import row_widths, serving_layouts, training_layouts
    from tests.weights.reshard.pieces import local_shape

    mesh, shape = learner.mesh, learner.shape
    widths, serving = row_widths(shape), serving_layouts(shape, mesh.world, 1)
    engine = {
        name: torch.empty(local_shape(spans, widths), dtype=torch.bfloat16, device="cuda")
        for name, spans in serving[mesh.rank].items()
    }
    layouts = training_layouts(shape, mesh.layout, spec="local")
    return Resharder(build.named_parameters(learner.policy), engine, layouts, serving, widths)
