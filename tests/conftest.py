import gc
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

import tests.shapes  # noqa: F401  checks the shapes in the names of tensors

hypothesis.settings.register_profile("busy", deadline=None)  # an example may wait for a core
hypothesis.settings.load_profile("busy")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave what the tests import out of garbage collections: it stays, and looking at it takes 0.3 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def one_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails if collectives of the processes that the test starts would hang on GPUs."""
    from tests import orders

    monkeypatch.setenv(orders.FOLDER, str(tmp_path / "orders"))
    yield
    assert orders.findings(tmp_path / "orders") == []


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """The default process group, of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
