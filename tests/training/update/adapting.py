"""Functions that run on a rank: one step of an actor and a critic with adapters, on one frozen trunk."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_stppo.cluster.launch import process
from tests.training.update import layouts

RANK, ALPHA = 4, 6.0


def steps(
    model: str,
    parallel: dict[str, Any],
    distributed: bool,
    algorithm: dict,
    out: str,
    targets: str | list[str] = "all-linear",
    recompute: str = "none",
    path: str | None = None,
    fused: bool = False,
) -> dict[str, Any]:
    """Return the numbers of a step of the actor and of the critic, with adapters whose B is not zero.

    path: the folder of the adapters with which all models begin; None: random B for actor and critic. In both
    cases the actor's are exported and imported again, which must not change a bit of its log-probs.
    `out` gets the adapters by their checkpoint names, actor.safetensors and critic.safetensors, and their
    gradients (grad_actor.safetensors), if these are not sharded.
    """
    process.prepare(engine=False)
    import torch

    from megatron_stppo.checkpoint.convert import export_peft
    from megatron_stppo.config import Config, LoraConfig
    from megatron_stppo.evidence.bench.trial import set_b
    from megatron_stppo.model import build
    from megatron_stppo.model.learner import build_learner
    from megatron_stppo.model.optimizer import trained
    from megatron_stppo.model.pipeline import logprobs
    from megatron_stppo.parallel import groups
    from megatron_stppo.training.update.actor_step import ActorLoss, actor_step, minibatch_weights
    from megatron_stppo.training.update.critic_step import critic_step
    from megatron_stppo.weights.sharding.hf_names import read_shape

    torch.set_num_threads(1)
    lora = {"rank": RANK, "alpha": ALPHA, "targets": targets, "path": path}
    config = Config.model_validate(
        {
            "model": {"path": model, "recompute": recompute, "lora": lora},
            "parallel": parallel,
            "update": {role: layouts.SETTINGS | {"distributed": distributed} for role in ("actor", "critic")},
            "algorithm": algorithm,
            "megatron": {"gradient_accumulation_fusion": fused},
        }
    )
    mesh = groups.initialize(config.parallel)
    shape, a = read_shape(Path(model)), config.algorithm
    learner = build_learner(config, shape, mesh, torch.float32)
    actor, critic, reference = learner.actor, learner.critic, learner.reference
    assert actor is not None and critic is not None and reference is not None
    models = {"actor": actor.chunks, "critic": critic.chunks}
    for sharing in (critic.chunks, reference):  # a GPU would compute others than a CPU
        for chunk, trunk in zip(sharing, actor.chunks, strict=True):
            assert chunk.rotary_pos_emb.inv_freq is trunk.rotary_pos_emb.inv_freq
    if path is not None:
        _check_digest_without_folder(Path(path), [actor.chunks, critic.chunks, reference])
    bytes_of = {"actor": _bytes(actor.chunks), "all": _bytes(actor.chunks, critic.chunks, reference)}
    own = {id(x): x.nbytes for name, x in build.named_parameters(reference).items() if ".adapter." in name}
    bytes_of["reference, own"] = sum(own.values())
    bytes_of["critic, trained"] = sum(x.nbytes for chunk in critic.chunks for x in trained(chunk))
    packer = replace(learner.packer, spec=replace(learner.packer.spec, budget=24))
    batch = layouts.batch()
    every = packer.whole(batch)
    everything = (batch, packer, [every])
    fresh_T, reference_T = (logprobs(m, learner.head(m), *everything) for m in (actor.chunks, reference))
    without = config.model.model_copy(update={"lora": LoraConfig()})
    plain = config.model_copy(update={"model": without})
    other = build.from_hf("reference", shape, plain, mesh, torch.float32)
    plain_T = logprobs(other, learner.head(other), *everything)
    assert torch.equal(reference_T, plain_T) == (path is None), "adapters are off unless they are imported"
    for role, model in models.items() if path is None else ():
        set_b(model, role, shape, config, mesh)
    if mesh.is_last_stage:
        critic.chunks[-1].output_layer.weight.data.copy_(layouts.value_head(shape.hidden))
    for role, model in models.items():
        write(Path(out) / f"{role}.safetensors", build.named_parameters(model), shape, config, mesh)
    head = learner.head(actor.model)
    own_T = logprobs(actor.model, head, *everything)
    export_peft(Path(out) / "peft", build.named_parameters(actor.chunks), shape, config, mesh)
    of_path = config.model.lora.model_copy(update={"path": Path(out) / "peft"})
    again = config.model_copy(update={"model": config.model.model_copy(update={"lora": of_path})})
    for role in ("actor", "reference"):
        imported = build.from_hf(role, shape, again, mesh, torch.float32, actor.chunks)
        assert torch.equal(logprobs(imported, learner.head(imported), *everything), own_T), role
    given = replace(batch, old_logprob_T=own_T + batch.old_logprob_T)
    loss = ActorLoss(given, minibatch_weights(given, every.chosen, a), a, head)
    step = actor_step(actor, loss, every, packer)
    assert torch.equal(step.ratios.logprob_T, own_T)  # bitwise: the loss uses the scored policy
    assert torch.equal(reference_T, logprobs(reference, learner.head(reference), *everything)), "it is frozen"
    numbers = step.metrics | critic_step(critic, given, every, a.value_clip, packer)
    if not distributed:
        for role, model in models.items():
            gradients = {n: p.main_grad for n, p in build.named_parameters(model).items() if p.requires_grad}
            write(Path(out) / f"grad_{role}.safetensors", gradients, shape, config, mesh)
    return {
        "numbers": numbers,
        "own": own_T.tolist(),
        "fresh": float((fresh_T - reference_T).abs().max()),
        "bytes": bytes_of,
    }


def _check_digest_without_folder(folder: Path, models: list[Any]) -> None:
    """Check that a checkpoint can be saved without the folder of the initial adapters. Collective."""
    import torch.distributed as dist

    from megatron_stppo.checkpoint.loading import adaptation_of

    expected = hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()
    dist.barrier()
    if dist.get_rank() == 0:
        folder.rename(folder.with_name("moved"))
    dist.barrier()
    assert [adaptation_of(model)["initial"] for model in models] == [expected] * 3


def _bytes(*models: Any) -> int:
    """Return the bytes of all distinct tensors of the models' parameters."""
    found = {p.data_ptr(): p.nbytes for model in models for chunk in model for p in chunk.parameters()}
    return sum(found.values())


def write(path: Path, parameters: Any, shape: Any, config: Any, mesh: Any) -> None:
    """Write the adapters of all ranks by their checkpoint names. Collective."""
    from safetensors.torch import save_file

    from megatron_stppo.checkpoint.convert import gather
    from megatron_stppo.model import build
    from megatron_stppo.weights.sharding.low_rank import adapter_shapes

    layouts = {rank: build.adapters_of_rank(shape, config, mesh.layout, rank) for rank in range(mesh.world)}
    shapes = adapter_shapes(shape, config.model.lora.rank, config.model.lora.names)
    whole = gather(parameters, layouts, shape, shapes, shapes)
    if mesh.rank == 0:
        save_file(whole, path)
