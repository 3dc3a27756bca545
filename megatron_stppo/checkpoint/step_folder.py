"""The folder of a run's checkpoints: functions that publish, find and remove a step.

    step_12/         published; one rename made the complete folder visible
      MANIFEST.json    SHA-256 and size of every other file, and the versions that wrote them
      state.json, actor/..., critic/...
      episodes.msgpack   of an asynchronous run: those that have finished and are not trained on
    step_15.tmp-0/   being written, being removed, or left over from a run that died
    LATEST           name of the step to resume from; write an older name here to roll a run back

Files are flushed to disk before they become visible, and a step is renamed before it is deleted. Files that
are read here may be damaged or malicious: their size is limited, they are decoded into declared types, and a
file is only opened if its name was found in the folder.
"""

import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from megatron_stppo.base.files import replace_folder, replacing, sha256
from megatron_stppo.base.printing import one_line

log = logging.getLogger(__name__)
STEP = re.compile(r"step_(0|[1-9][0-9]{0,17})")
STATE, MANIFEST, LATEST, EPISODES = "state.json", "MANIFEST.json", "LATEST", "episodes.msgpack"
OWED = "owed"  # in state.json: the row of the iteration, if its evaluation failed and must be repeated
TOKENIZER = "tokenizer"  # in state.json: the digests of the tokenizer's files
MOST_BYTES = 64 * 2**20  # size limit of a JSON file; the manifest for 4,096 ranks is smaller than 2 MB
MOST_EPISODES = 64 * 2**30  # size limit of the file of episodes; 1,000 episodes of 10^6 tokens are 12 GB


class Damaged(ValueError):
    """Raised if a step differs from what was published; the message describes the first fault found."""


@dataclass(frozen=True)
class File:
    """A file's entry in the manifest."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """The contents of MANIFEST.json.

    Example: Manifest(12, {"state.json": File("9f86...", 412)}, "2c26...", {"torch": "2.13.0"},
    {"world": 4, "tensor": 2}).
    """

    step: int
    files: dict[str, File]  # by path relative to the step's folder, with "/"
    config_sha256: str
    versions: dict[str, str]
    layout: dict[str, int | None]  # the fields of Layout, and "world"


def publish(scratch: Path, final: Path, manifest: Manifest) -> None:
    """Rename `scratch` to `final`, and write its name to LATEST.

    The files in `scratch` must be on disk already. If a folder `final` exists, it is replaced; the run did
    not resume from it.
    """
    write_durably(scratch / MANIFEST, json.dumps(asdict(manifest), indent=1).encode())
    for path in (*(p for p in scratch.rglob("*") if p.is_dir()), scratch):
        flush(path)
    replace_folder(scratch, final)
    flush(final.parent)
    with replacing(final.parent / LATEST) as pointer:
        write_durably(pointer, final.name.encode())
    flush(final.parent)


def retire(folder: Path, step: int, before: int, keep: int, keep_every: int) -> None:
    """Remove old steps. Keep `step` and the newest steps up to `before`, `keep` in total, and multiples of
    `keep_every` among these.

    before: the step published or resumed from before `step`. Other steps after it are removed, because they
    were abandoned by a rollback or could not be read. Partly written folders are removed too.
    """
    line = [step, *(n for n in published(folder) if n <= before and n != step)]
    kept = {*line[:keep], *(n for n in line if keep_every and n % keep_every == 0)}
    for n in set(published(folder)) - kept:
        _remove(folder / f"step_{n}")
    for left in folder.glob("step_*.tmp-*"):
        shutil.rmtree(left)


def published(folder: Path) -> list[int]:
    """Return the published steps, newest first."""
    if not folder.is_dir():
        return []
    return sorted(
        (int(match[1]) for p in folder.iterdir() if (match := STEP.fullmatch(p.name))), reverse=True
    )


def candidates(folder: Path) -> list[int]:
    """Return the steps in the order in which they are tried: the one that LATEST names, then the others,
    newest first."""
    there = published(folder)
    if not there:
        return []
    try:
        named = latest(folder)
    except Damaged as error:
        log.warning("%s %s; the newest step is used", folder / LATEST, error)
        return there
    return [named, *(n for n in there if n != named)]


def number(name: str) -> int:
    """Return the step number of a folder's name. Example: number("step_12") = 12."""
    return int(name.removeprefix("step_"))


def latest(folder: Path) -> int:
    """Return the step that LATEST names. Raises Damaged if LATEST cannot be read or no such step exists."""
    try:
        match = STEP.fullmatch(_read(folder / LATEST, 64).decode("ascii").strip())
    except (OSError, ValueError) as error:
        raise Damaged(f"cannot be read ({_reason(error)})") from None
    if match is None or not (folder / match[0]).is_dir():
        raise Damaged("names a step that does not exist")
    return int(match[1])


def inspect(path: Path) -> dict[str, File]:
    """Return the files of a step's manifest, without reading them.

    Raises Damaged if the manifest is invalid, or the folder does not contain exactly these files.
    """
    try:
        manifest = msgspec.json.decode(_read(path / MANIFEST, MOST_BYTES), type=Manifest)
        there = _files(path) - {MANIFEST}
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"the manifest cannot be read ({_reason(error)})") from None
    if f"step_{manifest.step}" != path.name:
        raise Damaged(f"the manifest is that of step {manifest.step}")
    if STATE not in manifest.files:
        raise Damaged(f"the manifest lacks {STATE}")
    for name in sorted(there ^ manifest.files.keys()):
        raise Damaged(f"{name!r} is not in the manifest" if name in there else f"{name!r} is missing")
    return manifest.files


def compare(path: Path, files: Iterable[tuple[str, File]]) -> str:
    """Return a description of the first file that differs from its manifest entry; "" if all files match."""
    for name, file in files:
        try:
            if (path / name).stat().st_size != file.bytes or sha256(path / name) != file.sha256:
                return f"{name!r} does not match the manifest"
        except OSError as error:
            return f"{name!r} cannot be read ({_reason(error)})"
    return ""


def read_state(path: Path) -> dict[str, Any]:
    """Return the state of the training loop that a step contains."""
    state: dict[str, Any] = json.loads(_read(path / STATE, MOST_BYTES))
    return state


def read_episodes(path: Path) -> bytes:
    """Return the file of episodes of a step; b"" if it has none."""
    return _read(path / EPISODES, MOST_EPISODES) if (path / EPISODES).exists() else b""


def describe(path: Path) -> File:
    """Return the manifest entry of a file on disk."""
    return File(sha256(path), path.stat().st_size)


def write_durably(path: Path, data: bytes) -> None:
    """Write a file, and wait until its bytes are on disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove a step. It is renamed first, so that a partly deleted step is never visible."""
    gone = path.with_name(f"{path.name}.tmp-removed")
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone)


def _read(path: Path, most: int) -> bytes:
    if not stat.S_ISREG(path.lstat().st_mode):  # reading a pipe could block; a link could lead anywhere
        raise Damaged(f"{path.name} is not a plain file")
    size = path.stat().st_size  # read() reserves the memory that it is asked for
    with path.open("rb") as file:
        data = file.read(min(size, most) + 1)
    if len(data) > most:
        raise Damaged(f"{path.name} is larger than {most} bytes")
    return data


def _files(path: Path) -> set[str]:
    """Return the relative paths of all files under a folder. Raises Damaged for a link or a device."""
    names = set()
    for folder, folders, files in os.walk(path):
        for entry in (Path(folder, name) for name in (*folders, *files)):
            mode = entry.lstat().st_mode
            if stat.S_ISREG(mode):
                names.add(entry.relative_to(path).as_posix())
            elif not stat.S_ISDIR(mode):
                raise Damaged(f"{entry.relative_to(path).as_posix()!r} is not a plain file")
    return names


def _reason(error: BaseException) -> str:
    return one_line(error.strerror if isinstance(error, OSError) and error.strerror else str(error))
