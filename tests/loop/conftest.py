from __future__ import annotations

from pathlib import Path

import pytest

from tests.loop import small_run


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(configuration, folder of its uninterrupted run) of six iterations on two ranks."""
    root = tmp_path_factory.mktemp("run")
    config = small_run.write(root)
    done = small_run.run("train", config, "run.name=straight")
    assert done.returncode == 0, done.stderr[-3000:]
    return config, root / "runs" / "straight"
