"""Work that several files of tests need, done once although the files run in several processes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def once(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], object]) -> Path:
    """Return a folder of this test run after `fill(folder)`, which only the first process calls.

    Example: once(tmp_path_factory, "model", build_model) / "config.json".
    """
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # one of several processes, with folders in one
        root = root.parent
    folder = root / name
    with FileLock(root / f"{name}.lock"):
        if not (root / f"{name}.done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            fill(folder)
            (root / f"{name}.done").touch()
    return folder
