"""A rank or a measurement that fails is noticed by a deadline, and everything else continues."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_stppo.cluster.preflight import host, network
from megatron_stppo.cluster.preflight.exchange import Board, Measurements


def test_a_rank_that_publishes_nothing_is_missing_after_the_deadline() -> None:
    store = dist.HashStore()
    Board(store, 2, 3, 0.3).collect("facts", "of 2", str)
    start = time.monotonic()
    assert Board(store, 0, 3, 0.3).collect("facts", "of 0", str) == {0: "of 0", 2: "of 2"}
    assert time.monotonic() - start < 5


def test_all_ranks_get_what_the_first_one_announces_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    assert Board(store, 0, 2, 0.3).announce("code", 2, int) == 2
    assert Board(store, 1, 2, 0.3).announce("code", None, int) == 2
    monkeypatch.setattr("megatron_stppo.cluster.preflight.exchange.GRACE", 0.1)
    with pytest.raises(TimeoutError, match=r"rank 1: the first rank did not answer \(never\)"):
        Board(store, 1, 2, 0.1).announce("never", None, int)


def test_a_measurement_that_raises_or_hangs_leaves_an_error_and_the_next_one_runs() -> None:
    measure, end = Measurements(0.2), threading.Event()
    assert measure.run("disk", lambda: Path("/none/x").read_text()) is None
    assert not measure.hanging
    assert measure.run("network", end.wait) is None
    assert measure.run("clock", lambda: 3) == 3
    assert measure.hanging
    assert measure.errors["disk"].startswith("FileNotFoundError: ")
    assert measure.errors["network"] == "no result within 0.2 s"
    end.set()


def test_groups_are_nodes_then_neighbours_in_a_ring_then_all_ranks() -> None:
    assert network.groups(["a", "a", "b", "b"]) == [[(0, 1), (2, 3)], [(0, 1, 2, 3)]], (
        "two nodes are one pair"
    )
    assert network.groups(["a", "b", "c"]) == [[(0, 1)], [(1, 2)], [(0, 2)], [(0, 1, 2)]]
    assert network.groups(["a", "b", "c", "d"]) == [[(0, 1), (2, 3)], [(1, 2), (0, 3)], [(0, 1, 2, 3)]]
    assert network.groups(["a"]) == [], "one rank has nobody to meet"


@pytest.mark.parametrize("count", range(3, 9))
def test_every_node_of_three_or_more_is_in_two_pairs_and_in_one_group_of_a_round(count: int) -> None:
    rounds = network.groups([f"n{node}" for node in range(count)])
    pairs = [group for one in rounds for group in one if len(group) == 2]
    assert [sum(rank in pair for pair in pairs) for rank in range(count)] == [2] * count
    for one in rounds:
        members = [rank for group in one for rank in group]
        assert len(members) == len(set(members))


def test_bus_bandwidth_of_a_ring_of_eight() -> None:
    assert network.bus_bandwidth(1_000_000_000, 0.01, 8) == pytest.approx(175.0)


def test_a_folder_is_measured_and_files_that_do_not_appear_are_named(tmp_path: Path) -> None:
    mine, other = host.file_of(tmp_path / "new", "1", "a"), host.file_of(tmp_path / "new", "1", "b")
    speed = host.folder_speed(mine, 3 * host.BLOCK)
    assert mine.stat().st_size == 3 * host.BLOCK
    assert min(speed.write, speed.read, speed.free) > 0
    seconds, hidden = host.wait_for_files({"a": mine, "b": other}, 0.3)
    assert (hidden, seconds >= 0.3) == (("b",), True)
    other.touch()
    assert host.wait_for_files({"a": mine, "b": other}, 0.3)[1] == ()
