"""The record of finished tasks of the study, in one file that is replaced atomically."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from megatron_stppo.atomic_replace import replacing

Status = Literal["running", "done", "interrupted", "failed"]


@dataclass(frozen=True)
class Entry:
    """The last attempt at a task, and the seconds of all attempts with this key."""

    key: str  # hash of everything that the result depends on
    status: Status
    seconds: float = 0.0
    reason: str = ""  # the reason why it ended, if not as planned


class StudyLedger:
    """The entries of all tasks.

    Example: ledger.begin("ppo-0", "a1") and ledger.end("ppo-0", "done", 120.0) write an entry to the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        given = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self._entries = {name: Entry(**entry) for name, entry in given.items()}

    def __getitem__(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def is_done(self, name: str, key: str) -> bool:
        entry = self._entries.get(name)
        return entry is not None and entry.key == key and entry.status == "done"

    def was_begun(self, name: str, key: str) -> bool:
        """Return whether the task was begun with the same key and not finished, so that it can be resumed."""
        entry = self._entries.get(name)
        return entry is not None and entry.key == key and entry.status != "done"

    def begin(self, name: str, key: str) -> None:
        before = self._entries.get(name)
        seconds = before.seconds if before is not None and before.key == key else 0.0
        self._put(name, Entry(key, "running", seconds))

    def end(self, name: str, status: Status, seconds: float, reason: str = "") -> None:
        """Record the end of an attempt. `seconds` is the time of this attempt alone."""
        entry = self._entries[name]
        self._put(name, replace(entry, status=status, seconds=entry.seconds + seconds, reason=reason))

    def _put(self, name: str, entry: Entry) -> None:
        self._entries[name] = entry
        with replacing(self._path) as scratch:
            scratch.write_text(json.dumps({name: asdict(e) for name, e in self._entries.items()}, indent=1))
