"""The folder of a run's checkpoints: how a step is published, found again and removed.

    step_12/         published: one rename made it visible, whole
      MANIFEST.json    every other file's sha256 and size, and what wrote them
      state.json, actor/..., critic/...
    step_15.tmp-0/   being written, being removed, or left by a run that died
    LATEST           name of the step to go on from; an older one's name rolls a run back

What becomes visible was flushed to disk before; what is removed is renamed before. What is read here may be
damaged or hostile: it is bounded, decoded as declared types, and no name in it is ever opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

STEP = re.compile(r"step_(0|[1-9][0-9]{0,17})")
STATE, MANIFEST, LATEST = "state.json", "MANIFEST.json", "LATEST"
MOST_BYTES = 64 * 2**20  # of a JSON file; 4,096 ranks' files take less than 2 MB of manifest


class CheckpointError(RuntimeError):
    """No checkpoint can be read, or none can be written any more; the message says why. Starting again would
    fail again: the door turns it into exit code 93."""


class Damaged(ValueError):
    """A step that does not hold what was published; the message names the first fault found."""


@dataclass(frozen=True)
class File:
    """What the manifest says of a file."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """Example: Manifest(12, {"state.json": File("9f86...", 412)}, "2c26...", {"torch": "2.13.0"},
    {"world": 4, "tensor": 2})."""

    step: int
    files: dict[str, File]  # by path under the step's folder, with "/"
    config_sha256: str
    versions: dict[str, str]
    layout: dict[str, int | None]  # the mesh's axes, and "world"


def publish(scratch: Path, final: Path, manifest: Manifest) -> None:
    """Makes `scratch`, whose files are on disk, visible as `final`, and LATEST name it.

    A step of that name that is there already goes; the caller goes on from another one.
    """
    write_durably(scratch / MANIFEST, json.dumps(asdict(manifest), indent=1).encode())
    for path in (*(p for p in scratch.rglob("*") if p.is_dir()), scratch):
        flush(path)
    if final.exists():
        _remove(final)
    scratch.rename(final)
    flush(final.parent)
    pointer = final.parent / f"{LATEST}.tmp"
    write_durably(pointer, final.name.encode())
    os.replace(pointer, final.parent / LATEST)
    flush(final.parent)


def retire(folder: Path, step: int, before: int, keep: int, keep_every: int) -> None:
    """Keeps `step`, the newest steps up to `before`, `keep` in all, and those that `keep_every` divides.

    before: the step published or resumed from before this one. What lies after it belongs to a course that
    was left, or could not be read. Half-written folders go too.
    """
    line = [step, *(n for n in found(folder) if n <= before and n != step)]
    kept = {*line[:keep], *(n for n in line if keep_every and n % keep_every == 0)}
    for n in set(found(folder)) - kept:
        _remove(folder / f"step_{n}")
    for left in folder.glob("step_*.tmp-*"):
        shutil.rmtree(left)


def found(folder: Path) -> list[int]:
    """The published steps, newest first."""
    if not folder.is_dir():
        return []
    return sorted(
        (int(match[1]) for p in folder.iterdir() if (match := STEP.fullmatch(p.name))), reverse=True
    )


def number(name: str) -> int:
    """Example: number("step_12") = 12."""
    return int(name.removeprefix("step_"))


def latest(folder: Path) -> int:
    """The step that LATEST names. Raises Damaged if it names none that is there."""
    try:
        match = STEP.fullmatch(_read(folder / LATEST, 64).decode("ascii").strip())
    except (OSError, ValueError) as error:
        raise Damaged(f"cannot be read ({_reason(error)})") from None
    if match is None or not (folder / match[0]).is_dir():
        raise Damaged("names no step that is there")
    return int(match[1])


def inspect(path: Path) -> dict[str, File]:
    """The manifest's files, without having read them. Raises Damaged unless they are all that is there."""
    try:
        manifest = msgspec.json.decode(_read(path / MANIFEST, MOST_BYTES), type=Manifest)
        there = _files(path) - {MANIFEST}
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"manifest unreadable ({_reason(error)})") from None
    if f"step_{manifest.step}" != path.name:
        raise Damaged(f"the manifest is that of step {manifest.step}")
    if STATE not in manifest.files:
        raise Damaged(f"the manifest lacks {STATE}")
    for name in sorted(there ^ manifest.files.keys()):
        raise Damaged(f"{name!r} is not in the manifest" if name in there else f"{name!r} is missing")
    return manifest.files


def compare(path: Path, files: Iterable[tuple[str, File]]) -> str:
    """The first of the files that is not what the manifest says, and how; empty if all are."""
    for name, file in files:
        try:
            if (path / name).stat().st_size != file.bytes or sha256(path / name) != file.sha256:
                return f"{name!r} does not match the manifest"
        except OSError as error:
            return f"{name!r} cannot be read ({_reason(error)})"
    return ""


def read_state(path: Path) -> dict[str, Any]:
    """The loop's state of a step."""
    state: dict[str, Any] = json.loads(_read(path / STATE, MOST_BYTES))
    return state


def describe(path: Path) -> File:
    """What a manifest says of a file that lies there."""
    return File(sha256(path), path.stat().st_size)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def flush(path: Path) -> None:
    """Waits until a file's bytes, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """A step is visible whole or not at all, also while it goes."""
    gone = path.with_name(f"{path.name}.tmp-removed")
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone)


def _read(path: Path, most: int) -> bytes:
    if not stat.S_ISREG(path.lstat().st_mode):  # a pipe would be waited for, a link leads anywhere
        raise Damaged(f"{path.name} is not a plain file")
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise Damaged(f"{path.name} is larger than {most} bytes")
    return data


def _files(path: Path) -> set[str]:
    """The files under a folder, by their paths in it. Raises Damaged for a link or a device."""
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
    """One line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:200]
