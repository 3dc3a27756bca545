"""A pickle that leaves a trace when it is read, in place of each file of a checkpoint in turn."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest

from megatron_stppo.cluster.launch import process


class Canary:
    """An object that creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.open, (str(self._file), os.O_CREAT)


def plant(checkpoints: Path, scratch: Path) -> list[str]:
    """Replace each file by a canary. Return the sorted files for which the checkpoint was refused.

    Runs on one rank. Asserts that no canary was read.
    """
    process.prepare(engine=False)
    from megatron_stppo.checkpoint import loading

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
        with pytest.raises(loading.CheckpointError):
            loading.load_weights(copy, "actor", [])
        assert not alive.exists(), f"{file} was unpickled"
        refused.append(str(file.relative_to(copy)))
        file.write_bytes(kept)
    return sorted(refused)
