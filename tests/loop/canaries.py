"""A pickle that tells when it is read, put in the place of each file of a checkpoint in turn."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest

from megatron_stppo.parallel import cpu_platform


class Canary:
    """Unpickled, it creates a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.open, (str(self._file), os.O_CREAT)


def plant(checkpoints: Path, scratch: Path) -> dict[str, str]:
    """{file: why the checkpoint with a canary in its place was refused}. Runs on one rank.

    Asserts that no canary was read, by loading all or by loading weights, and that the checkpoint without one
    is accepted.
    """
    if cpu_platform.needed():
        cpu_platform.install()
    from megatron_stppo.model import checkpoint

    alive = scratch / "alive"
    canary = pickle.dumps(Canary(alive))
    pickle.loads(canary)
    assert alive.exists(), "the canary works"
    alive.unlink()
    copy = scratch / "checkpoints"
    shutil.copytree(checkpoints, copy)
    assert checkpoint.load(copy, {}) is not None
    refused = {}
    for file in sorted(path for path in copy.rglob("*") if path.is_file() and path.name != checkpoint.LATEST):
        kept = file.read_bytes()
        file.write_bytes(canary)
        for load in (lambda: checkpoint.load(copy, {}), lambda: checkpoint.load_weights(copy, "actor", [])):
            with pytest.raises(checkpoint.CheckpointError) as raised:
                load()
        assert not alive.exists(), f"{file} was unpickled"
        refused[str(file.relative_to(copy))] = str(raised.value)
        file.write_bytes(kept)
    return refused
