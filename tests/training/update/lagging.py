"""Function that runs on a rank: an update on tokens of the current version and of the version before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.training.update.layouts import SETTINGS, batch, learner_of

CURRENT, LAG = 5, 0.1  # nats by which the policy has raised every token's log-prob since version 4


def updates(model: str, folder: str) -> dict[str, Any]:
    """Return {algorithm.old_policy: (ratios of the turns, metrics)}, and the same with an engine that differs
    from the trainer by 0.5 nats on tokens of the current version, as "broken NAME".

    Version 4 wrote trajectories 0, 1 and 3 and the first half of trajectory 2, version 5 the rest.
    """
    learner = learner_of(
        model,
        run={"root": folder},
        update={"actor": SETTINGS, "minibatches": 2, "tokens_per_microbatch": 40},
        algorithm={
            "preset": "turn_ppo",
            "advantage": "group",
            "kl_coefficient": 0,
            "old_policy": "score",
        },
    )
    import torch

    from megatron_stppo.observe.describe import describe_batch
    from megatron_stppo.training.advantage import estimate
    from megatron_stppo.training.guard import dumps
    from megatron_stppo.training.stages import divided, score, update

    scoring, group_N = learner.config, torch.arange(8) % 4
    bare = divided(learner, batch(), CURRENT)
    bare = replace(bare, reward_T=torch.arange(60.0) % 7)
    version_T = torch.full((60,), CURRENT)
    version_T[: 5 + 10 + 3] = version_T[5 + 10 + 6 : 30] = CURRENT - 1
    now_T = score(learner, bare).old_logprob_T
    found = {}
    for name, error in (("", 0.0), ("broken ", 0.5)):
        engine_T = now_T - LAG * (CURRENT - version_T) - error * (version_T == CURRENT)
        played = replace(bare, version_T=version_T, rollout_logprob_T=engine_T)
        for old_policy in ("score", "behaviour"):
            learner.config = scoring.changed(algorithm={"old_policy": old_policy})
            given = estimate(score(learner, played), learner.config.algorithm, group_N)
            row, last, given = update(learner, given, CURRENT, hold=True)
            assert last is not None
            dumps.write(Path(folder), 1, given, group_N, learner.mesh, ["a test"], keep=1)
            again, _ = dumps.read(Path(folder), 1, learner.mesh)
            assert torch.equal(again.old_logprob_T, given.old_logprob_T)
            assert torch.equal(again.version_T, version_T)
            found[name + old_policy] = last.ratio_S.tolist(), row | describe_batch(given)
    return found
