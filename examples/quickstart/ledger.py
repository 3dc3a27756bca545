"""The stages of an example, which of them are done, and the lock of the folders that they write."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_stppo.base.files import replacing
from megatron_stppo.config import ConfigError


@dataclass(frozen=True)
class Stage:
    """One process. It is done if its product exists and was made with the same `key`."""

    name: str
    command: tuple[str, ...]
    product: Path
    key: str  # hash of everything the product depends on
    home: Path  # its stages.json has this stage; runs that use the same built files share it
    check: Callable[[], None] | None = None  # raises ConfigError before a process starts or a file is removed


class StageLedger:
    """stages.json: for each stage and product its last key, whether it finished, and its seconds over all
    attempts."""

    def __init__(self, home: Path) -> None:
        self._path = home / "stages.json"
        self.stages: dict[str, Any] = (
            json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        )

    def is_done(self, stage: Stage) -> bool:
        entry = self.stages.get(name_of(stage), {})
        return entry.get("key") == stage.key and entry["done"] and stage.product.exists()

    def was_begun(self, stage: Stage) -> bool:
        return self.stages.get(name_of(stage), {}).get("key") == stage.key

    def record(self, stage: Stage, seconds: float, done: bool) -> None:
        earlier = self.stages[name_of(stage)]["seconds"] if self.was_begun(stage) else 0.0
        self.stages[name_of(stage)] = {"key": stage.key, "done": done, "seconds": earlier + seconds}
        with replacing(self._path) as scratch:
            scratch.write_text(json.dumps(self.stages, indent=1), encoding="utf-8")

    def seconds(self, stage: Stage) -> float:
        return float(self.stages[name_of(stage)]["seconds"])


def name_of(stage: Stage) -> str:
    """Example: "build runs/quickstart/data/manifest.json"."""
    return f"{stage.name} {stage.product}"


@contextmanager
def alone(home: Path) -> Iterator[None]:
    """Lock the folder until the end. Raises ConfigError if another call of this program uses it."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / "stages.lock").open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{home} is in use by another call of this program; wait until that one ends"
            ) from None
        yield
