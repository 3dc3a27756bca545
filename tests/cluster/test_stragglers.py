from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_stppo.observe.observer import Stragglers, slowest
from tests.ranks import run_ranks


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def observe() -> tuple[list[dict[str, Any]], list[str], bool]:
    """Run four iterations in lock-step. Rank 1 takes 0.1 s where the others take 0.02 s."""
    kept, original = Kept(), dist.Work.wait
    logging.getLogger("megatron_stppo").addHandler(kept)
    stragglers, rows = Stragglers(ratio=2.5, patience=2), []
    for iteration in range(4):
        slow = dist.get_rank() == 1 and iteration != 2
        for phase in ("rollout", "score", "update"):
            with stragglers.phase(phase):
                for _ in range(5):
                    if phase == "rollout":  # not watched
                        time.sleep(0.1 if dist.get_rank() == 0 else 0.0)
                    else:
                        time.sleep(0.1 if slow else 0.02)
                    dist.all_reduce(torch.ones(8))
                    dist.all_reduce(torch.ones(8), async_op=True).wait()
        rows.append(stragglers.compare())
    return rows, kept.lines, dist.Work.wait is original


def test_a_rank_that_the_others_wait_for_is_named_after_some_iterations_in_a_row() -> None:
    first, second, third = run_ranks(observe, 3)
    assert first[0] == second[0] == third[0]
    rows, restored = first[0], first[2]
    assert [row["straggler/rank"] for row in rows] == [None, 1, None, None]
    assert [row["straggler/ratio"] > 2.5 for row in rows] == [True, True, False, True]
    assert len(first[1]) == len(second[1]) == 1 and not third[1]
    assert first[1][0].startswith("rank 1 took ")
    assert restored


@pytest.mark.parametrize(
    ("seconds", "rank", "ratio"),
    [([1.0, 3.0, 2.0], 1, 2.0), ([2.0, 1.0], 0, 2.0), ([4.0], 0, 1.0), ([1.0, 1.0, 1.0, 1.6], 3, 1.6)],
)
def test_a_rank_is_compared_with_the_median_of_the_others(
    seconds: list[float], rank: int, ratio: float
) -> None:
    assert slowest(seconds) == (rank, pytest.approx(ratio))
