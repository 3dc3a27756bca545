"""The same small run, measured on gloo ranks and planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_stppo.cluster.launch import process

EXACT = ("weights", "gradients", "optimizer")  # fields of ModelUse
LENGTH = 128  # tokens of every trajectory
SHAPE = {
    "vocab_size": 2001,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 96, "head_dim": 64}


def settings(
    folder: str, model: dict[str, Any], parallel: dict[str, Any], algorithm: dict[str, Any] | None = None
) -> Any:
    """Return a configuration with 2 microbatches of 4 trajectories per step, changed by other sections."""
    from megatron_stppo.config import Config

    return Config.model_validate(
        {
            "model": {"path": folder, "dtype": "float32"} | model,
            "parallel": parallel,
            "algorithm": algorithm or {},
            "environment": {"max_turns": 2, "max_observation_tokens": 32},
            "rollout": {
                "tasks_per_iteration": 8,
                "max_turn_tokens": 32,
                "max_prompt_tokens": 32,
                "max_context": LENGTH,
            },
            "update": {"minibatches": 1, "tokens_per_microbatch": 4 * LENGTH, "logit_rows": 100},
        }
    )


def measured(cases: list[Any]) -> list[dict[str, int]]:
    """Run on a rank. Return per case the bytes of its models, and the largest increase in each call."""
    process.prepare(engine=False)
    import gc

    from megatron.core import parallel_state

    from tests.ops.memory import Peak

    found = []
    for case in cases:
        with Peak() as memory:
            found.append(run(settings(*case), _Bytes(memory).added))
        gc.collect()
        parallel_state.destroy_model_parallel()
    return found


def planned(cases: list[Any], gpus: int) -> list[list[dict[str, int]]]:
    """Return the same numbers for every rank, from plans. Runs in the planner of conftest.py."""
    from dataclasses import replace

    from megatron_stppo.plan.assumptions import H100
    from megatron_stppo.plan.dry_run import plan

    host = replace(H100, name="CPU", is_cuda=False)
    found = []
    for case in cases:
        made = plan(settings(*case), gpus, host)
        ranks = []
        for rank in range(gpus):
            stage = made.use.stages[made.use.layout.coordinates(rank).pipeline]
            actor, critic = stage.models["actor"], stage.models["critic"]
            parts = {
                f"{role} {part}": getattr(use, part)
                for role, use in (("actor", actor), ("critic", critic))
                for part in EXACT
            }
            ranks.append(
                parts
                | {
                    "trunk": stage.trunk,
                    "reference weights": stage.models["reference"].weights,
                    "actor": stage.trunk + resident(actor),
                    "critic": resident(critic),
                    "reference": resident(stage.models["reference"]),
                    "score": actor.scoring,
                    "actor step": stage.updating("actor"),
                    "critic step": stage.updating("critic"),
                    "checkpoint": made.host.checkpoint,
                    "copied": made.host.copies,
                }
            )
        found.append(ranks)
    return found


def resident(use: Any) -> int:
    return int(use.weights + use.buffers + use.gradients + use.optimizer)


class _Bytes:
    """Records what a call adds to the bytes of live tensors: what is left of a model, else the most."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def added(self, name: str, call: Any) -> tuple[Any, int]:
        before = self._memory.peak = self._memory.alive
        out = call()
        held = self._memory.alive - before
        return out, held if name in ("actor", "critic", "reference") else self._memory.peak - before


def run(config: Any, measure: Any) -> dict[str, Any]:
    """Build the models on this rank, score, and take a step of actor and critic.

    Return {part: bytes of weights, gradients and states}, and {name: number} of the calls. `measure` gets the
    name and the call, and returns (what the call returned, its number).
    """
    from dataclasses import replace

    from megatron_stppo.checkpoint.contents import saved_tensors
    from megatron_stppo.checkpoint.writer import HostCopy
    from megatron_stppo.data.packing import to_batch
    from megatron_stppo.model import build
    from megatron_stppo.model.pipeline import logprobs, packer_of
    from megatron_stppo.model.policy_head import PolicyHead
    from megatron_stppo.model.token_model import frozen
    from megatron_stppo.parallel import groups
    from megatron_stppo.plan.work import trajectory
    from megatron_stppo.training.update.actor_step import ActorLoss, actor_step, minibatch_weights
    from megatron_stppo.training.update.critic_step import critic_step
    from megatron_stppo.weights.sharding.hf_names import read_shape

    mesh, dtype = groups.initialize(config.parallel), process.dtype(config)
    shape, a = read_shape(config.model.path), config.algorithm
    one = trajectory(config, LENGTH)  # separate prompts, as the plan assumes: a shared one needs less
    played = [replace(one, prompt_ids=(n, *one.prompt_ids[1:])) for n in range(8)]
    batch, packer = _scored(to_batch(played)), packer_of(config, shape, mesh)
    every = packer.whole(batch)
    weight_T = minibatch_weights(batch, every.chosen, a)
    found: dict[str, Any] = {}

    def added(name: str, call: Any) -> Any:
        out, found[name] = measure(name, call)
        return out

    actor = added("actor", lambda: build.trainer("actor", shape, config, mesh, dtype))
    trunk = actor.chunks if config.model.lora.rank else None
    critic = added("critic", lambda: build.trainer("critic", shape, config, mesh, dtype, trunk))
    kept = added("reference", lambda: build.from_hf("reference", shape, config, mesh, dtype, trunk))
    assert len(kept) == mesh.layout.virtual
    shared = list(frozen(trunk or ()))
    found |= {"trunk": _storages(shared)}
    found |= {"reference weights": _storages(_parameters(kept), besides=shared)}
    for role, model in (("actor", actor), ("critic", critic)):
        weights = list(_parameters(model.chunks))
        found |= {
            f"{role} weights": _storages(weights, besides=shared),
            f"{role} gradients": _storages(model.gradient_buffers()),
            f"{role} optimizer": _storages(model.states(), besides=weights),
        }
    head = PolicyHead.of(actor.model, mesh, shape.vocab, 1.0, a.segments, config.update.logit_rows)
    logprobs(actor.model, head, batch, packer, [every])  # megatron's shared buffers stay
    added("score", lambda: logprobs(actor.model, head, batch, packer, [every]))
    loss = ActorLoss(batch, weight_T, a, head)
    added("actor step", lambda: actor_step(actor, loss, every, packer))
    added("critic step", lambda: critic_step(critic, batch, every, a.value_clip, packer))
    found["copied"] = sum(
        HostCopy(saved_tensors(one, is_loading=False), Path(), keep=False).bytes for one in (actor, critic)
    )
    return found


def _storages(tensors: Any, besides: Any = ()) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    without = {x.untyped_storage().data_ptr() for x in besides}
    return sum(size for pointer, size in found.items() if pointer not in without)


def _parameters(chunks: Any) -> Any:
    return (parameter for chunk in chunks for parameter in chunk.parameters())


def _scored(batch: Any) -> Any:
    import torch

    from megatron_stppo.base.types import UpdatedBatch

    def random_T() -> Any:
        return torch.randn(len(batch.action_index_T))

    return UpdatedBatch.of(
        batch,
        epochs=(),
        old_logprob_T=random_T() - 8,  # ln 2001 is 7.6
        advantage_T=random_T(),
        value_T=random_T(),
        return_T=random_T(),
        reference_logprob_T=random_T() - 8,
    )


def write_model(folder: Path, family: str = "Qwen2", **larger: int) -> None:
    """Write a Qwen2, or a Qwen3Moe in which every token uses all experts, so that they are evenly loaded.

    `larger` replaces fields of SHAPE.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    shape = getattr(transformers, f"{family}Config")(
        **SHAPE | larger, **(EXPERTS if family == "Qwen3Moe" else {})
    )
    getattr(transformers, f"{family}ForCausalLM")(shape).float().save_pretrained(folder)
