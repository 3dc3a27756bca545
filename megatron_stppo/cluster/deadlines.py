"""The watchdog: a deadline for every phase of a run.

A rank that exceeds the deadline of its phase reports what it and the others are doing, and ends. It has two
threads beside the main one, and a timer outside Python. Each covers cases that the others cannot detect:

- One thread writes a heartbeat every BEAT seconds to heartbeats/rank-N.json of the run: the phase, and the
  position of the main thread. A stopped or dead rank writes none, which the other ranks can detect. It is a
  file because a store would live in one of the processes that may be stopped.
- One thread waits for the deadline, reports the stacks of this rank's threads, compares the heartbeats of all
  ranks (of more than READERS ranks, some do), and ends the process. gloo releases the GIL while it waits, so
  that this thread can run.
- faulthandler's timer ends the process GRACE seconds after the deadline, and prints the stacks on stderr. It
  is for a thread that never releases the GIL, and for a file system of the run that no longer responds.

The launcher ends processes that cannot end themselves: torchrun sends SIGTERM, which has no effect on a
stopped process, and 30 s later SIGKILL, which has.

The report names the collectives that this rank has issued and that have not ended. A collective of GPUs runs
on the device, and the thread that issued it may be anywhere, so that the stack of a thread does not show it.
torch's flight recorder does: it keeps the last 2,000 collectives of each backend (TORCH_FR_BUFFER_SIZE; 0
turns it off). It has none that do not go through torch, such as those of vLLM's own NCCL communicator.
"""

import contextlib
import faulthandler
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

from megatron_stppo.base.files import replacing

log = logging.getLogger(__name__)
START_UP = "start_up"  # until the first phase begins
OTHER = "other"  # between two phases
BEAT = 2.0  # seconds between heartbeats
SILENT = 3 * BEAT  # seconds without a heartbeat after which a rank counts as stopped or dead
STDERR = 2  # faulthandler takes a file descriptor
GRACE = 20.0  # seconds from a deadline to the end by the timer; the report uses SILENT of them
# At most so many ranks read all heartbeats: more would keep the run's file system busy for minutes.
READERS = 64
# Seconds from an error of the run until the timer ends the process, which loses the exit code. More than an
# unfinished checkpoint may still take (saving.LAST_SECONDS), less than srun waits (attempt.sh).
END = 90.0
# A thread waits for other ranks or for its GPU, which may be in a collective, if one of its INNERMOST frames
# is in one of these files. A wait by .item() or .tolist() has no frame.
WAITS = (
    *("/torch/distributed/", "/vllm/distributed/", "/p2p_communication.py"),
    *("/torch/cuda/streams.py", "/torch/cuda/__init__.py", "/vllm/v1/worker/gpu/async_utils.py"),
)
INNERMOST = 4
# torch's records of NCCL's collectives, which a CPU build lacks, and of others
RECORDS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
SHOWN = 3  # collectives of a backend
COALESCED = "nccl:coalesced"
PACKAGE = f"/{__name__.partition('.')[0]}/"


@dataclass(frozen=True)
class Beat:
    """A rank's heartbeat. Example: Beat(17, 4, "score", "model/pipeline.py:88 forward", False)."""

    number: int  # grows with every heartbeat
    entered: int  # phases entered so far; equal on all ranks that are in the same phase
    phase: str
    at: str  # position of the main thread
    waits: bool  # whether it is seen to wait for other ranks or for its GPU


class Watchdog:
    """Context manager around a run that ends the process when a phase exceeds its deadline.

    The run starts in phase start_up. Between two phases it is in phase other. If the run raises, the process
    ends END seconds later, even if some of its threads do not end.

    deadlines: seconds by name of phase. folder: the run's folder, shared by all ranks.
    """

    def __init__(self, folder: Path, deadlines: Mapping[str, float], rank: int, world: int) -> None:
        self._folder, self._deadlines = folder / "heartbeats", dict(deadlines)
        self._rank, self._world = rank, world
        self._main = threading.get_ident()
        self._number = self._entered = 0
        self._ended = threading.Event()
        self._begin(START_UP)

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._rank == 0:  # heartbeats of an earlier attempt; every rank writes a new one
            for old in self._folder.glob("rank-*.json"):
                old.unlink(missing_ok=True)
        for loop in (self._keep_beating, self._wait):
            threading.Thread(target=loop, name=f"deadlines{loop.__name__}", daemon=True).start()
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()
        if kind is not None:
            faulthandler.dump_traceback_later(END, exit=True, file=STDERR)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Apply the deadline of phase `name` to the block. After the block, the deadline of the enclosing
        phase starts again."""
        outer = OTHER if self._now[0] == START_UP else self._now[0]
        self._begin(name)
        try:
            yield
        finally:
            self._begin(outer)

    def _begin(self, phase: str) -> None:
        seconds = self._deadlines[phase]
        self._entered += 1
        # a single assignment, so that other threads never read a phase with another phase's deadline
        self._now = (phase, seconds, time.monotonic() + seconds)
        faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=STDERR)

    def _keep_beating(self) -> None:
        while not self._ended.wait(BEAT if self._number else 0):
            self._number += 1
            at, waits = place(sys._current_frames().get(self._main))
            beat = Beat(self._number, self._entered, self._now[0], at, waits)
            path = self._folder / f"rank-{self._rank}.json"
            # OSError: the disk is full; this rank has no heartbeat until there is space
            with contextlib.suppress(OSError), replacing(path) as scratch:
                scratch.write_text(json.dumps(asdict(beat)), encoding="utf-8")

    def _wait(self) -> None:
        while not self._ended.wait(min(BEAT, max(0.0, self._now[2] - time.monotonic()))):
            phase, seconds, due = self._now
            if time.monotonic() >= due:
                self._expire(phase, seconds)

    def _expire(self, phase: str, seconds: float) -> None:
        """Report the stacks, if this rank reads also which rank is late, and the unfinished collectives.

        These come last, because reading them may never end. End the process with exit code 1.
        """
        said = f"rank {self._rank}: phase {phase} exceeded its deadline of {seconds:g} s (deadlines.{phase})"
        _print(said)  # before anything that could block
        log.critical("%s; stacks of its threads:\n%s", said, stacks())
        reads = is_reader(self._rank, self._world)
        first = self._beats() if reads else []
        time.sleep(SILENT)
        if reads:
            _say(f"{said}: {verdict(first, self._beats())}")
        _say(f"rank {self._rank}: collectives that have not ended: {unfinished()}")
        if not reads:
            time.sleep(GRACE - SILENT - BEAT)  # if it ended first, the launcher would kill those that read
        os._exit(1)

    def _beats(self) -> list[Beat | None]:
        return [read(self._folder / f"rank-{rank}.json") for rank in range(self._world)]


def _say(text: str) -> None:
    log.critical("%s", text)
    _print(text)


def _print(text: str) -> None:
    with contextlib.suppress(OSError):  # the disk of stderr is full, or its pipe has no reader
        print(f"megatron-stppo: {text}", file=sys.stderr, flush=True)


def is_reader(rank: int, world: int) -> bool:
    """Return whether a rank reads the heartbeats of all. Example: all of 64 ranks; every 16th of 1,024."""
    return rank % -(-world // READERS) == 0


def read(path: Path) -> Beat | None:
    """Return the heartbeat in the file, or None if there is none yet."""
    with contextlib.suppress(FileNotFoundError):
        return Beat(**json.loads(path.read_text(encoding="utf-8")))
    return None


def verdict(before: Sequence[Beat | None], after: Sequence[Beat | None]) -> str:
    """Return which ranks the others wait for, and the position of every rank.

    `before` and `after` are the heartbeats of ranks 0, 1, .. at two times. The ranks that are late are those
    without a new heartbeat. If there are none, they are the ranks that have entered fewer phases than others.
    If there are none either, they are the ranks that are not seen to wait.

    Example: "rank 1 is silent since phase score. rank 0: score, model/pipeline.py:9 score > ...; rank 1: .."
    """
    seen = {rank: beat for rank, beat in enumerate(after) if beat is not None}
    never = [rank for rank in range(len(after)) if rank not in seen]
    silent = [rank for rank, beat in seen.items() if before[rank] == beat]
    alive = {rank: beat for rank, beat in seen.items() if rank not in silent}
    last = max((beat.entered for beat in alive.values()), default=0)
    behind = [rank for rank, beat in alive.items() if beat.entered < last]
    busy = [rank for rank, beat in alive.items() if not beat.waits]
    if silent or never:
        parts = [f"rank {rank} has been silent since phase {seen[rank].phase}" for rank in silent]
        parts += [f"rank {rank} never wrote a heartbeat" for rank in never]
    elif behind:
        parts = [f"rank {rank} is still in phase {alive[rank].phase}" for rank in behind]
    elif len(busy) in (0, len(alive)):
        parts = ["no rank is seen to be later than the others: compare what they say of their collectives"]
    else:
        parts = [f"rank {rank} is in {alive[rank].at} and is not seen to wait as others are" for rank in busy]
    where = "; ".join(f"rank {rank}: {beat.phase}, {beat.at}" for rank, beat in seen.items())
    return f"{', '.join(parts)}. {where}"


def place(frame: FrameType | None) -> tuple[str, bool]:
    """Return (position of a thread, whether it is seen to wait for other ranks or for its GPU).

    The position is the innermost frame of this package, and the innermost frame of all.
    Example: ("training/update/actor_step.py:90 actor_step > torch/_ops.py:12 __call__", False).
    """
    if frame is None:
        return "no thread", False
    frames = [caller for caller, _ in traceback.walk_stack(frame)]
    files = [caller.f_code.co_filename for caller in frames[:INNERMOST]]
    own = next((caller for caller in frames if PACKAGE in caller.f_code.co_filename), frame)
    said = [
        f"{'/'.join(Path(f.f_code.co_filename).parts[-2:])}:{f.f_lineno} {f.f_code.co_name}"
        for f in dict.fromkeys([own, frame])
    ]
    return " > ".join(said), any(part in file for file in files for part in WAITS)


def stacks() -> str:
    """Return the stacks of all Python threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def unfinished() -> str:
    """Return the oldest collectives that have not ended.

    Example: "nccl:all_reduce 812 of TENSOR_MODEL_PARALLEL_GROUP". It says so if there are none, and if a
    record cannot be read. Reading can take long or never end: torch queries the GPU for the state of each
    collective, and meanwhile other threads of Python do not run.
    """
    module = sys.modules.get("torch._C._distributed_c10d")  # None before torch is imported
    unended: list[str] = []
    for name in RECORDS:
        if hasattr(module, name):
            try:
                record = json.loads(getattr(module, name)())
                unended += oldest(record.get("entries", []))  # without the key if there are none
            except (LookupError, TypeError, ValueError) as error:  # torch has changed
                unended.append(f"{name[1:]} cannot be read ({type(error).__name__}: {error})")
    return ", ".join(unended) or "none is recorded"


def oldest(entries: Iterable[dict[str, Any]]) -> list[str]:
    """Return "operation number of group" of the oldest entries that have not ended, at most SHOWN.

    The number of a collective is equal on all ranks of its group. Sends and receives have numbers of their
    own, which each rank counts.
    """
    listed = list(entries)
    # The state of an operation in a batch is recorded for the batch alone.
    batches = {_number_in_group(entry) for entry in listed if entry["profiling_name"] == COALESCED}
    left = [
        entry
        for entry in listed
        if not entry["retired"]
        and entry["state"] != "completed"
        and (entry["profiling_name"] == COALESCED or _number_in_group(entry) not in batches)
    ]
    left.sort(key=lambda entry: entry["time_created_ns"])
    return [_name(entry) for entry in left[:SHOWN]]


def _number_in_group(entry: dict[str, Any]) -> tuple[str, bool, int]:
    """Return (group, whether it is a send or a receive, number)."""
    number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    return entry["process_group"][0], entry["is_p2p"], number


def _name(entry: dict[str, Any]) -> str:
    group, description = entry["process_group"]
    shown = f"group {group}" if description in ("", "undefined") else description
    return f"{entry['profiling_name']} {_number_in_group(entry)[2]} of {shown}"
