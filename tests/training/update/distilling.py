"""Functions that run on a rank: a student that learns from a teacher, without an engine."""

from __future__ import annotations

from typing import Any

from tests.training.update.layouts import SETTINGS, batch, learner_of

VOCABULARY, TOKENS, EPISODES = 301, 6, 32


def build(
    model: str, teacher: str | None, folder: str, parallel: dict[str, Any] | None = None, rank: int = 0
) -> Any:
    """Return a learner with the preset `distil`. rank: that of adapters; 0 without."""
    return learner_of(
        model,
        run={"root": folder, "iterations": 100},
        model={"reference_path": teacher, "lora": {"rank": rank}},
        parallel=parallel or {},
        update={"minibatches": 1, "actor": SETTINGS},
        algorithm={"preset": "distil"},
    )


def scored(model: str, teacher: str, folder: str, parallel: dict[str, Any], rank: int) -> Any:
    """Return the reference's log-probs of layouts.batch."""
    learner = build(model, teacher, folder, parallel, rank)
    from megatron_stppo.training.stages import divided, score

    found = score(learner, divided(learner, batch(), 0))
    return found.reference_logprob_T.tolist()


def learned(model: str, teacher: str, folder: str, iterations: int) -> list[tuple[dict[str, float], float]]:
    """Return per iteration its row, and the largest size of an advantage. All rewards are 1."""
    learner = build(model, teacher, folder)
    import torch

    from megatron_stppo.observe.describe import describe_batch
    from megatron_stppo.training.advantage import estimate, has_signal
    from megatron_stppo.training.stages import divided, score, update

    torch.manual_seed(0)
    found, group_N = [], torch.zeros(EPISODES, dtype=torch.int64)
    for iteration in range(iterations):
        given = score(learner, divided(learner, played(learner), iteration))
        given = estimate(given, learner.config.algorithm, group_N)
        hold = not has_signal(given, learner.config.algorithm, group_N)
        row, _, given = update(learner, given, iteration, hold)
        found.append((row | describe_batch(given), float(given.advantage_T.abs().max())))
    return found


def played(learner: Any) -> Any:
    """Return episodes of one turn whose tokens the student has sampled."""
    import torch

    from megatron_stppo.model.pipeline import forward_only

    weight, packer = learner.head(learner.policy).weight, learner.packer

    def next_token(hidden: Any, microbatch: Any) -> Any:
        probability = (hidden @ weight[:VOCABULARY].T).softmax(-1)
        return torch.multinomial(probability, 1)[:, 0].float()

    written: list[tuple[int, ...]] = [()] * EPISODES
    for _ in range(TOKENS):
        asked = episodes([(*own, 0) for own in written])  # the 0 is the token that is asked for
        token_T = forward_only(learner.actor.model, asked, packer, [packer.whole(asked)], next_token)
        last = token_T[asked.action_offsets[1:] - 1].tolist()
        written = [(*own, int(token)) for own, token in zip(written, last, strict=True)]
    return episodes(written)


def episodes(written: list[tuple[int, ...]]) -> Any:
    from megatron_stppo.base.types import Task, Trajectory, Turn
    from megatron_stppo.data.packing import to_batch

    task = Task("t", (), ("a",), "train", 0)
    return to_batch(
        [
            Trajectory(task, (7, 11, n), (Turn(own, (0.0,) * len(own), (), 1.0, ((0, len(own)),)),), "ok")
            for n, own in enumerate(written)
        ]
    )


def resumed(model: str, teachers: tuple[str | None, ...], folder: str) -> list[str]:
    """Return what a resume with each reference says about a run with the first; "" if it continues."""
    from megatron_stppo.config import ConfigError

    learners = [build(model, teacher, folder) for teacher in teachers]
    state, found = learners[0].beginning, []
    for learner in learners:
        try:
            learner.check_beginning(state)
            found.append("")
        except ConfigError as error:
            found.append(str(error))
    return found
