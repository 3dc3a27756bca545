"""A signal to one rank of the trainer, while all replicas end."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_stppo.base.errors import Abandoned, EngineLost
from megatron_stppo.cluster.preemption import PreemptionNotice
from megatron_stppo.replicas.trainer.served import Served
from megatron_stppo.training.rollouts import rollout_settings
from tests.ranks import run_ranks
from tests.replicas.hubs import TASKS, bare_learner, trainer
from tests.rollout.vllm.tiny import build_model


def wait_for_episodes(folder: Path, signalled: int, evaluates: bool) -> tuple[str, float]:
    """Return why a run without replicas ended on this rank, and how long after the signal to one rank.

    evaluates: it waits for an evaluation, which is abandoned; else for a batch.
    """
    rank, notice = dist.get_rank(), PreemptionNotice(0)
    learner = bare_learner(folder, timeout=60)
    with trainer(timeout=60, notice=lambda: notice.reason) as (t, _):
        hub = t.hub if rank == 0 else None
        rollouts = Served(learner, dist.HashStore(), hub, lambda: notice.reason)
        dist.barrier()
        began = time.monotonic()
        if rank == signalled:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
        try:
            if evaluates:
                rollouts.play(TASKS[:2], 1, rollout_settings(learner.config), 5)
            rollouts.draw(0)
        except (Abandoned, EngineLost) as lost:
            return f"{type(lost).__name__}: {lost}", time.monotonic() - began
    raise AssertionError("it has no replica")


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize(
    "signalled, why", [(0, "SIGTERM"), (1, "another rank received notice")], ids=["first", "another"]
)
def test_the_run_ends_within_seconds_whichever_rank_received_the_signal(
    tmp_path: Path, signalled: int, why: str, evaluates: bool
) -> None:
    build_model(tmp_path / "model")
    expected = f"Abandoned: {why}" if evaluates else f"EngineLost: {why}, and no replica serves any more"
    for said, took in run_ranks(wait_for_episodes, 2, tmp_path, signalled, evaluates, timeout=60):
        assert said == expected and took < 30
