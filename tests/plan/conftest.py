"""A separate process for plans, because a dry run replaces parts of torch until the process ends."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.plan import in_planner, real_step


@pytest.fixture(scope="package")
def planner() -> Iterator[ProcessPoolExecutor]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, in_planner.prepare) as alone:
        yield alone


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    real_step.write_model(folder)
    return folder


@pytest.fixture(scope="package")
def thin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with one layer: for what does not depend on their number."""
    folder: Path = tmp_path_factory.mktemp("thin")
    real_step.write_model(folder, num_hidden_layers=1)
    return folder
