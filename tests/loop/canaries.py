"""A pickle that tells when it is read, put in the place of each file of a checkpoint in turn."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest

from megatron_stppo.launch import process


class Canary:
    """Unpickled, it creates a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.open, (str(self._file), os.O_CREAT)


def plant(checkpoints: Path, scratch: Path) -> list[str]:
    """The files with a canary in whose place the checkpoint was refused, sorted. Runs on one rank.

    Asserts that no canary was read.
    """
    process.prepare(engine=False)
    from megatron_stppo.checkpoint import saving

    alive = scratch / "alive"
    canary = pickle.dumps(Canary(alive))
    pickle.loads(canary)
    assert alive.exists(), "the canary works"
    alive.unlink()
    copy = scratch / "checkpoints"
    shutil.copytree(checkpoints, copy)
    refused = []
    for file in sorted(path for path in copy.rglob("*") if path.is_file() and path.name != "LATEST"):
        kept = file.read_bytes()
        file.write_bytes(canary)
        with pytest.raises(saving.CheckpointError):
            saving.load_weights(copy, "actor", [])
        assert not alive.exists(), f"{file} was unpickled"
        refused.append(str(file.relative_to(copy)))
        file.write_bytes(kept)
    return sorted(refused)
