"""The connection file of a run: where the trainer listens, and the key of its replicas.

It is RUN_DIR/serving/connection.json. Every attempt (start or resume) of the trainer makes a new key.
Everyone who can read the file can connect as a replica, so only its owner can read it (0600, in a folder
0700). A replica on another machine reads it over the shared file system.
"""

import os
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from megatron_stppo.base.files import replacing
from megatron_stppo.config import ConfigError

FOLDER, FILE = "serving", "connection.json"
CONFIG = "config.yaml"  # in the same folder: the configuration of this attempt, for the replicas
MODULES = "modules"  # in the same folder: the path of the folder with the modules that `environment` names
MOST_BYTES = 4096
LOOK = 0.2  # seconds between two attempts to read the file
CONNECT = 10.0  # seconds until a connection must be open


@dataclass(frozen=True)
class Connection:
    """What a replica needs to connect to the trainer.

    Example: Connection("127.0.0.1", 41234, "5f0c9a..") with a key of 64 hexadecimal digits.
    """

    host: Annotated[str, Meta(pattern=r"\A[0-9A-Za-z.:%_-]{1,200}\Z")]  # an IP address
    port: Annotated[int, Meta(ge=1, le=65_535)]
    key: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")] = field(repr=False)  # of this attempt only

    @property
    def address(self) -> str:
        """Example: "127.0.0.1:41234"."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def path_of(folder: Path) -> Path:
    """Return the path of the connection file. folder: RUN_DIR."""
    return folder / FOLDER / FILE


def modules(folder: Path) -> Path | None:
    """Return the folder of the modules of a run's environment; None for a run without replicas.
    folder: RUN_DIR."""
    path = folder / FOLDER / MODULES
    return Path(path.read_text(encoding="utf-8")) if path.exists() else None


def make_folder(folder: Path) -> None:
    """Make the folder of the connection file, to which only this user has access. folder: RUN_DIR."""
    private = path_of(folder).parent
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    private.chmod(0o700)  # an older folder, or one that the umask has made differently


def write(folder: Path, connection: Connection) -> None:
    """Write the connection file, readable by this user only. It replaces that of an earlier attempt."""
    path = path_of(folder)
    make_folder(folder)
    with replacing(path) as scratch:
        scratch.unlink(missing_ok=True)  # it would keep its permissions
        with open(scratch, "xb", opener=partial(os.open, mode=0o600)) as file:
            file.write(msgspec.json.encode(connection) + b"\n")


def remove(folder: Path) -> None:
    """Remove the connection file at the end of a run, so that a replica that starts later waits or ends."""
    path_of(folder).unlink(missing_ok=True)


def find(folder: Path, deadline_seconds: float, waits: Callable[[], object] = lambda: None) -> Connection:
    """Return the connection of a run, as soon as its trainer listens there.

    A trainer that was killed leaves its file, which is ignored. waits: called once if the trainer does not
    listen yet. Raises ConfigError if it does not within `deadline_seconds`, and if others can read the file,
    another user owns it, or it is damaged.
    """
    ends, path, waited = time.monotonic() + deadline_seconds, path_of(folder), False
    while (connection := _read(path)) is None or not _listens(connection):
        if not waited:
            waits()
            waited = True
        if (left := ends - time.monotonic()) <= 0:
            gone = "is of a trainer that has ended, and no other one has started,"
            what = gone if connection else "does not exist"
            raise ConfigError(
                f"{path}: {what} after {deadline_seconds:.3g} s; start `megatron-stppo train` with "
                "serving.replicas for this run, or give the folder of another run"
            )
        time.sleep(min(LOOK, left))
    return connection


def _listens(connection: Connection) -> bool:
    try:
        with socket.create_connection((connection.host, connection.port), timeout=CONNECT):
            return True
    except OSError:
        return False


def _read(path: Path) -> Connection | None:
    """Return the content of the file, None if there is none."""
    try:
        # O_NONBLOCK: a FIFO in the place of the file must not block this process
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            _check_owner(path, os.fstat(file.fileno()))
            return msgspec.json.decode(file.read(MOST_BYTES), type=Connection)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be opened ({error.strerror}); the file is not a link, and "
            "a replica runs as the user of the trainer"
        ) from None
    except msgspec.MsgspecError:
        raise ConfigError(
            f"{path}: is not a connection file of this version; remove it and start `megatron-stppo train` "
            "again"
        ) from None


def _check_owner(path: Path, file: os.stat_result) -> None:
    me, others = os.geteuid(), file.st_mode & 0o077
    if not stat.S_ISREG(file.st_mode) or file.st_uid != me or others:
        raise ConfigError(
            f"{path}: is {stat.filemode(file.st_mode)} of user {file.st_uid}, and must be a file that only "
            f"user {me}, who runs this replica, can open; remove it, and start `megatron-stppo train` again "
            f"as user {me}"
        )
