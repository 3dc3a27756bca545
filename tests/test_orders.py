"""The checker of orders finds what gloo forgives. The tests of layouts and of replicas use it too."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.orders import FOLDER, MAIN, Event, findings
from tests.ranks import run_ranks


def forgiven() -> None:
    """Use two groups in other orders than the other rank does, and one of them from a second thread."""
    groups, host = [dist.new_group([0, 1]) for _ in range(2)], dist.new_group(backend="gloo")

    def add(group: dist.ProcessGroup) -> dist.Work:
        return dist.all_reduce(torch.ones(1), group=group, async_op=True)

    for work in [add(group) for group in (groups if dist.get_rank() else reversed(groups))]:
        work.wait()
    for group in (groups[0], host):
        second = threading.Thread(target=lambda group=group: add(group).wait(), name="second")
        second.start()
        second.join()


def test_contradictory_orders_and_another_thread_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "orders"))
    run_ranks(forgiven, 2)
    *threads, circle = findings(tmp_path / "orders")
    world = circle.split(": ")[1].split("/")[0]
    assert threads == [f"thread second, group {world}/1, rank {n}: allreduce, 1 times" for n in (0, 1)]
    assert circle.startswith("contradictory orders: ") and circle.count("/1 call 1") == 1


def test_a_run_of_one_order_has_no_findings(one_order: None) -> None:
    run_ranks(in_order, 2)


def in_order() -> None:
    group = dist.new_group([0, 1])
    for work in [dist.all_reduce(torch.ones(1), group=g, async_op=True) for g in (group, None)]:
        work.wait()


def written(folder: Path, *ranks: list[tuple[str, int, int, str, str, int]]) -> list[str]:
    """Return the findings in ranks that call these (group, its size, rank in it, kind, what, batch)."""
    for number, calls in enumerate(ranks):
        events = [Event(*call, MAIN, True, batch) for *call, batch in calls]
        (folder / str(number)).write_text("".join(json.dumps(event) + "\n" for event in events))
    return findings(folder)


def test_other_collectives_of_one_group_are_found(tmp_path: Path) -> None:
    kinds = ("broadcast", "reduce"), ("broadcast", "allreduce")
    ranks = [[("a", 2, rank, kind, "", 0) for kind in kinds[rank]] for rank in (0, 1)]
    assert written(tmp_path, *ranks) == ["group a, call 1: reduce ; allreduce "]


def test_a_circle_of_three_groups_is_found(tmp_path: Path) -> None:
    pairs = ("a", 0, "b", 0), ("b", 1, "c", 0), ("c", 1, "a", 1)
    ranks = [[(group, 2, rank, "barrier", "", 0) for group, rank in (pair[:2], pair[2:])] for pair in pairs]
    (circle,) = written(tmp_path, *ranks)
    assert all(f"{group} call 1 < " in circle for group in "abc")


@pytest.mark.parametrize(("batch", "found"), [(1, 0), (0, 1)])
def test_two_ranks_that_both_send_first_must_send_and_receive_together(
    tmp_path: Path, batch: int, found: int
) -> None:
    ranks = [[("a", 2, rank, kind, str(1 - rank), batch) for kind in ("send", "recv")] for rank in (0, 1)]
    assert len(written(tmp_path, *ranks)) == found
