"""Functions that run on a rank: whole iterations without an engine, with each source of the old log-probs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.training.update.layouts import SETTINGS, batch, learner_of

# Every metric that reads old log-probs, in the loss, in the correction and in what a run reports.
ALGORITHM = {
    "preset": "st_ppo",
    "kl_in": "loss",
    "kl_estimator": "k3",
    "kl_coefficient": 0.01,
    "correction_probe": True,
    "correction": "gradient",
}


def iterations(
    model: str, parallel: dict[str, Any], algorithm: dict[str, Any], folder: str
) -> dict[str, dict[str, Any]]:
    """Return {update.old_logprob: what two iterations of two epochs computed}."""
    return {source: _iterations(model, parallel, algorithm, source, folder) for source in ("score", "update")}


def _iterations(
    model: str, parallel: dict[str, Any], algorithm: dict[str, Any], source: str, folder: str
) -> Any:
    learner = learner_of(
        model,
        run={"root": folder, "name": source},
        parallel=parallel,
        update={"actor": SETTINGS, "critic": SETTINGS, "minibatches": 1, "epochs": 2}
        | {"old_logprob": source, "tokens_per_microbatch": 40, "logit_rows": 8},
        algorithm=ALGORITHM | algorithm,
    )
    import torch

    from megatron_stppo.observe.describe import describe_batch
    from megatron_stppo.training.advantage import estimate
    from megatron_stppo.training.stages import divided, score, update
    from megatron_stppo.training.update.ratios import turns

    config, group_N = learner.config, torch.arange(8) % 4
    config.run.folder.mkdir(parents=True, exist_ok=True)
    rows, scored, records = [], [], []
    for iteration in range(2):
        drawn = torch.Generator().manual_seed(iteration)
        bare = divided(learner, batch(), iteration)
        rewards = torch.randn(len(bare.reward_T), generator=drawn)
        given = score(learner, replace(bare, reward_T=rewards))
        scored.append(given.old_logprob_T is not None)
        given = estimate(given, config.algorithm, group_N)
        row, last, given = update(learner, given, iteration)
        rows.append(row | describe_batch(given))
        records.append((list(turns(given, last, config.algorithm)), given.old_logprob_T.tolist()))
    weights = [
        p.detach().flatten().tolist()
        for t in learner.trainers.values()
        for c in t.chunks
        for p in c.parameters()
    ]
    return {"scored": scored, "rows": rows, "records": records, "weights": weights}
