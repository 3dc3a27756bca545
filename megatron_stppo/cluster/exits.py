"""The end of a process: one line of text for the user, and the exit code."""

import atexit
import ctypes
import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from megatron_stppo.base.errors import CannotRecord, Requeue
from megatron_stppo.base.files import replacing

CANNOT_WRITE = 120
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the user's quota, the limit of a file's size
PATIENCE = 75.0  # seconds that a process gets to end; a save in progress gets 60, and deadlines.END is 90
# the same by exit code, where no save is in progress: SIGKILL may follow 30 s after SIGTERM
ENDS = {0: 10.0, Requeue.exit_code: 2.0}
LOOK = 0.5  # seconds between two checks of the parent
GRACE = 5.0  # seconds that a process has to end normally after its parent
PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that this process gets when the thread that started it ends


@contextmanager
def naming_a_full_disk(folder: Path) -> Iterator[None]:
    """Turn the error of a full disk into CannotRecord. folder: that in which the block writes, for an error
    that names no file."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise CannotRecord(
            Path(error.filename) if isinstance(error.filename, str) else folder, error
        ) from error


def say(error: Exception) -> None:
    """Print one line on the first rank of every node, because an error may occur on one node only."""
    if is_first_rank():
        print(f"megatron-stppo: {error}", file=sys.stderr)
    elif _given("LOCAL_RANK", "SLURM_LOCALID") == "0":
        print(f"megatron-stppo: rank {_given('RANK', 'SLURM_PROCID')}: {error}", file=sys.stderr)


def crash(error: Exception, code: int) -> int:
    """Print the traceback of an error that is not part of the interface. Return `code`."""
    report_to_torchrun(f"{type(error).__name__}: {error}", code)
    sys.excepthook(type(error), error, error.__traceback__)
    return code


def report_to_torchrun(message: str, exit_code: int) -> None:
    """Write the reason of a failure to torchrun's error file.

    torchrun prints this file below its own traceback, so that the reason is the last text on the console. It
    replaces the exit code by 1, which is why the file has it too. commands/python.py reads the file.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        reason = {"message": message, "timestamp": str(int(time.time())), "exit_code": exit_code}
        # suppressed: the rank's own line is on stderr. In one step: torchrun ends a rank while it writes.
        with suppress(OSError), replacing(Path(path)) as scratch:
            scratch.write_text(json.dumps(reason), encoding="utf-8")


def has_process_groups() -> bool:
    """Return whether this process has torch's process groups. A run that failed has not destroyed them."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def leave(code: int) -> NoReturn:
    """End the process with an exit code: wait for its threads, run its exit handlers, flush its output.

    If the output cannot be written, 0 becomes Python's exit code for this, CANNOT_WRITE.

    Python's normal shutdown would then tear the interpreter down. While there are process groups, this can
    replace the exit code by SIGABRT: the process aborts if one of gloo's threads releases a tensor at that
    moment (torch 2.13; PyTorch issue 190489). Files that are open and not flushed lose their last text.
    """
    try:
        with suppress(KeyboardInterrupt):
            threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                try:
                    stream.flush()
                except OSError:  # the reader has gone, or the disk is full
                    code = code or CANNOT_WRITE
        ctypes.CDLL(None).fflush(None)  # what C libraries such as NCCL have printed
    finally:
        os._exit(code)


def end_within(code: int, seconds: float = PATIENCE) -> None:
    """End the process with `code` after `seconds`, if it still exists then.

    Python waits for all threads before it ends. A thread of asyncio.to_thread in which an environment calls a
    server that never answers would keep the process, its GPU and the lock of the run's folder for ever.
    """

    def end() -> None:
        time.sleep(seconds)
        main = threading.main_thread()
        names = ", ".join(t.name for t in threading.enumerate() if t is not main and not t.daemon)
        with suppress(OSError, ValueError):
            what = f"threads did not end: {names}" if names else "the process did not end"
            print(f"megatron-stppo: after {seconds:g} s {what}", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    threading.Thread(target=end, name="end", daemon=True).start()


def has_ended(parent: int | None) -> bool:
    """Return whether the process that has started this one has ended; False if it is None."""
    return parent is not None and os.getppid() != parent


def end_after(parent: int) -> None:
    """End this process at most LOOK + GRACE seconds after its parent. A replica that serves ends earlier, and
    normally, because its connection ends.

    Until `end_normally` is called, the system kills the process at once: loading a large library holds
    Python's lock, for a minute or more from a slow disk, and no thread can run meanwhile.
    """

    def look() -> None:
        while not has_ended(parent):
            time.sleep(LOOK)
        time.sleep(GRACE)
        print(f"megatron-stppo: the trainer, process {parent}, has ended", file=sys.stderr, flush=True)
        os._exit(1)

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=look, name="parent", daemon=True).start()


def end_normally() -> None:
    """Leave the end of this process to itself. Called when everything is imported."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)


def is_first_rank() -> bool:
    return _given("RANK", "SLURM_PROCID") in (None, "0")


def _given(name: str, of_srun: str) -> str | None:
    """Return a variable of torchrun, or that of srun while `process.discover` has not run yet."""
    return os.environ.get(name, os.environ.get(of_srun))
