"""A replica of two tensor-parallel ranks, started as `train` starts it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from megatron_stppo.replicas.trainer.local import LocalReplicas
from megatron_stppo.replicas.wire import keys
from megatron_stppo.replicas.wire.messages import ReplicaEnds
from tests.forking import stand_in
from tests.ranks import run_ranks
from tests.replicas.scripted import Scripted
from tests.replicas.scripts import SEED, TASKS
from tests.replicas.test_replica import config, versions
from tests.rollout.vllm.tiny import build_model


def train_pair(model: Path, run: Path, python: str) -> dict[str, Any]:
    sys.executable = python
    trainer = Scripted(run, model)
    given = config(model, run, rollout={"engine_tensor": 2, "kv_cache_gib": 0.05})
    (run / keys.FOLDER / keys.CONFIG).write_text(given.dump())
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    local = LocalReplicas(run, ["replica-0"], 0, tensor=2)
    ranks = local._processes["replica-0"]._ranks
    seen: dict[str, Any] = {"hello": trainer.join(3)}
    trainer.play([0, 1, 2], TASKS[:3], SEED)
    trainer.wait_for(1)
    trainer.update(4)
    seen["played"] = trainer.wait_for(3)
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    seen["leaving"] = trainer.expect(ReplicaEnds)
    seen["codes"] = [rank.wait(30) for rank in ranks]
    return seen


def test_two_ranks_play_as_one_replica_and_leave_together_after_a_signal(tmp_path: Path) -> None:
    model, run = tmp_path / "model", tmp_path / "pair"
    build_model(model)
    (seen,) = run_ranks(train_pair, 1, model, run, stand_in.python())
    assert (seen["hello"].tensor, seen["hello"].name) == (2, "replica-0")
    assert {v for t in seen["played"].values() for turn in versions(t) for v in turn} == {3, 4}
    assert (seen["leaving"], seen["codes"]) == (ReplicaEnds("left", "SIGTERM"), [0, 0])
    log = (run / "logs" / "replica-0.log").read_text()
    assert log.rstrip().endswith("megatron-stppo: the replica has ended: SIGTERM"), log
    assert sorted(path.name for path in (run / "logs").glob("*rank*")) == [
        "replica-0-rank-0.log",
        "replica-0-rank-1.log",
    ]
