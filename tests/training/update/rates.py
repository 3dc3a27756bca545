"""Function that runs on a rank: updates whose steps depend on the steps before them, and their resumption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.training.update.layouts import SETTINGS, estimated, learner_of

STEPS = {"epochs": 2, "minibatches": 2, "tokens_per_microbatch": 40, "critic": SETTINGS}


def resumed(model: str, folder: str, algorithm: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the rows of four iterations and of the last one again after a resumption, and with each row the
    memory of the actor's steps.

    The steps of the second iteration are skipped because of a NaN in a gradient, those of the third are held.
    A checkpoint is saved after it. The deviation before whitening is 0.1 more than the iteration's number.
    Asserts that both ends have bitwise the same weights, and that advantages are whitened by the deviation of
    the iterations before the resumption.
    """
    sections = {
        "run": {"root": folder},
        "update": {"actor": SETTINGS | {"lr": 5e-3}} | STEPS,
        "algorithm": {"kl_coefficient": 0} | algorithm,
    }
    learner, rows, memories = learner_of(model, **sections), [], []
    import torch

    from megatron_stppo.checkpoint import saving
    from megatron_stppo.training.advantage import estimate
    from megatron_stppo.training.stages import advantages, update

    def iterate(learner: Any, iteration: int, hold: bool = False, spoiled: bool = False) -> None:
        weight = next(learner.actor.chunks[0].parameters())
        hook = weight.register_hook(lambda gradient: gradient * (float("nan") if spoiled else 1))
        given = replace(estimated(learner, iteration), deviation=0.1 + iteration)
        row, _, _ = update(learner, given, iteration, hold)
        hook.remove()
        rows.append(row)
        memories.append(learner.actor.memory)
        assert learner.usual_deviation == learner.actor.memory.deviation

    iterate(learner, 0)
    iterate(learner, 1, spoiled=True)
    iterate(learner, 2, hold=True)
    saver = saving.Saver(Path(folder) / "checkpoints", learner.config, learner.mesh.layout)
    saver.save(3, learner.trainers, {"iteration": 3})
    saver.finish()
    iterate(learner, 3)
    expected = [p.detach().clone() for chunk in learner.actor.chunks for p in chunk.parameters()]
    again = learner_of(model, **sections)
    saver.load(again.trainers)
    scored = estimated(again, 3)
    reward_T, group_N = torch.zeros_like(scored.reward_T), torch.zeros(len(scored.live_N))
    reward_T[0] = 1e-3  # with values of 0 the deviation is far below the usual 0.1
    scored = replace(scored, reward_T=reward_T, value_T=torch.zeros_like(reward_T))
    largest = advantages(again, scored, group_N).advantage_T.abs().max()
    alone = estimate(scored, learner.config.algorithm, group_N).advantage_T.abs().max()
    assert largest < 0.1 < alone, "a failure is not scaled up"
    iterate(again, 3)
    found = [p for chunk in again.actor.chunks for p in chunk.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    return rows, memories
