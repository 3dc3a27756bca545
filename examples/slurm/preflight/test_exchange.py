"""A rank or a measurement that fails is noticed by a deadline, and everything else continues. Also: what NVML
does not support is no error, and a GPU, if there is one, is examined and loaded."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pynvml
import pytest
import torch
import torch.distributed as dist

from examples.slurm.preflight import measure
from examples.slurm.preflight.exchange import Board, RankReport


def test_a_rank_that_publishes_nothing_is_missing_after_the_deadline() -> None:
    store = dist.HashStore()
    Board(store, 2, 3, 0.3).collect("alone", RankReport("c"))
    start = time.monotonic()
    assert Board(store, 0, 3, 0.3).collect("alone", RankReport("a")) == {
        0: RankReport("a"),
        2: RankReport("c"),
    }
    assert time.monotonic() - start < 5


def test_all_ranks_get_what_the_first_one_announces_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    assert Board(store, 0, 2, 0.3).announce("code", 2, int) == 2
    assert Board(store, 1, 2, 0.3).announce("code", 0, int) == 2
    monkeypatch.setattr("examples.slurm.preflight.exchange.GRACE", 0.1)
    with pytest.raises(TimeoutError, match=r"rank 1: the first rank did not answer \(never\)"):
        Board(store, 1, 2, 0.1).announce("never", 0, int)


def test_a_measurement_that_raises_or_hangs_leaves_a_fault_and_the_next_one_runs() -> None:
    report, end = RankReport("a"), threading.Event()

    def late(report: RankReport) -> None:
        report.numbers.append(("min_write", "a", 1.0))
        end.wait()
        report.numbers.append(("min_read", "a", 1.0))

    report.run("disk", 10, lambda _: Path("/none/x").read_text())
    report.run("network", 0.2, late)
    report.run("software", 10, lambda report, name: report.texts.update(torch=name), "2.13")
    sent = report.copy()
    end.set()
    assert sent.faults["disk"].startswith("FileNotFoundError: ")
    assert sent.faults["network"] == "no result within 0.2 s"
    assert (sent.numbers, sent.texts) == ([("min_write", "a", 1.0)], {"torch": "2.13"})


def test_groups_are_nodes_then_neighbours_in_a_ring_then_all_ranks() -> None:
    assert measure.groups(["a", "a", "b", "b"]) == [[(0, 1), (2, 3)], [(0, 1, 2, 3)]], (
        "two nodes are one pair"
    )
    assert measure.groups(["a", "b", "c"]) == [[(0, 1)], [(1, 2)], [(0, 2)], [(0, 1, 2)]]
    assert measure.groups(["a", "b", "c", "d"]) == [[(0, 1), (2, 3)], [(1, 2), (0, 3)], [(0, 1, 2, 3)]]
    assert measure.groups(["a"]) == [], "one rank has nobody to meet"


@pytest.mark.parametrize("count", range(3, 9))
def test_every_node_of_three_or_more_is_in_two_pairs_and_in_one_group_of_a_round(count: int) -> None:
    rounds = measure.groups([f"n{node}" for node in range(count)])
    pairs = [group for one in rounds for group in one if len(group) == 2]
    assert [sum(rank in pair for pair in pairs) for rank in range(count)] == [2] * count
    for one in rounds:
        members = [rank for group in one for rank in group]
        assert len(members) == len(set(members))


def test_bus_bandwidth_of_a_ring_of_eight() -> None:
    assert measure.bus_bandwidth(1_000_000_000, 0.01, 8) == pytest.approx(175.0)


def test_a_folder_is_measured_and_files_that_do_not_appear_are_named(tmp_path: Path) -> None:
    mine, other, report = tmp_path / "new" / "a", tmp_path / "new" / "b", RankReport("a")
    measure.measure_folder(report, mine, 3 * measure.BLOCK)
    assert mine.stat().st_size == 3 * measure.BLOCK
    assert [name for name, _, value in report.numbers if value > 0] == [
        "min_write",
        "min_read",
        "min_free_space",
    ]
    measure.wait_for_files(report, {"a": mine, "b": other}, 0.3)
    name, who, seconds = report.numbers[-1]
    assert (name, who, seconds > 0.3) == ("max_visible", "a", True)
    assert report.faults.pop("files of other nodes") == "does not see the file of b"
    other.touch()
    measure.wait_for_files(report, {"a": mine, "b": other}, 0.3)
    assert not report.faults


@pytest.mark.parametrize(
    ("chosen", "gpus", "ports", "rate"),
    [
        ("", 8, 12, 400.0),  # four of them serve storage
        ("", 1, 12, 50.0),
        ("^mlx5_1,mlx5_2", 8, 8, 400.0),
        ("=mlx5_1:1,mlx5_2", 8, 2, 100.0),
        ("mlx5_1", 8, 3, 150.0),
        ("mlx5_1:2", 8, 0, 0.0),
    ],
)
def test_active_ports_that_nccl_may_use_are_counted_up_to_50_gb_per_gpu(
    chosen: str, gpus: int, ports: int, rate: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_IB_HCA", chosen)
    found = [(f"mlx5_{n}", "400 Gb/sec (4X NDR)", "4: ACTIVE") for n in range(12)]
    for name, speed, state in [*found, ("mlx5_12", "2.5 Gb/sec", "1: DOWN")]:
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "rate").write_text(f"{speed}\n")
        (port / "state").write_text(f"{state}\n")
    measure.measure_adapters(report := RankReport("a"), gpus, tmp_path)
    assert report.numbers == [("GB/s of the adapters", "a", rate)]
    assert report.texts == {"network adapters": f"{ports} ports, {400 * ports} Gbit/s"}


def test_what_leaves_a_node_in_an_all_to_all() -> None:
    assert (measure.leaving(1000, 8, 16), measure.leaving(1000, 8, 8)) == (4000, 875)


def failing(code: int) -> None:
    raise pynvml.NVMLError(code)


def test_an_unsupported_query_is_none_and_a_lost_gpu_is_an_error() -> None:
    for code in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION):
        assert measure.supported(failing, code) is None
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        measure.supported(failing, pynvml.NVML_ERROR_GPU_IS_LOST)


def test_every_name_of_nvml_exists_in_the_installed_package() -> None:
    names = set(re.findall(r"pynvml\.(\w+)", Path(measure.__file__).read_text()))
    assert len(names) == 17
    assert [name for name in sorted(names) if not hasattr(pynvml, name)] == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_a_driver_and_a_speed_under_load() -> None:
    report = RankReport("a")
    measure.measure_gpu(report, "rank 0 (a)", 0)
    numbers = {name: value for name, _, value in report.numbers}
    assert report.texts["version of the driver"] and numbers["max_memory_used"] > 0
    assert numbers["min_compute"] > 1
