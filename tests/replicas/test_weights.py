from __future__ import annotations

import socket
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_stppo.cluster.launch.rendezvous import files_needed
from megatron_stppo.parallel.layout import Layout
from megatron_stppo.replicas.wire.weights import Link, LinkLost, layouts_of, why_lost
from megatron_stppo.weights.reshard.plan import lower_bound
from megatron_stppo.weights.sharding.spans import row_widths
from tests.ranks import RankError
from tests.replicas import linked
from tests.replicas.two_programs import Programs, run_programs

FOUR, ONE = Layout(2, 1, 2), Layout()
Ended = dict[str, Future[list[Any]]]


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A trainer of 4 ranks (tensor=2), one replica that is updated all the time, and others that fail."""
    folder = tmp_path_factory.mktemp("four")
    programs: Programs = {
        "trainer": (linked.train, 4, (folder,)),
        "good": (linked.serve, 1, (folder, FOUR, "good", (1, 2, 3, 4, 5, 6, 7))),
        "late": (linked.serve, 1, (folder, FOUR, "late", (9,))),
    }
    for name in linked.FAILING:
        programs[name] = (linked.fail, 1, (folder, FOUR, name))
    return run_programs(programs)


def test_after_a_sync_the_replica_has_the_trainers_rows_bit_for_bit(four_ranks: Ended) -> None:
    (good,) = four_ranks["good"].result()
    assert good == [(1.0, 1), (-1.0, 2), (1.0, 3), (-1.0, 4), (1.0, 5), (-1.0, 6), (1.0, 7)]


def test_a_link_opens_the_files_that_a_rank_makes_room_for(four_ranks: Ended) -> None:
    first, *others = (seen["files"] for seen in four_ranks["trainer"].result())
    late = 3  # connections between the trainer's ranks that may be opened meanwhile
    assert all(4 + 5 <= files <= 4 + 5 + late for files in others), "connections to 4 ranks, 5 others"
    assert max(others) < first <= files_needed(4, replicas=1) - files_needed(4) + late


def test_every_row_travels_once(four_ranks: Ended) -> None:
    route = linked.route("good", 0, FOUR)
    elements = lower_bound(*layouts_of(linked.SHAPE, route), row_widths(linked.SHAPE))
    for seen in four_ranks["trainer"].result():
        assert seen["first"].bytes_moved == seen["late"].bytes_moved == 4 * elements
        assert seen["first"].bytes_self == 0


@pytest.mark.parametrize("when", linked.KILLED)
def test_if_a_replica_is_killed_all_trainer_ranks_raise_and_serve_another_one(
    four_ranks: Ended, when: str
) -> None:
    with pytest.raises(RankError, match="rank 0 died"):
        four_ranks[when].result()
    ranks = four_ranks["trainer"].result()
    assert len({seen[when][0] for seen in ranks}) == 1, "the same exception"
    for seen in ranks:
        said, seconds = seen[when]
        assert said.startswith(f"weights were not sent over {when}: rank ")
        assert "\n" not in said and seconds < 10
        assert seen[f"{when} own world"] == [b"\x00", b"\x01", b"\x02", b"\x03"]
        assert seen[f"good after {when}"] > 1
    assert four_ranks["late"].result() == [[(1.0, 9)]]


def test_ranks_that_wait_for_a_silent_replica_raise_when_the_hub_says_that_it_is_lost(
    four_ranks: Ended,
) -> None:
    for seen in four_ranks["trainer"].result():
        said, seconds = seen["silent"]
        assert said.endswith("over silent: rank 0: GivenUp: no sign of life for 60 s") and seconds < 10
    (said,) = four_ranks["silent"].result()
    assert "link silent is closed (sync to version 2 failed" in said


def test_a_changed_row_fails_the_sync_on_both_sides_and_the_replica_serves_nothing(four_ranks: Ended) -> None:
    found = "ReshardError: 1 copies arrived changed, first model.embed_tokens.weight rows 0.."
    for seen in four_ranks["trainer"].result():
        assert f"ReshardError: rank 4: {found}" in seen["changed"][0]
    (said,) = four_ranks["changed"].result()
    assert said.startswith("LinkLost: ") and found in said
    assert "link changed is closed (sync to version 2 failed" in said


def test_both_sides_must_name_the_same_version(four_ranks: Ended) -> None:
    found = "the ranks of link other version sync to different versions: [2, 2, 2, 2, 3]"
    assert found in four_ranks["trainer"].result()[0]["other version"][0]
    assert found in four_ranks["other version"].result()[0]


def test_a_replica_of_two_ranks_gets_a_half_each_and_ends_if_one_of_them_dies(tmp_path: Path) -> None:
    ended = run_programs(
        {
            "trainer": (linked.train_two, 1, (tmp_path,)),
            "good": (linked.serve, 2, (tmp_path, ONE, "good", (1, 2))),
            "inside": (linked.fail, 2, (tmp_path, ONE, "inside", 1)),
            "full": (linked.fail, 1, (tmp_path, ONE, "full")),
        }
    )
    assert ended["good"].result() == [[(1.0, 1), (-1.0, 2)]] * 2
    (seen,) = ended["trainer"].result()
    elements = lower_bound(
        *layouts_of(linked.SHAPE, linked.route("good", 0, ONE, 2)), row_widths(linked.SHAPE)
    )
    assert seen["good"].bytes_moved == 4 * elements
    said, seconds = seen["inside"]
    assert said.startswith("weights were not sent over inside: ") and seconds < 10
    with pytest.raises(RankError, match="rank 1 died"):
        ended["inside"].result()
    assert seen["full"] == "ReshardError: rank 0: OutOfMemoryError: the GPU is full", "no lost replica"
    assert ended["full"].result()[0].startswith("LinkLost: weights were not sent over full: ")


def test_an_error_of_the_system_in_a_connection_means_that_the_replica_is_lost(world_of_one: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    route, store = linked.route("refused", port, ONE), dist.HashStore()
    with pytest.raises(LinkLost, match="over refused: rank 0: ConnectionRefusedError: "):
        Link({}, linked.SHAPE, route, False, store, linked.TIMEOUT)
    assert why_lost(store, ["refused"]).startswith("ConnectionRefusedError"), "the replica does not wait"
