"""The metrics of a run: metrics.jsonl, the time per phase, and progress bars."""

import json
import logging
import math
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from torch.profiler import record_function

from megatron_stppo.base.printing import one_line
from megatron_stppo.cluster.deadlines import OTHER
from megatron_stppo.observe.reporters import Reporter, TensorBoard
from megatron_stppo.observe.run_files import truncate

Item = TypeVar("Item")
log = logging.getLogger(__name__)
QUIET_SECONDS = 5.0  # between the plain lines that replace a progress bar


class Metrics:
    """Writes one row per iteration on rank 0. The other ranks only measure.

    Every second is counted in exactly one phase, so the shares of a row sum to 1: an inner phase interrupts
    the outer one, and "other" is the time between phases. On a GPU, work is queued: a phase lasts until the
    host waits for its results, which every phase of the loop does at its end.

    Example: 3 s in phase("rollout") and 1 s outside give {"iteration": 7, ..., "seconds": 4.0,
    "seconds/rollout": 3.0, "seconds/other": 1.0, "share/rollout": 0.75, "share/other": 0.25}.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        resumed_at: int = 0,
        reporters: Sequence[Reporter] = (),
        nvtx: bool = False,
    ) -> None:
        """Open the files. Delete the rows after iteration `resumed_at`, if it is 0 all rows.

        TensorBoard and `reporters` get every row too, on rank 0; if one fails, its rows are dropped. `nvtx`:
        make each phase an NVTX range of that name.
        """
        self._reporters, self._nvtx = list(reporters) if rank == 0 else [], nvtx
        self._failed: set[Reporter] = set()
        self._file: TextIO | None = None
        self._phase = OTHER
        self._since = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / "metrics.jsonl"
            last = resumed_at or -1  # iteration 0 has a row if the run evaluates, and is repeated too
            truncate(path, last)
            self._file = path.open("a", encoding="utf-8")
            self._reporters.append(TensorBoard(folder / "tensorboard", purge_step=last + 1))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block as phase `name`, and name the block in traces."""
        outer = self._phase
        self._switch(name)
        try:
            with record_function(name), torch.cuda.nvtx.range(name) if self._nvtx else nullcontext():
                yield
        finally:
            self._switch(outer)

    def seconds(self, phase: str) -> float:
        """Return the seconds of a phase since the last row."""
        return self._seconds[phase]

    def log(self, iteration: int, values: Mapping[str, float | int | str | bool | None]) -> dict[str, Any]:
        """Write the iteration's row and set the clocks to 0. Returns the row on every rank."""
        self._switch(self._phase)
        row = {"iteration": iteration, **values, **self._times()}
        self._seconds.clear()
        row = {name: _json_number(value) for name, value in row.items()}
        if self._file is not None:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        for reporter in self._reporters:
            with self._surviving(reporter):
                reporter.write(row)
        return row

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        for reporter in self._reporters:
            with self._surviving(reporter):
                reporter.close()

    @contextmanager
    def _surviving(self, reporter: Reporter) -> Iterator[None]:
        """Context for calls of a reporter. The first that fails is a warning, the others are ignored."""
        try:
            yield
        except Exception as error:
            if reporter not in self._failed:
                what, why = type(reporter).__name__, f"{type(error).__name__}: {one_line(str(error))}"
                log.warning("%s has failed (%s); rows that it drops are in metrics.jsonl", what, why)
            self._failed.add(reporter)

    def _switch(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def _times(self) -> dict[str, float]:
        total = sum(self._seconds.values())
        named = {f"seconds/{phase}": seconds for phase, seconds in self._seconds.items()}
        shares = {f"share/{phase}": seconds / total for phase, seconds in self._seconds.items()}
        return {name: round(value, 4) for name, value in {"seconds": total, **named, **shares}.items()}


def peak_gib() -> float:
    """Return this process's peak memory in GiB: allocated on the GPU, or resident on a host without one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB


def _json_number(value: Any) -> Any:
    """Return a value that JSON can represent: None, which is written as null, for NaN and infinity."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def progress(
    items: Sequence[Item], description: str, enabled: bool = True, every: float | None = QUIET_SECONDS
) -> Iterator[Item]:
    """Yield the items and show how many are done. Ranks > 0 pass enabled=False. `every`: see counting()."""
    with counting(description, enabled, every) as show:
        for done, item in enumerate(items, 1):
            yield item
            show(done, len(items))


@contextmanager
def counting(
    description: str, enabled: bool = True, every: float | None = QUIET_SECONDS
) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows progress; call it with (done, total).

    It shows a bar on a terminal, else it prints a line at most once in `every` seconds. With every=None it
    prints no line, for callers that print their own (console.RowLines).
    """
    console = Console(stderr=True)
    if not enabled or (every is None and not console.is_terminal):
        yield lambda done, total: None
    elif console.is_terminal:
        columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(description, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        assert every is not None
        yield _plain(description, every, console)


def _plain(description: str, every: float, console: Console) -> Callable[[int, int], None]:
    started = shown = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= every or done == total:
            console.print(f"{description} {done}/{total}, {now - started:.0f} s", highlight=False)
            shown = now

    return show
