"""Functions that run on a rank: a whole update of a small model, and what it changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.training.update.layouts import SETTINGS, batch, estimated, learner_of


def build(
    model: str,
    folder: str,
    parallel: dict[str, int] | None = None,
    algorithm: dict[str, Any] | None = None,
    **update: Any,
) -> Any:
    """Return a learner with two minibatches per iteration."""
    return learner_of(
        model,
        run={"root": folder},
        parallel=parallel or {},
        update={"minibatches": 2, "actor": SETTINGS, "critic": SETTINGS, **update},
        algorithm={"preset": "st_ppo", "kl_coefficient": 0, **(algorithm or {})},
    )


def several(model: str, folder: str, steps: int) -> tuple[dict[str, Any], int, dict[str, bool]]:
    """Make an update whose actor is held, with several steps of the critic per minibatch.

    Return its row, the critic's number of steps, and whether each model's weights changed.
    """
    learner = build(model, folder, critic_steps=steps, critic_only=1)
    import torch

    from megatron_stppo.training.stages import update

    def weights() -> dict[str, list[Any]]:
        models = {"actor": learner.actor, "critic": learner.critic}
        return {
            role: [p.detach().clone() for chunk in one.chunks for p in chunk.parameters()]
            for role, one in models.items()
        }

    before = weights()
    row, _, _ = update(learner, estimated(learner, 0), 0)
    changed = {
        role: any(not torch.equal(a, b) for a, b in zip(before[role], after, strict=True))
        for role, after in weights().items()
    }
    return row, learner.critic.updates, changed


def moved(model: str, folder: str, least: int, parallel: dict[str, int]) -> tuple[dict[str, Any], Any, Any]:
    """Make an update. Return its row, and the log-probs of the live tokens of the trajectories that
    actor/kl_after is of, float64, before and after it. least: stages.LEAST, a multiple of the ranks."""
    learner = build(model, folder, parallel)
    from dataclasses import replace

    import torch

    from megatron_stppo.data.division import chosen_tokens
    from megatron_stppo.training import stages
    from megatron_stppo.training.stages import update

    stages.LEAST = least
    given, old, mesh = batch(), estimated(learner, 0), learner.mesh
    parts = [minibatch.parts for minibatch in old.epochs[0]]
    own = [n for part in parts for n in part[mesh.data_rank]]
    held_N = torch.full_like(given.held_N, -1).index_copy(0, torch.tensor(own), given.held_N[own])
    row, _, _ = update(learner, replace(old, held_N=held_N), 0)
    new = estimated(learner, 0)
    sample = [n for part in parts[0] for n in part[: least // mesh.data_size]]
    in_T = given.live_T & chosen_tokens(given, sample)
    return row, old.old_logprob_T[in_T].double(), new.old_logprob_T[in_T].double()


def shared(model: str, folder: str, parallel: dict[str, Any]) -> tuple[float, float, float]:
    """Make an update on 8 trajectories with one of two prompts of 20 tokens, 5 with the first, and on
    1 to 8 action tokens that differ. Return its update/distinct_share, what a plan of it says, and distinct
    prefixes / tokens, counted over all steps and data-parallel ranks: a rank's part of a step is one
    micro-batch."""
    learner = build(model, folder, parallel)

    import torch

    from megatron_stppo.base.types import EstimatedBatch, Task, Trajectory, Turn
    from megatron_stppo.data.division import minibatches
    from megatron_stppo.data.packing import to_batch
    from megatron_stppo.plan.work import RecordedBatch, Sharing
    from megatron_stppo.training.stages import divided, score, update

    task, played = Task("t", (), ("a",), "train", 0), list[Trajectory]()
    for n in range(8):
        turn = Turn((200 + n,) * (n + 1), (-1.0,) * (n + 1), (), 0.0, ((0, n + 1),))
        played.append(Trajectory(task, tuple(range(20) if n < 5 else range(100, 120)), (turn,), "ok"))
    given = to_batch(played)
    ones_T = torch.ones(len(given.action_index_T))
    scored = score(learner, divided(learner, given, 0))
    row, _, _ = update(learner, EstimatedBatch.of(scored, advantage_T=ones_T, return_T=ones_T), 0)
    steps, distinct, tokens = minibatches(given.first_N, 2, 0, 0, 0), 0, 0
    planned = Sharing.of(learner.config, learner.packer, RecordedBatch(Path(folder), 8, given, steps))
    for chosen in steps:
        for part in learner.packer.divide(given, chosen).parts:
            ids = [played[n].token_ids for n in part]
            distinct += len({one[:end] for one in ids for end in range(1, len(one) + 1)})
            tokens += sum(map(len, ids))
    assert tokens == 8 * 20 + 36
    return row["update/distinct_share"], planned.distinct, distinct / tokens


def frozen(model: str, folder: str) -> tuple[dict[str, bool], bool]:
    """Make an update whose critic has a frozen attention, save it, and load it into another learner.

    Return which of the critic's weights changed, and whether both learners' critics are equal after another
    update.
    """
    learner = build(model, folder, critic={**SETTINGS, "frozen_attention": True})
    import torch

    from megatron_stppo.checkpoint import saving
    from megatron_stppo.model.learner import build_learner
    from megatron_stppo.training.stages import update

    def weights(learner: Any) -> dict[str, Any]:
        chunk = learner.critic.chunks[0]
        return {name: p.detach().clone() for name, p in chunk.named_parameters()}

    def save_or_load(learner: Any) -> Any:
        return saving.Saver(Path(folder) / "checkpoints", learner.config, learner.mesh.layout)

    before = weights(learner)
    for iteration in range(2):  # the value head is 0 in the first step, so that its trunk has no gradient
        update(learner, estimated(learner, iteration), iteration)
    after = weights(learner)
    saver = save_or_load(learner)
    saver.save(2, learner.trainers, {"iteration": 2})
    saver.finish()
    again = build_learner(learner.config, learner.shape, learner.mesh, torch.float32)
    save_or_load(again).load(again.trainers)
    for one in (learner, again):
        update(one, estimated(one, 2), 2)
    changed = {name: not torch.equal(before[name], after[name]) for name in before}
    one, other = weights(learner), weights(again)
    return changed, all(torch.equal(one[name], other[name]) for name in one)


def frozen_on(model: str, folder: str, parallel: dict[str, int]) -> None:
    """Make two updates whose critic has a frozen attention, and write the critic to `folder`/critic."""
    learner = build(model, folder, parallel, critic={**SETTINGS, "frozen_attention": True})
    from megatron_stppo.checkpoint.convert import export_hf
    from megatron_stppo.model.build import named_parameters
    from megatron_stppo.training.stages import update
    from megatron_stppo.weights.sharding.spans import training_layouts

    for iteration in range(2):  # the value head is 0 in the first step, so that its trunk has no gradient
        update(learner, estimated(learner, iteration), iteration)
    weights = named_parameters(learner.critic.chunks)
    layouts = training_layouts(learner.shape, learner.mesh.layout, head="value")
    export_hf(Path(folder) / "critic", weights, layouts, learner.shape, Path(model), head="value")


def begun(model: str, critic: str, folder: str) -> tuple[dict[str, Any], list[str]]:
    """Build a learner whose critic begins with the folder `critic`, and save it.

    Return the critic's weights, and the errors of the same learner and of one whose critic begins with
    `model`, when they continue from the checkpoint.
    """
    first, errors = learner_of(model, model={"critic_path": critic}, run={"root": folder}), []
    from megatron_stppo.config import ConfigError
    from megatron_stppo.model.build import named_parameters

    for path in (critic, None):
        try:
            other = learner_of(model, model={"critic_path": path}, run={"root": folder})
            other.check_beginning(first.beginning)
            errors.append("")
        except ConfigError as error:
            errors.append(str(error))
    return {name: p.detach().numpy() for name, p in named_parameters(first.critic.chunks).items()}, errors


def one_update_each(model: str, folder: str, algorithms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make an update with each algorithm. Return their rows."""
    rows = []
    for algorithm in algorithms:
        learner = build(model, folder, algorithm=algorithm)
        from megatron_stppo.training.stages import update
        from megatron_stppo.training.update.own import Own

        row, _, _ = update(learner, estimated(learner, 0), 0, own=Own.of(learner.config).loss)
        rows.append(row)
    return rows
