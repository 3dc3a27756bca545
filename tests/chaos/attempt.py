"""The processes of an asynchronous run, from its start until all have ended, of which any can be killed.

The ranks are forks, and so are their replicas (spares.py). They run the program of the command line.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from megatron_stppo.cluster.launch.process import free_port
from megatron_stppo.config import Config
from megatron_stppo.replicas.trainer import local
from tests.chaos import spares
from tests.chaos.moments import Orders

# Limits in seconds, for a machine with other load
TORCHRUN = 30.0  # between torchrun's SIGTERM and its SIGKILL
ORPHANED = 60.0  # in which the replicas of a killed trainer end by themselves
REPLACED = 180.0  # in which a killed replica is replaced, and its link closed
WHOLE = 900.0  # of an attempt
ANY_TIME = "at any time"


class Attempt:
    """One start of a run with parallel.tensor ranks on this machine, and serving.replicas replicas.

    Victims are named "rank-0", "rank-1", ... and "replica-0", "replica-1", ...
    Needs launch.prepare() in this process, and no process groups.
    """

    def __init__(self, config: Config, arguments: Sequence[str]) -> None:
        run = config.run
        run.root.mkdir(parents=True, exist_ok=True)
        self.log, self._started = run.root / f"{run.name}.log", run.root / f"{run.name}.started"
        self._started.write_text("")
        world = range(config.parallel.tensor)
        names = [f"replica-{index}" for index in range(config.serving.replicas or 0)]
        self._orders = Orders([*(f"rank-{rank}" for rank in world), *names])
        self._joined = {name: self._joins(name) for name in names}  # in earlier attempts
        self._spares = len(names) + config.rollout.engine_restarts
        self.clock, port = Clock(), free_port()
        self._ranks = [self._fork(arguments, rank, len(world), port) for rank in world]
        self._codes: dict[int, int] = {}  # of the ranks that have ended, by process id
        self._killed = False  # whether a rank was
        self._awaited: dict[str, Replacement] = {}  # by the name of the replica
        self.ordered: tuple[str, str] | None = None  # who has an order to die, and at what moment
        self.deaths: list[tuple[str, str]] = []  # victims that were killed, and when

    def goes_on(self) -> bool:
        """Return whether all ranks run. Raises AssertionError if one has failed."""
        for pid in set(self._ranks) - self._codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._note_obedience()
                self._codes[pid] = os.waitstatus_to_exitcode(status)
                failed = self._codes[pid] and not self._killed
                assert not failed, f"a rank ended with {self._codes[pid]}, see {self.log}"
        assert self.clock.now() < WHOLE, f"it does not end, see {self.log}"
        self._note_obedience()
        return not self._codes

    def kill(self, victim: str) -> bool:
        """Kill a process; return False if it does not run, or cannot be replaced in this attempt."""
        kind, _, number = victim.partition("-")
        pid = self._ranks[int(number)] if kind == "rank" else self.replicas().get(victim, 0)
        if not pid or not self._can_be_killed(victim):
            return False
        self._note_death(victim, ANY_TIME)
        os.kill(pid, signal.SIGKILL)
        return True

    def order(self, victim: str, moment: str, part: float) -> bool:
        """Order a process to kill itself at its next moment of this kind; one order at a time (moments.py).

        Returns False if it cannot be replaced in this attempt.
        """
        if not self._can_be_killed(victim):
            return False
        self.ordered = victim, moment
        self._orders.give(victim, moment, part)
        return True

    def is_full(self) -> bool:
        """Return whether all replicas have joined and none is being replaced."""
        return not self._awaited and all(self._joins(name) > old for name, old in self._joined.items())

    def replaced(self, ports: int) -> list[float]:
        """Return how long it took to replace the replicas whose replacement is complete since the last call.

        ports: at how many the ranks listen when all replicas have joined. The link of a lost replica must be
        closed.
        """
        over = {
            name: wait
            for name, wait in self._awaited.items()
            if wait.is_over(self._joins(name)) and self.listening() <= ports
        }
        for name in over:
            del self._awaited[name]
        return [wait.took for wait in over.values()]

    def end(self) -> tuple[bool, float, int]:
        """Wait until all has ended; if a rank was killed, end the others as torchrun does.

        Returns (whether the run is complete, seconds in which the replicas ended after the ranks, ranks that
        torchrun would have killed).
        """
        stuck = 0
        if self.ordered is not None:
            self._orders.withdraw(self.ordered[0])
        if self._killed:
            self._signal(signal.SIGTERM)
        kill_at = self.clock.now() + TORCHRUN
        while len(self._codes) < len(self._ranks):
            self.goes_on()
            if self._killed and self.clock.now() > kill_at:
                stuck, kill_at = self._signal(signal.SIGKILL), float("inf")
            time.sleep(0.01)
        ended = self.clock.now()
        while left := self.replicas():
            assert self.clock.now() - ended < ORPHANED, f"{left} outlive the trainer, see {self.log}"
            time.sleep(0.01)
        return not any(self._codes.values()), self.clock.now() - ended, stuck

    def kill_all(self) -> None:
        """Kill what is left, after an error of the check itself."""
        self._signal(signal.SIGKILL)
        for pid in self.replicas().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def replicas(self) -> dict[str, int]:
        """Return the process ids of the replicas that run, by name."""
        return {name: pid for pid, name in self._all_replicas().items() if _lives(pid)}

    def listening(self) -> int:
        """Return at how many ports the ranks listen. A link to a replica has one on each rank."""
        found = 0
        for pid in set(self._ranks) - self._codes.keys():
            with contextlib.suppress(psutil.NoSuchProcess):  # it was killed after the last look
                sockets = psutil.Process(pid).net_connections("inet")
                found += sum(it.status == psutil.CONN_LISTEN for it in sockets)
        return found

    def _can_be_killed(self, victim: str) -> bool:
        return victim.startswith("rank") or len(self._all_replicas()) < self._spares

    def _note_obedience(self) -> None:
        """Note the death of a process that had an order."""
        if self.ordered is not None and self._orders.obeyed(self.ordered[0]):
            self._note_death(*self.ordered)
            self.ordered = None

    def _note_death(self, victim: str, moment: str) -> None:
        self.deaths.append((victim, moment))
        with self.log.open("a") as log:
            log.write(f"--- {victim} was killed {moment}\n")
        if victim.startswith("rank"):
            self._killed = True
        else:
            self._awaited[victim] = Replacement(self._joins(victim), self.clock)

    def _joins(self, name: str) -> int:
        """Return how many replicas of this name have joined, in all attempts."""
        joined = f"replica {name} has joined"
        return self.log.read_text(errors="replace").count(joined) if self.log.exists() else 0

    def _all_replicas(self) -> dict[int, str]:
        """Return the names of all replicas that were started, by process id."""
        lines = self._started.read_text().splitlines()
        return {int(pid): name for pid, name in (line.split() for line in lines)}

    def _signal(self, number: signal.Signals) -> int:
        """Send a signal to the ranks that have not ended, and return how many they are."""
        left = set(self._ranks) - self._codes.keys()
        for pid in left:
            os.kill(pid, number)
        return len(left)

    def _fork(self, arguments: Sequence[str], rank: int, world: int, port: str) -> int:
        child = os.fork()
        if child:
            return child
        if rank == 0:
            waiting = spares.Spares(self._spares, self._started, self._orders)
            local.subprocess = waiting.subprocess  # type: ignore
        self._orders.follow(f"rank-{rank}")
        given = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "RANK": rank, "LOCAL_RANK": rank}
        os.environ.update({name: str(value) for name, value in given.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        with self.log.open("ab") as log:
            spares.run(arguments, log.fileno())


class Clock:
    """Seconds since the start, without those in which all processes were stopped, as in a laptop's sleep."""

    def __init__(self) -> None:
        self._seen, self._seconds = time.monotonic(), 0.0

    def now(self) -> float:
        """Call it at least once per second."""
        before, self._seen = self._seen, time.monotonic()
        self._seconds += min(1.0, self._seen - before)
        return self._seconds


class Replacement:
    """Waits for the replica that takes the place of a killed one."""

    def __init__(self, joined: int, clock: Clock) -> None:
        self._joined, self._clock, self._began = joined, clock, clock.now()
        self.took = 0.0

    def is_over(self, joined: int) -> bool:
        """joined: how many replicas of this name have joined."""
        waits = self._clock.now() - self._began
        self.took = self.took or (waits if joined > self._joined else 0.0)
        assert waits < REPLACED, f"not replaced, or its link not closed; {joined - self._joined} have joined"
        return self.took > 0


def is_started(folder: Path) -> bool:
    """Return whether the run in this folder can be resumed."""
    return (folder / "config.yaml").exists()


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
