from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_stppo.parallel.bridge import global_ranks
from tests.parallel.bridged import in_one_group
from tests.ranks import RankError, run_ranks


def test_the_other_programs_ranks_get_numbers_that_no_own_rank_has() -> None:
    assert global_ranks(0, 3, 2) == [0, 1, 2], "of two trainer ranks; the replica's rank gets 2"
    assert global_ranks(2, 3, 1) == [1, 2, 0], "of the replica; the trainer's ranks get 1 and 2"


def test_a_group_of_two_programs_exchanges_data_and_its_end_leaves_the_programs_own_groups(
    tmp_path: Path,
) -> None:
    with ThreadPoolExecutor() as threads:
        trainer = threads.submit(run_ranks, in_one_group, 3, tmp_path, 0, 4)
        replica = threads.submit(run_ranks, in_one_group, 1, tmp_path, 3, 4)
        started, ranks = time.monotonic(), trainer.result()
    with pytest.raises(RankError, match="died"):
        replica.result()
    assert time.monotonic() - started < 20, "less than the timeout of a collective"
    for rank, got in enumerate(ranks):
        assert got["rank"] == (rank, rank, 4) and got["globals"] == [0, 1, 2, 3]
        assert got["gathered"] == [b"", b"x", b"xx", b"xxx"]
        assert got["to all"] == [0, 1, 2, 3] and got["from 2"] == b"\x02" and got["any"] is True
        assert "by peer" in got["after a death"], "its connection is closed, or reset"
        assert got["own world"] == [b"\x00", b"\x01", b"\x02"]
