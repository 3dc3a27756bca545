"""Runs the cells of a grid, several at a time, each as a `megatron-stppo train` of its own."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megatron_stppo.base.errors import ConfigError, DoNotRestart, Requeue
from megatron_stppo.cluster.preemption import SIGNALS
from megatron_stppo.config.file import load
from megatron_stppo.evidence.compare import contrasts
from megatron_stppo.evidence.compare.grid import Cell, Grid
from megatron_stppo.observe.console import say

NOT_FINITE = "steps were not finite"  # in exit.json: this end is a result
PATIENCE = 300.0  # seconds for an iteration and a checkpoint after the signal to stop


@dataclass
class _Started:
    cell: Cell
    process: subprocess.Popen[bytes]
    place: int  # which share of the cores or GPUs it has


class Runner:
    """Starts cells, waits for them, and writes their results. There is one per folder."""

    def __init__(self, grid: Grid, jobs: int | None) -> None:
        """jobs: cells at a time; default: as many as cores or GPUs allow. With more, cells share GPUs. Raises
        ConfigError if the grid and its results do not fit, or if another process runs the folder's cells."""
        self._grid, self._folder = grid, grid.folder
        self._device, count = contrasts.devices()
        self._gpus = "AVX-512" not in self._device
        self._apart = max(1, count // grid.processes)  # cells that fit without sharing
        self._jobs = jobs or self._apart
        if self._gpus and grid.processes > count:
            raise ConfigError(
                f"processes={grid.processes}: each run needs as many GPUs, and there are {count}"
            )
        for arm in grid.arms:  # a wrong field ends every run of its arm: refuse it at once
            for setting in grid.settings:
                load(grid.config, grid.fields(Cell(arm, setting, grid.seeds[0])))
        self._lock = _locked(self._folder)
        self._results = contrasts.read(self._folder)
        contrasts.check(grid, self._results, self._device)
        self._running: list[_Started] = []

    def work(self) -> bool:
        """Run all cells that have no result; return whether every cell has one.

        At SIGINT, SIGTERM, SIGUSR1 or SIGHUP the runs write a checkpoint and end; the next call resumes them.
        """
        waiting, signals = [cell for cell in self._grid.cells() if cell not in self._results], list[int]()
        say(f"{self._done}; {self._jobs} at a time, {self._device}")
        # Recorded, not raised: an exception between the start of a process and its entry in the list would
        # lose the process.
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, lambda n, _: signals.append(n))
        while (waiting or self._running) and not signals:
            self._reap()
            while waiting and len(self._running) < self._jobs:
                self._start(waiting.pop(0))
            time.sleep(0.2)
        if signals:
            say("the runs write their checkpoints and end; give the same command to continue")
        self._leave()
        return all(cell in self._results for cell in self._grid.cells())

    @property
    def _done(self) -> str:
        cells = self._grid.cells()
        return f"{sum(cell in self._results for cell in cells)} of {len(cells)} cells are done"

    def _start(self, cell: Cell) -> None:
        grid, run = self._grid, self._folder / cell.name
        own = [f"run.root={self._folder.absolute()}", f"run.name={cell.name}"]
        words = ["-m", "megatron_stppo", "train", str(grid.config), *grid.fields(cell), *own]
        if resumes := any((run / "checkpoints").glob("step_*")):
            words.append("--resume")
        else:
            shutil.rmtree(run, ignore_errors=True)
        if grid.processes > 1:
            launcher = f"-m torch.distributed.run --standalone --nproc-per-node={grid.processes}"
            words = [*launcher.split(), *words]
        place = min(set(range(self._jobs)) - {run.place for run in self._running})
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        if self._gpus:
            first = place % self._apart * grid.processes
            mine = range(first, first + grid.processes)
            every = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(1024)))).split(",")
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(every[n] for n in mine)
        log = self._log(cell)
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                (sys.executable, *words),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=(self._lock.fileno(),),  # locked while a run is alive
                start_new_session=True,  # signals of the keyboard do not reach it
            )
        self._running.append(_Started(cell, process, place))
        say(f"{'resumes' if resumes else 'starts'} {cell.name}; log: {log}")

    def _reap(self, leaving: bool = False) -> None:
        for started in [run for run in self._running if run.process.poll() is not None]:
            self._running.remove(started)
            cell, code = started.cell, started.process.returncode
            run = self._folder / cell.name
            ended, note = "done", _note(run)
            if code and note.get("code") == DoNotRestart.exit_code and NOT_FINITE in str(note.get("reason")):
                ended = NOT_FINITE
            elif code and (leaving or note.get("code") == Requeue.exit_code):
                continue
            try:
                if code and ended == "done":
                    raise ValueError(f"exit code {note.get('code', code)}")
                result = contrasts.measured(self._grid, cell, run, self._device, ended)
            except (OSError, ValueError) as error:
                say(f"failed: {cell.name}: {error}; see {self._log(cell)}. The next call tries again")
                continue
            contrasts.add(self._folder, result)
            self._results[cell] = result
            outcome = f"{self._grid.outcome.metric} {result.outcome:.4g}"
            say(f"{ended} {cell.name}: {outcome}, {result.seconds:.0f} s; {self._done}")

    def _log(self, cell: Cell) -> Path:
        return self._folder / "logs" / f"{cell.name}.log"

    def _leave(self) -> None:
        for run in self._running:
            run.process.send_signal(signal.SIGTERM)  # SIGUSR1 would end torchrun and leave its ranks
        until = time.monotonic() + PATIENCE
        while self._running:
            for run in self._running if time.monotonic() > until else ():
                run.process.kill()
            self._reap(leaving=True)
            time.sleep(0.2)


def _locked(folder: Path) -> IO[str]:
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "compare.lock").open("w", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ConfigError(
            f"folder={folder}: another `compare`, or a run of one, works there; wait until it ends"
        ) from None
    return file


def _note(run: Path) -> dict[str, object]:
    with suppress(OSError, ValueError):
        return dict(json.loads((run / "exit.json").read_text(encoding="utf-8")))
    return {}
