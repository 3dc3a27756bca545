from __future__ import annotations

from pathlib import Path

import pytest

from tests.once import once
from tests.training.loop import small_run


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(configuration, folder of its uninterrupted run) of six iterations on two ranks."""
    root = once(tmp_path_factory, "straight", train)
    return root / "config.yaml", root / "runs" / "straight"


def train(root: Path) -> None:
    small_run.run("train", small_run.write(root), "run.name=straight").succeeded()
