"""Starts the replicas of a run on this machine, and restarts those that end."""

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import torch

from megatron_stppo.cluster.launch import process
from megatron_stppo.config import ConfigError
from megatron_stppo.replicas.wire.messages import process_name

# A replica has a launcher's variables of its own; those of srun and torchrun describe the trainer.
INHERITED = ("SLURM_", "TORCHELASTIC_", "GROUP_", "ROLE_", "PMI")
GRACE = 20.0  # seconds that a replica has to end after a Stop
LEAVING = 4.0  # the same if the run was asked to end, perhaps within 30 s
DYING = 5.0  # seconds that a killed process has to end
LAST = 65_536  # bytes at the end of a log in which the last line is
log = logging.getLogger(__name__)


class LocalReplica:
    """The processes of one replica, a rank each. Only `wait` waits."""

    def __init__(self, ranks: Sequence[subprocess.Popen[bytes]]) -> None:
        self.pid = ranks[0].pid  # of the first rank
        self._ranks = ranks
        self._code: int | None = None  # of the first rank that has ended

    def ended(self) -> int | None:
        """Return the exit code of the rank that ended first, as soon as all have ended, else None.

        If one has ended, the others are killed. A killed process that is in a call of the system ends later.
        """
        codes = [rank.poll() for rank in self._ranks]
        if self._code is None:
            self._code = next((code for code in codes if code is not None), None)
        if self._code is None or None not in codes:
            return self._code
        self.kill()
        return None

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()

    def left(self, deadline: float) -> list[int]:
        """Wait until all ranks have ended, or until the deadline, which is a time.monotonic().

        Return the process ids of the ranks that have not ended.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            for rank in self._ranks:
                rank.wait(max(0.0, deadline - time.monotonic()))
        return [rank.pid for rank in self._ranks if rank.poll() is None]


class LocalReplicas:
    """The replicas of this machine, each a process per tensor-parallel rank.

    The output of a replica is in RUN_DIR/logs/NAME.log.
    """

    def __init__(
        self, run: Path, names: Sequence[str], budget: int, *, tensor: int = 1, trainer: int = 1
    ) -> None:
        """Start the replicas. run: RUN_DIR. budget: how many are started again, over the whole run.

        tensor: ranks of a replica. trainer: ranks of the trainer on this machine. Raises ConfigError if this
        machine has too few GPUs.
        """
        self._run, self._names, self._budget = run, names, budget
        self._tensor, self._trainer = tensor, trainer
        self._threads = process.threads(trainer + len(names) * tensor)  # of each rank, on a CPU
        if torch.cuda.is_available():
            _check_gpus(trainer, len(names), tensor)
        self.gave_up = ""  # why no further replica is started; empty if none is needed
        (run / "logs").mkdir(parents=True, exist_ok=True)
        self._processes = {name: self._start(name) for name in names}

    def ended(self, start_again: bool = True) -> list[tuple[str, str]]:
        """Return (name, why) of the replicas that have ended since the last call, and start them again.

        start_again: False if the run ends soon, so that none is needed.
        Raises ConfigError if a replica ended because of its configuration: a new one would end too.
        """
        ended = []
        for name, ranks in list(self._processes.items()):
            if (code := ranks.ended()) is None:
                continue
            last = self._last_line(name)
            if code == 2:
                raise ConfigError(
                    last.removeprefix("megatron-stppo: ") or f"{name} refused its configuration"
                )
            ended.append((name, f"its process ended with {code}: {last}"))
            del self._processes[name]
            if start_again and self._budget:
                self._budget -= 1
                self._processes[name] = self._start(name)
            elif start_again:
                self.gave_up = f"{name} ended and rollout.engine_restarts is used up: {last}"
        return ended

    def expects(self, name: str, process: str) -> bool:
        """Return False if a replica of this machine has the name, and the process is another one.

        process: see Hello. So a replica that was started elsewhere cannot take the name of one that is still
        starting.
        """
        ranks = self._processes.get(name)
        return ranks is None or process == process_name(ranks.pid)

    def kill(self, name: str) -> None:
        """Kill a replica, which `ended` then starts again. Nothing happens if the name is unknown."""
        if name in self._processes:
            self._processes[name].kill()

    def close(self, asked: AbstractSet[str], grace: float = GRACE) -> None:
        """Wait until the replicas that were `asked` to end have ended. Kill the others, and those that do not
        end: one that is still starting cannot be asked."""
        deadline = time.monotonic() + grace
        for name, ranks in self._processes.items():
            if name in asked and ranks.left(deadline):
                log.warning("%s did not end within %g s and is killed", name, grace)
            ranks.kill()
            if left := ranks.left(time.monotonic() + DYING):
                log.warning("%s was killed and does not end: %s", name, left)

    def _start(self, name: str) -> LocalReplica:
        command = [sys.executable, "-m", "megatron_stppo", "serve", str(self._run), "--name", name]
        command += ["--parent", str(os.getpid())]
        environment = {key: value for key, value in os.environ.items() if not key.startswith(INHERITED)}
        environment |= {
            "WORLD_SIZE": str(self._tensor),
            "LOCAL_WORLD_SIZE": str(self._tensor),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": process.free_port(),
            "OMP_NUM_THREADS": str(self._threads),
        }
        if torch.cuda.is_available():
            first = self._trainer + self._names.index(name) * self._tensor
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(_gpus()[first : first + self._tensor])
        with self._log(name).open("ab") as output:
            return LocalReplica(
                [
                    subprocess.Popen(
                        command,
                        env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,  # Ctrl-C reaches the trainer, which ends the replicas
                    )
                    for rank in range(self._tensor)
                ]
            )

    def _log(self, name: str) -> Path:
        return self._run / "logs" / f"{name}.log"

    def _last_line(self, name: str) -> str:
        with self._log(name).open("rb") as output:
            output.seek(max(0, output.seek(0, os.SEEK_END) - LAST))
            lines = output.read().decode(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.strip()), "")


def _check_gpus(trainer: int, replicas: int, tensor: int) -> None:
    have, need = len(_gpus()), trainer + replicas * tensor
    if have < need:
        raise ConfigError(
            f"serving.replicas={replicas}: {replicas} replicas of {tensor} GPUs and {trainer} ranks need "
            f"{need} GPUs, and this machine has {have}; start fewer ranks or replicas, or set "
            "serving.start=false and start the replicas elsewhere"
        )


def _gpus() -> list[str]:
    """Return the visible GPUs as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
