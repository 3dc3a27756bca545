"""Scripts of a trainer for one replica after another: test_replica.py looks at what both sides observed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_stppo.base.types import Trajectory
from megatron_stppo.replicas.wire.messages import Hello, Moved, ReplicaEnds, Stop
from tests.replicas.scripted import Scripted
from tests.rollout.vllm.tiny import task

SEED, TASKS = 11, [task(index) for index in range(6)]
NUMBERS = range(70, 76)


def train(model: Path, run: Path) -> dict[str, Any]:
    trainer, seen = Scripted(run, model), {}
    for script in (recompute, again, drain, misuse, refuse):
        seen[script.__name__] = script(trainer)
    trainer.join(3)
    trainer.play(NUMBERS, TASKS, SEED)
    trainer.listener.close()  # the replica is left alone
    return seen


def begin(trainer: Scripted) -> None:
    trainer.join(3)
    trainer.play(NUMBERS, TASKS, SEED)
    trainer.wait_for(1)
    trainer.play([76, 77], TASKS[:2], SEED + 1)  # so that turns are in progress however late the update comes


def recompute(trainer: Scripted) -> dict[int, Trajectory]:
    begin(trainer)
    trainer.update(4)
    trainer.wait_for(4)
    trainer.update(5)
    played = trainer.wait_for(8)
    trainer.stop()
    return played


def again(trainer: Scripted) -> tuple[Moved, dict[int, Trajectory]]:
    """The first transfer of an update fails, while turns are in progress."""
    begin(trainer)
    failed = trainer.update_twice(4)
    played = trainer.wait_for(8)
    trainer.stop()
    return failed, played


def drain(trainer: Scripted) -> dict[int, Trajectory]:
    begin(trainer)
    trainer.update(4)
    played = trainer.wait_for(8)
    trainer.stop()
    return played


def misuse(trainer: Scripted) -> ReplicaEnds:
    trainer.join(3)
    trainer.play([1], [task(0, "step is not async")], SEED)
    return trainer.expect(ReplicaEnds)


def refuse(trainer: Scripted) -> Hello:
    hello = trainer.expect(Hello)
    trainer.send(
        Stop("dtype=float32: the trainer has bfloat16; start it with the same model.dtype", is_refusal=True)
    )
    return hello
