"""Checks that the ratios to the old policy are exactly 1 before a step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import torch

from megatron_stppo.base.types import UpdatedBatch
from megatron_stppo.cluster.launch import connections
from megatron_stppo.config import ParallelConfig
from megatron_stppo.evidence.bench.stage import Checked, Stage, judged
from megatron_stppo.training.stages import score
from megatron_stppo.training.update.actor_step import actor_step

FIRST = "the first ratio is 1"


def first_ratio(stage: Stage) -> Iterator[Checked]:
    """Score the episodes, and compute the steps of the first epoch without taking them. Collective."""
    config, actor = stage.config, stage.actor
    scoring = config.changed(update={"old_logprob": "score"}, algorithm={"old_policy": "score"})
    stage.rollouts.load_for("score")
    # with routing_replay=old_policy, scoring records experts, and must not find those that it recorded before
    fresh = stage.batch if config.replays_rollout else replace(stage.batch, routes_P=None)
    scored = score(replace(stage.learner, config=scoring), fresh)
    batch = UpdatedBatch.of(scored, advantage_T=stage.random_T(0))
    stage.rollouts.load_for("update")
    largest, tokens = 0.0, 0
    for minibatch in batch.epochs[0]:
        step = actor_step(actor, stage.loss(batch, minibatch), minibatch, stage.learner.packer, hold=True)
        apart_T = (step.ratios.logprob_T - batch.old_logprob_T)[step.ratios.chosen_T].abs()
        largest = max(largest, float(apart_T.nan_to_num(torch.inf).max()))
        tokens += len(apart_T)
    yield judged(
        FIRST,
        largest == 0,
        f"{tokens:,} tokens, largest difference of a log-prob {largest:.2g} (0 allowed)",
        suspects(config.parallel),
    )


def suspects(parallel: ParallelConfig) -> str:
    """Return the settings to look at if scoring and update differ."""
    if torch.cuda.is_available() and parallel.tensor > 1 and os.environ.get(connections.NVLS) != "0":
        return f"{connections.NVLS}: with NVLS, sums of tensor parallel ranks change between calls; set 0"
    return (
        "update.tokens_per_microbatch, model.layers, megatron: scoring and update compute different "
        "log-probs; remove what differs, or is random, in training only"
    )
