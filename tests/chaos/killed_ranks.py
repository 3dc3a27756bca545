"""The training program on four gloo ranks, all killed at random times and resumed until the run is complete.

A run takes seconds and imports take longer, so one process imports everything and forks the ranks of every
attempt. The ranks call loop.train, as the command line does.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_stppo.checkpoint import step_folder as steps
from megatron_stppo.cluster.deadlines import Watchdog
from megatron_stppo.cluster.launch.process import free_port
from megatron_stppo.cluster.preemption import PreemptionNotice
from megatron_stppo.config import Config, DeadlinesConfig
from megatron_stppo.config.file import load

RANKS, ITERATIONS = 4, 8
OVERRIDES = [
    f"run.iterations={ITERATIONS}",
    "run.checkpoint_every=1",
    "run.keep_checkpoints=3",
    *(
        f"deadlines.{phase}=300" for phase in DeadlinesConfig.model_fields
    ),  # ranks that would wait forever are ended
]


@dataclass(frozen=True)
class Attempt:
    """seconds: time until the ranks were killed, or had ended. first: time until the first step was
    published. step: the newest step at the end. saving: whether a save was interrupted."""

    killed: bool
    seconds: float
    first: float
    step: int
    saving: bool


class Ranks:
    """Needs launch.prepare() and the imports of loop and colocated in this process, and no process groups."""

    def __init__(self, config: Path, name: str) -> None:
        self.config: Config = load(config, [*OVERRIDES, f"run.name={name}"])
        self.folder = self.config.run.folder / "checkpoints"
        self.log = self.config.run.root / f"{name}.log"

    def attempt(self, seconds: float | None) -> Attempt:
        """Continue training from the newest step, and kill all ranks after `seconds`. Raises AssertionError
        if they fail before, or if a published step is lost."""
        self.config.run.root.mkdir(parents=True, exist_ok=True)
        left = self._half_done()
        began, port = self.log.stat().st_size if self.log.exists() else 0, free_port()
        started, first = time.monotonic(), 0.0
        children = [self._fork(rank, port) for rank in range(RANKS)]
        codes: dict[int, int] = {}
        while len(codes) < RANKS and (seconds is None or time.monotonic() - started < seconds):
            for child in set(children) - codes.keys():
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    assert codes[pid] == 0, f"a rank ended with {codes[pid]}, see {self.log}"
            if not first and (self.folder / steps.LATEST).exists():
                first = time.monotonic() - started
            time.sleep(0.01)
        took = time.monotonic() - started
        alive = set(children) - codes.keys()
        for child in alive:
            os.kill(child, signal.SIGKILL)
        for child in alive:
            os.waitpid(child, 0)
        announced = [
            steps.number(line.rpartition("/")[2])
            for line in self.log.read_bytes()[began:].decode(errors="replace").splitlines()
            if line.startswith("megatron-stppo: saved ")
        ]
        step = self._newest()
        assert step >= max(announced, default=0), (
            f"the newest step is {step}, but {announced[-1]} was published"
        )
        return Attempt(bool(alive), took, first, step, bool(self._half_done() - left))

    def files(self) -> dict[str, steps.File]:
        """Return the tensors of the last step: weights and Adam's moments of actor and critic."""
        found = steps.inspect(self.folder / f"step_{ITERATIONS}")
        return {name: file for name, file in found.items() if name.endswith(".distcp")}

    def _half_done(self) -> set[tuple[str, int]]:
        """Return the folders that are being written or removed, or were left in this state."""
        return {(path.name, path.stat().st_mtime_ns) for path in self.folder.glob("step_*.tmp-*")}

    def _newest(self) -> int:
        """Return the step that the next attempt resumes after comparing all its bytes; 0 if there is none."""
        if not steps.published(self.folder):
            return 0
        try:
            step = steps.latest(self.folder)
        except steps.Damaged:  # killed between the first step's rename and the pointer's
            step = steps.published(self.folder)[0]
        path = self.folder / f"step_{step}"
        fault = steps.compare(path, steps.inspect(path).items())
        assert not fault, f"{path}: {fault}"
        return step

    def _fork(self, rank: int, port: str) -> int:
        child = os.fork()
        if child:
            return child
        code = 255
        try:
            with self.log.open("ab", buffering=0) as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            world = {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "RANK": rank, "LOCAL_RANK": rank}
            os.environ.update({name: str(value) for name, value in world.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            run = self.config.run
            with Watchdog(run.folder, self.config.deadline_by_phase, rank, RANKS) as watchdog:
                sys.modules["megatron_stppo.training.loop"].train(
                    self.config,
                    True,
                    watchdog,
                    PreemptionNotice(run.end_margin),
                    sys.modules["megatron_stppo.training.colocated"].assemble,
                )
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)


def kill_often(config: Path, kills: int, seed: int) -> Iterator[tuple[str, Attempt]]:
    """Start a run without kills, then runs that are killed at random times within its length (every other
    time after its first checkpoint), until there were `kills` kills. Every run is resumed until it is
    complete.

    Yields (name of the run, attempt). Raises AssertionError if one ends with other weights or optimizer
    states, or loses a step.
    """
    draw, whole = random.Random(seed), Ranks(config, "undisturbed")
    undisturbed = whole.attempt(None)
    yield "undisturbed", undisturbed
    expected, number = whole.files(), 0
    while kills:
        number += 1
        ranks, done = Ranks(config, f"killed-{number}"), False
        while not done:
            earliest = undisturbed.first if kills % 2 else 0.0
            attempt = ranks.attempt(draw.uniform(earliest, undisturbed.seconds) if kills else None)
            kills, done = kills - attempt.killed, not attempt.killed
            yield f"killed-{number}", attempt
        assert ranks.files() == expected, f"run {number} ends with other bytes"
