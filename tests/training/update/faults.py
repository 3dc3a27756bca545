"""Functions that run on a rank: steps with numbers that are not finite, and loads of damaged files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.training.update.layouts import SETTINGS, batch, learner_of


def build(model: str, tensor: int = 1) -> Any:
    return learner_of(
        model,
        parallel={"tensor": tensor},
        update={"actor": SETTINGS, "critic": SETTINGS, "minibatches": 1, "old_logprob": "score"},
        # the exact correction has a second backward pass, which no rank may start alone
        algorithm={"preset": "st_ppo", "correction": "gradient", "kl_coefficient": 0},
    )


def state_of(actor: Any) -> list[Any]:
    """Return copies of weights and Adam's state, and the count of steps that determines the learning rate."""
    import torch

    tensors = [torch.tensor(actor.updates)]
    tensors += [p.detach().clone() for chunk in actor.model for p in chunk.parameters()]
    for wrapped in actor.optimizer.chained_optimizers:
        tensors += [t.clone() for state in wrapped.optimizer.state.values() for t in state.values()]
    return tensors


def step_on_faults(model: str, layouts: tuple[int, ...]) -> list[dict[str, tuple[Any, ...]]]:
    """Return the result of `_step_on_faults` for every layout."""
    return [_step_on_faults(model, tensor) for tensor in layouts]


def _step_on_faults(model: str, tensor: int) -> dict[str, tuple[Any, ...]]:
    """Return {fault: (skipped, unchanged, steps skipped so far)}. Faults are planted on rank 1 only."""
    learner = build(model, tensor)
    import torch
    import torch.distributed as dist

    from megatron_stppo.base.types import EstimatedBatch
    from megatron_stppo.training.stages import divided, score, update
    from megatron_stppo.training.update.actor_step import ActorLoss, actor_step, minibatch_weights
    from megatron_stppo.training.update.critic_step import critic_step

    here, nan, a = dist.get_rank() == 1, float("nan"), learner.config.algorithm
    actor, critic, packer = learner.actor, learner.critic, learner.packer
    head = learner.head(actor.model)
    models, found, every = (actor, critic), {}, packer.whole(batch())

    def spoil(name: str, column: str | None, step: Any, owner: Any = None) -> None:
        """Run a step with a NaN, on this rank, in a column of the batch or in a gradient of the owner."""
        given = batch()
        given = replace(given, epochs=divided(learner, given, 0).epochs)
        if column and here:
            value_T = getattr(given, column)
            value_T[given.action_offsets[:-1]] = nan
        before = [state_of(model) for model in models]
        weight = next(owner.chunks[0].parameters()) if owner and here else None
        hook = weight.register_hook(lambda gradient: gradient * nan) if weight is not None else None
        row = step(given)
        if hook is not None:
            hook.remove()
        after = [state_of(model) for model in models]
        same = [all(map(torch.equal, *states)) for states in zip(before, after, strict=True)]
        assert len(set(same)) == 1, "an update changes both models, or none"
        untouched = same[0]
        skipped = {key: value for key, value in row.items() if key.endswith("skipped")}
        found[name] = (skipped, untouched, actor.skipped, critic.skipped)

    def step_actor(given: Any) -> Any:
        loss = ActorLoss(given, minibatch_weights(given, every.chosen, a), a, head)
        return actor_step(actor, loss, every, packer).metrics

    def step_critic(given: Any) -> Any:
        return critic_step(critic, given, every, a.value_clip, packer)

    def score_and_update(given: Any) -> Any:
        hook = actor.chunks[0].register_forward_hook(lambda *x: x[-1] * nan) if here else None
        scored = score(learner, given)
        if hook is not None:
            hook.remove()
        return update(learner, replace(given, old_logprob_T=scored.old_logprob_T), 0)[0]

    def update_alone(given: Any) -> Any:
        hook = actor.chunks[0].register_forward_hook(lambda *x: x[-1] * nan) if here else None
        row, last, filled = update(learner, EstimatedBatch.of(given, old_logprob_T=None), 0)
        if hook is not None:
            hook.remove()
        assert last is None and filled.old_logprob_T.isnan().any()
        return row

    def reward_alone(given: Any) -> Any:
        row, _, filled = update(learner, EstimatedBatch.of(given, old_logprob_T=None), 0)
        assert filled.old_logprob_T.isfinite().all()  # for the metrics of the mismatch and the dump
        return row

    spoil("actor's loss", "advantage_T", step_actor)
    spoil("actor's gradient", None, step_actor, actor)
    spoil("norm", None, lambda given: {"actor/skipped": float(not actor.step(nan if here else 1.0))})
    spoil("critic's loss", "return_T", step_critic)
    spoil("critic's gradient", None, step_critic, critic)
    spoil("log-prob", None, score_and_update)
    spoil("reward", "reward_T", lambda given: update(learner, given, 0)[0])
    spoil("log-prob of the update", None, update_alone)
    spoil("reward, without scores", "reward_T", reward_alone)
    spoil("none", None, lambda given: update(learner, given, 0)[0])
    spoil(
        "no live token",
        None,
        lambda given: update(learner, replace(given, live_N=given.live_N & False), 0)[0],
    )
    return found


def load_after_damage(model: str, folder: str) -> tuple[int, str]:
    """Return (step loaded after a byte of the newest checkpoint was flipped, error when both are damaged)."""
    learner = build(model)
    from megatron_stppo.checkpoint import saving

    actor, saver = learner.actor, saving.Saver(Path(folder), learner.config, learner.mesh.layout)
    for step in (1, 2):
        saver.save(step, {"actor": actor}, {"iteration": step})
    saver.finish()
    flip(Path(folder) / "step_2")
    state = saver.load({"actor": actor})
    assert state is not None
    flip(Path(folder) / "step_1")
    try:
        saver.load({"actor": actor})
    except saving.CheckpointError as error:
        return state["iteration"], str(error)
    return state["iteration"], ""


def flip(step: Path) -> None:
    path = next(step.glob("actor/*.distcp"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
