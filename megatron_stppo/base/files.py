"""Replace a file or a folder in one step: a reader sees the old one or the new one, never a part of it."""

import glob
import hashlib
import itertools
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_stppo.base.errors import ConfigError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a scratch file in the same folder, which becomes `path` when the block ends.

    If the block raises, `path` is unchanged and the scratch file is removed: a full disk needs its space.
    Example: with replacing(Path("a.json")) as scratch: scratch.write_text("{}") writes a.json.tmp first.
    """
    scratch = path.with_name(f"{path.name}.tmp")
    try:
        yield scratch
        os.replace(scratch, path)
    except BaseException:
        with suppress(OSError):
            scratch.unlink()
        raise


def replace_folder(scratch: Path, final: Path) -> None:
    """Rename the folder `scratch` to `final`. An older folder `final` is renamed first and then removed.

    A process that is killed in between may leave the older folder under the name FINAL.tmp-removed, which
    the next call removes.
    """
    older = final.with_name(f"{final.name}.tmp-removed")
    shutil.rmtree(older, ignore_errors=True)
    if final.exists():
        final.rename(older)
    scratch.rename(final)
    shutil.rmtree(older, ignore_errors=True)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unused(path: Path) -> Path:
    """Return `path`, or if it exists the first of PATH-2, PATH-3, .. that does not."""
    others = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(one for one in itertools.chain([path], others) if not one.exists())


def check_absent(field: str, path: Path) -> None:
    """Raise ConfigError if `path`, which a command is to create, exists."""
    if path.exists():
        raise ConfigError(f"{field}={path}: already exists; name a new folder, or remove it")


def scratch_of(folder: Path) -> Path:
    """Return the folder .NAME.HOST-PROCESS.partial beside `folder`, in which this process makes it."""
    return folder.with_name(f".{folder.name}.{socket.gethostname()}-{os.getpid()}.partial")


def make_scratch(field: str, folder: Path) -> Path:
    """Create the empty folder scratch_of(folder), and return it. Raises ConfigError if `folder` exists.

    Those of processes of this host that were killed are removed.
    """
    check_absent(field, folder)
    before, after = scratch_of(folder).name.rsplit(str(os.getpid()), 1)
    for left in folder.parent.glob(f"{glob.escape(before)}*{after}"):
        process = left.name.removeprefix(before).removesuffix(after)
        is_here = process.isdecimal()  # the name of another host may continue that of this one
        if is_here and (process == str(os.getpid()) or not Path("/proc", process).exists()):
            shutil.rmtree(left, ignore_errors=True)
    scratch_of(folder).mkdir(parents=True)
    return scratch_of(folder)


@contextmanager
def scratch_folder(field: str, folder: Path) -> Iterator[Path]:
    """Yield make_scratch(field, folder), which is removed if the block does not rename it."""
    partial = make_scratch(field, folder)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_empty(field: str, folder: Path) -> None:
    """Raise ConfigError if `folder`, which a command is to fill, contains anything."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{field}={folder}: is not empty; name a new folder")
