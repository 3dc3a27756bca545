"""Which replica plays which episodes."""

from megatron_stppo.replicas.trainer.member import shares


def test_episodes_go_to_the_replica_that_plays_fewest() -> None:
    assert shares(5, [0, 2], [8, 8]) == [3, 2]
    assert shares(1, [3, 1, 2], [8, 8, 8]) == [0, 1, 0]


def test_a_replica_gets_no_more_than_it_has_room_for() -> None:
    assert shares(9, [0, 0], [2, 4]) == [2, 4]
    assert shares(3, [4], [4]) == [0]
    assert shares(3, [], []) == []


def test_idle_replicas_get_the_shares_of_a_colocated_run() -> None:
    for replicas in (1, 2, 3, 4):
        for each in (1, 2, 7):
            assert shares(replicas * each, [0] * replicas, [99] * replicas) == [each] * replicas
