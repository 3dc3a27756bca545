"""A signal to one rank of the trainer, while all replicas end."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_stppo.base.errors import EngineLost
from megatron_stppo.cluster.preemption import PreemptionNotice
from megatron_stppo.config import Config
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.replicas.trainer.served import Served
from tests.ranks import run_ranks
from tests.replicas.hubs import trainer
from tests.rollout.vllm.tiny import build_model


def wait_for_a_batch(folder: Path, signalled: int) -> tuple[str, float]:
    """Return why a run without replicas ended on this rank, and how long after the signal to one rank."""
    rank, notice = dist.get_rank(), PreemptionNotice(0)
    given = {
        "model": {"path": folder / "model"},
        "run": {"root": folder, "name": "run"},
        "serving": {"replicas": 2, "timeout": 60},
    }
    config = Config.model_validate(given)
    learner: Any = SimpleNamespace(
        config=config, mesh=SimpleNamespace(layout=Layout()), load_for=lambda phase: None
    )
    with trainer(timeout=60, notice=lambda: notice.reason) as (t, _):
        hub = t.hub if rank == 0 else None
        rollouts = Served(learner, dist.HashStore(), hub, lambda: notice.reason)
        dist.barrier()
        began = time.monotonic()
        if rank == signalled:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
        try:
            rollouts.draw(0)
        except EngineLost as lost:
            return str(lost), time.monotonic() - began
    raise AssertionError("it has no replica")


@pytest.mark.parametrize(
    "signalled, why", [(0, "SIGTERM"), (1, "another rank received notice")], ids=["first", "another"]
)
def test_the_run_ends_within_seconds_whichever_rank_received_the_signal(
    tmp_path: Path, signalled: int, why: str
) -> None:
    build_model(tmp_path / "model")
    for said, took in run_ranks(wait_for_a_batch, 2, tmp_path, signalled, timeout=60):
        assert said == f"{why}, and no replica serves any more" and took < 30
