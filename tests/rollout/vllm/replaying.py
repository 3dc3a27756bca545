"""A function that runs on a rank: episodes of a mixture of experts, whose experts the trainer replays."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_stppo.cluster.launch import process
from tests.ranks import leave_group
from tests.rollout.vllm.tiny import CONTEXT, Game, task

SAMPLES = 4  # of each task, which share its prompt


def observe(
    folder: Path, parallel: dict[str, int], engine_tensor: int, cache: float, asynchronous: bool = False
) -> dict[str, Any]:
    """Return what the engine chose, and what the trainer used.

    cache: GiB of key-value cache. asynchronous: vLLM begins a step before it returns the tokens of the step
    before, as on a GPU.
    """
    leave_group()
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[3])  # where environment.kind is looked for
    process.prepare()
    import torch

    from megatron_stppo.config import Config
    from megatron_stppo.rollout.episodes.collect import RolloutSettings
    from megatron_stppo.rollout.episodes.episode import Limits
    from megatron_stppo.training.advantage import estimate
    from megatron_stppo.training.colocated import assemble
    from megatron_stppo.training.stages import distribute, score, update
    from tests.rollout.vllm.test_async_steps import schedule_asynchronously
    from tests.training.update.experts import expected, routed, uses

    torch.set_num_threads(1)
    config = Config.model_validate(
        {
            "model": {"path": folder},
            "parallel": parallel,
            "environment": {"kind": "tests.rollout.vllm.replaying:factory"},
            "rollout": {
                "max_context": CONTEXT,
                "engine_tensor": engine_tensor,
                "kv_cache_gib": cache,
                "samples_per_task": SAMPLES,
                "overlap_tools": False,
            },
            "update": {"minibatches": 1, "tokens_per_microbatch": 400, "old_logprob": "score"},
            "algorithm": {"routing_replay": "rollout", "preset": "grpo", "kl_coefficient": 0},
        }
    )
    if asynchronous:
        schedule_asynchronously()
    worker = assemble(config)
    worker.publish(1)
    seen = counting(worker.engine._core.engine_core.scheduler)
    limits = Limits(max_prompt_tokens=60, max_turn_tokens=40, max_observation_tokens=30, max_context=CONTEXT)
    settings = RolloutSettings(limits, deadline=30.0, overlap_tools=False)
    played = worker.play([task(n) for n in range(2)], SAMPLES, settings, seed=5)
    worker.load_for("score")
    learner = worker.learner
    assert learner.actor is not None
    batch = distribute(learner, played, 0)
    old_T = score(learner, batch).old_logprob_T
    assert old_T is not None
    for chunk in learner.actor.chunks:  # the routers alone would choose other experts
        for name, parameter in chunk.named_parameters():
            if name.endswith("router.weight"):
                parameter.data.neg_()
    with routed(learner.actor.chunks) as used:
        scored = score(learner, batch)
        after_score = len(used)
        update(learner, estimate(scored, config.algorithm, torch.arange(len(batch.live_N)) // SAMPLES), 0)
    ((minibatch,),) = batch.epochs
    maps = expected(learner.packer.pack(batch, minibatch), learner.shape.experts, learner.mesh, parallel)
    return seen | {
        "scheduler": type(worker.engine._core.engine_core.scheduler).__name__,
        "second runner": second_runner(),
        "own": played.own,
        "old": old_T.tolist(),
        "mismatch": float((old_T - batch.rollout_logprob_T).abs().mean()),
        "scoring": uses(used[:after_score], maps),
        "updating": uses(used[after_score:], maps),
    }


def second_runner() -> tuple[list[int], str]:
    """Return the stored experts and a refusal, with the parts of vLLM's second model runner that are read.

    That runner needs a GPU. Two tokens have slots 5 and 2, followed by two dummy tokens, as in a CUDA graph.
    """
    import torch
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    from megatron_stppo.rollout.vllm.engine_routes import EngineRoutes
    from megatron_stppo.rollout.vllm.generation import RolloutError

    class Router(BaseRouter):
        def __init__(self) -> None:
            super().__init__(top_k=1, global_num_experts=8)

        def _compute_routing(self, hidden: Any, logits: Any, *rest: Any, **more: Any) -> Any:
            return hidden, logits

        @property
        def routing_method_type(self) -> Any:
            raise NotImplementedError

    class Layer(MoERunner):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.router = Router()

    spec = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=4))
    routes = EngineRoutes(
        SimpleNamespace(
            model_runner=SimpleNamespace(
                kv_cache_config=SimpleNamespace(num_blocks=2, kv_cache_groups=[spec]),
                block_tables=SimpleNamespace(slot_mappings=torch.tensor([[5, 2, -1, -1]])),
            ),
            model_config=SimpleNamespace(get_num_experts=lambda: 8, get_num_experts_per_tok=lambda: 1),
            get_model=lambda: torch.nn.ModuleList([Layer()]),
            device="cpu",
        )
    )
    routes.routers[0].select_experts(torch.zeros(4, 1), torch.tensor([[3], [4], [6], [7]]))
    routes._manager = SimpleNamespace(get_block_ids=lambda request_id: ([0],))
    try:
        routes.read("7/1", 3)
    except RolloutError as error:
        return routes._of_slot[:-1, 0, 0].tolist(), str(error)
    return [], "not refused"


def factory(config: Any) -> type[Game]:
    return Game


def counting(scheduler: Any) -> dict[str, int]:
    """Return a record that counts tokens found in the prefix cache and preempted requests from now on."""
    counts = {"cached": 0, "preempted": 0}
    manager = scheduler.kv_cache_manager
    find, preempt = manager.get_computed_blocks, scheduler._preempt_request

    def finding(*args: Any, **options: Any) -> Any:
        found = find(*args, **options)
        counts["cached"] += found[1]
        return found

    def preempting(*args: Any, **options: Any) -> Any:
        counts["preempted"] += 1
        return preempt(*args, **options)

    manager.get_computed_blocks, scheduler._preempt_request = finding, preempting
    return counts
