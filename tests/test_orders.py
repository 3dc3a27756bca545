"""The checker of orders finds what gloo forgives. The tests of layouts and of replicas use it too."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from vllm.distributed import parallel_state

from megatron_stppo.cluster.launch.vllm_environment import SHARED_MEMORY
from tests.orders import FOLDER, MAIN, Event, findings
from tests.ranks import run_ranks


def forgiven() -> None:
    """Use two groups in other orders than the other rank does; and from a second thread one of them, and that
    of an engine, which adds up over shared memory."""
    groups, host = [dist.new_group([0, 1]) for _ in range(2)], dist.new_group(backend="gloo")
    os.environ["VLLM_DIST_IDENT"] = name = os.environ["MASTER_PORT"]
    engine = parallel_state.GroupCoordinator([[0, 1]], dist.get_rank(), "gloo", True, group_name="tp")
    dist.barrier()  # both have mapped the memory
    for path in SHARED_MEMORY.glob(f"{name}-*"):
        path.unlink(missing_ok=True)

    def add(group: dist.ProcessGroup) -> dist.Work:
        return dist.all_reduce(torch.ones(1), group=group, async_op=True)

    for work in [add(group) for group in (groups if dist.get_rank() else reversed(groups))]:
        work.wait()
    waits = [lambda group=group: add(group).wait() for group in (groups[0], host)]
    for call in (*waits, lambda: engine.all_reduce(torch.ones(2))):
        second = threading.Thread(target=call, name="second")
        second.start()
        second.join()


def test_contradictory_orders_and_another_thread_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "orders"))
    run_ranks(forgiven, 2)
    *threads, circle = findings(tmp_path / "orders")
    world = circle.split(": ")[1].split("/")[0]
    places = [f"{world}/{group}, rank {n}" for group in (1, 4) for n in (0, 1)]  # 4: the engine's
    assert sorted(threads) == [f"thread second, group {place}: allreduce, 1 times" for place in places]
    assert circle.startswith("contradictory orders: ") and "/1 call 1" in circle and "/2 call 1" in circle


BOTH = [[("send", "1"), ("recv", "1")], [("send", "0"), ("recv", "0")]]


@pytest.mark.parametrize(
    ("ranks", "batch", "found"),
    [
        pytest.param([[("reduce", "")], [("allreduce", "")]], 0, "call 0: reduce ; allreduce ", id="kind"),
        pytest.param([[("reduce", "1")], [("reduce", "2")]], 0, "call 0: reduce 1; reduce 2", id="shape"),
        pytest.param([[("barrier", "")], []], 0, "call 0: barrier ; nothing", id="number"),
        pytest.param(BOTH, 0, "contradictory orders", id="both send first"),
        pytest.param(BOTH, 1, "", id="both send and receive together"),
        pytest.param([BOTH[0][:1], []], 0, "group a, 0 to 1: +1 sent without", id="nobody receives"),
        pytest.param([[], BOTH[1][1:]], 0, "group a, 0 to 1: -1 sent without", id="nobody sends"),
    ],
)
def test_ranks_that_do_not_fit_are_found(
    tmp_path: Path, ranks: list[list[tuple[str, str]]], batch: int, found: str
) -> None:
    for rank, calls in enumerate(ranks):
        events = [Event("a", 2, rank, *call, MAIN, True, batch) for call in calls]
        (tmp_path / str(rank)).write_text("".join(json.dumps(event) + "\n" for event in events))
    lines = findings(tmp_path)
    assert len(lines) == bool(found) and found in "".join(lines)
