from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from megatron_stppo.config import ConfigError
from megatron_stppo.config.file import load
from megatron_stppo.observe.metrics import Metrics
from megatron_stppo.observe.observer import profiled


def names(trace: Path) -> list[str]:
    return [event.get("name", "") for event in json.loads(gzip.open(trace).read())["traceEvents"]]


def test_a_window_of_iterations_is_traced_with_its_phases(tmp_path: Path) -> None:
    metrics, done = Metrics(tmp_path, 1), []
    for iteration in profiled(range(5), (2, 3), tmp_path / "profile"):
        with metrics.phase(f"phase-{iteration + 1}"):
            torch.ones(2) + 1
        done.append(iteration)
    assert done == [0, 1, 2, 3, 4]
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "from-iteration-2.json.gz"
    found = names(trace)
    assert [name for name in found if name.startswith("phase-")] == ["phase-2", "phase-3"]
    assert found.count("aten::add") == 2


def test_a_run_that_ends_inside_the_window_keeps_its_trace(tmp_path: Path) -> None:
    for iteration in profiled(range(9), (2, 9), tmp_path):
        if iteration == 3:
            break
    assert [path.name for path in tmp_path.iterdir()] == ["from-iteration-2.json.gz"]


@pytest.mark.parametrize(("first", "window"), [(0, (4, 9)), (3, (2, 9))])
def test_a_window_that_exceeds_the_run_is_traced_up_to_the_end_of_the_run(
    tmp_path: Path, first: int, window: tuple[int, int]
) -> None:
    """One run ends in the window, and one is resumed inside it."""
    assert list(profiled(range(first, 5), window, tmp_path)) == list(range(first, 5))
    assert [path.name for path in tmp_path.iterdir()] == ["from-iteration-4.json.gz"]


def test_tracing_is_off_by_default(tmp_path: Path) -> None:
    assert list(profiled(range(3), None, tmp_path)) == [0, 1, 2]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("window", ["[0,2]", "[3,2]"])
def test_a_window_out_of_order_is_refused(tmp_path: Path, window: str) -> None:
    (tmp_path / "run.yaml").write_text("model: {path: m}\n")
    with pytest.raises(ConfigError, match=r"^telemetry: profile=\[.*give \[first, last\]"):
        load(tmp_path / "run.yaml", [f"telemetry.profile={window}"])
