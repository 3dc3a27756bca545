"""The lock of a run's folder: only one process may write to it, or two would delete each other's checkpoints.

The lock is the file `lock` in the run's folder. Its text names the holder: host, process id and start time.
Three checks show whether the holder is alive, because none of them works on every system:

- The kernel's lock on the file, which ends with the process. Some network file systems have no such lock.
- On the holder's host: whether a process with this id and start time exists (process ids are reused).
- On another host: the file's modification time, which the holder renews every BEAT seconds. A machine that
  lost power leaves the text and, for some time, the file server's lock. A run that is requeued on another
  host checks the modification time for SILENT seconds, and takes the folder if it does not change.

The process holds the lock until it ends, because a thread may still write a checkpoint while Python exits.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from megatron_stppo.base.printing import say
from megatron_stppo.config import Config, ConfigError

LOCK = "lock"
BEAT = 2.0  # seconds between renewals of the file's time
SILENT = 60.0  # seconds without a renewal after which a holder on another host is dead; slow imports delay it
LEASE = 120.0  # seconds that a file server may keep the lock of a dead machine
LOOK = 1.0  # seconds between two checks of the lock
MOST_BYTES = 4096
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # the file system has no locks


@dataclass(frozen=True)
class LockOwner:
    """The process that holds the lock. Example: LockOwner("node7", 4711, "8c1b..-6e2a 81264")."""

    host: str
    process: int
    start: str  # the boot id, and the process's start in clock ticks after boot

    @staticmethod
    def this() -> LockOwner:
        return LockOwner(socket.gethostname(), os.getpid(), _start_of(os.getpid()))

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended. Only valid for a holder on this host."""
        return _start_of(self.process) != self.start


def take(config: Config) -> None:
    """Make this process the only writer of the run's folder until it ends. Call it on the first rank only.

    Raises ConfigError, which names the holder, if another process holds the lock.
    """
    folder = config.run.folder
    folder.mkdir(parents=True, exist_ok=True)
    began, first_seen = time.monotonic(), None
    while True:
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        free, holder, renewed = _is_free(file), _holder(file), os.fstat(file).st_mtime_ns
        waited = time.monotonic() - began
        if free and (holder is None or (holder.is_here and holder.is_dead) or waited > SILENT):
            break
        os.close(file)
        first_seen = first_seen or renewed
        if holder is None or holder.is_here or renewed != first_seen or waited > LEASE:
            raise ConfigError(_in_use(config, holder))
        if waited < LOOK:
            who = f"process {holder.process} on {holder.host}"
            say(f"{folder} is locked by {who}; waiting up to {LEASE:g} s to see whether it still runs")
        time.sleep(LOOK)
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(asdict(LockOwner.this())).encode() + b"\n", 0)
    atexit.register(_release, file, os.getpid())  # runs after handlers registered later, such as Saver's wait
    threading.Thread(target=_keep_renewing, args=(file,), name="run lock", daemon=True).start()


def _release(file: int, process: int) -> None:
    if os.getpid() == process:  # not in a fork
        os.ftruncate(file, 0)


def _in_use(config: Config, holder: LockOwner | None) -> str:
    who = f"process {holder.process} on {holder.host}" if holder else "another process"
    return (
        f"run.name={config.run.name}: {config.run.folder} is in use by {who}; wait until it ends, "
        "or give another run.name"
    )


def _is_free(file: int) -> bool:
    """Try to take the kernel's lock; return False if another process holds it.

    Returns True on file systems without locks too. Forked children do not inherit the lock.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in UNSUPPORTED:
            raise
    return True


def _holder(file: int) -> LockOwner | None:
    """Return the holder, or None if the last one ended normally, or was killed while it wrote its name."""
    try:
        return msgspec.json.decode(os.pread(file, MOST_BYTES, 0), type=LockOwner)
    except msgspec.MsgspecError:
        return None


def _start_of(process: int) -> str:
    """Return the boot id and start time of a process, or "" if there is no such process."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    fields = re.sub(r".*\)", "", text, flags=re.DOTALL).split()  # a name may hold spaces and parentheses
    return f"{boot} {fields[19]}" if fields[0] not in ("Z", "X") else ""


def _keep_renewing(file: int) -> None:
    while True:
        time.sleep(BEAT)
        with contextlib.suppress(OSError):  # a disk that is unavailable for a short time does no harm
            os.utime(file)
