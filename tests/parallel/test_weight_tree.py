"""Which replica passes weights to which, with replicas that are late, fail and die."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from megatron_stppo.parallel.weight_tree import CHILDREN, FAULTS, PATIENCE, TRAINER, Hop, Node, WeightTree


@dataclass
class World:
    """Replicas whose transfers take one second each. Times are those of a clock that only `run` moves."""

    count: int
    now: float = 0.0
    made: list[Hop] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree = WeightTree(lambda: self.now)
        for number in range(self.count):
            self.tree.nodes[f"r{number}"] = Node(1)

    def start(self) -> None:
        if first := self.tree.first():
            self.made.append(first)
        self.made += self.tree.hops()

    def running(self) -> list[Hop]:
        return list(self.tree._hops.values())

    def finish(self, move: Hop, failed: bool = False) -> None:
        for name in (move.source, move.target):
            if name in self.tree.nodes:
                self.tree.ended(move.route, name, failed)

    def lose(self, name: str) -> None:
        moves = [move for move in self.running() if name in (move.source, move.target)]
        self.tree.lost(name)
        for move in moves:
            self.finish(move, failed=True)

    def publish(self, version: int, late: set[str] = frozenset()) -> float:  # type: ignore[assignment]
        """Send a version to all; those that are late are ready after 10 s. Return the seconds it took."""
        began, self.made = self.now, []
        self.tree.begin(version)
        for name, node in self.tree.nodes.items():
            node.ready = node.ready if name in late else version
        while not all(node.version == version for node in self.tree.nodes.values()):
            self.start()
            moves = self.running()
            self.now += 1.0 if moves else 0.1
            if self.now - began > 10:
                for name in late:
                    self.tree.nodes[name].ready = version
            for move in moves:
                self.finish(move)
            assert self.now - began < 100, "nothing moves"
        return self.now - began


@pytest.mark.parametrize("count, most", [(1, 1), (2, 2), (4, 4), (8, 5), (16, 7), (128, 11)])
def test_the_trainer_sends_once_and_every_replica_receives_once_over_the_same_few_routes(
    count: int, most: int
) -> None:
    world = World(count)
    assert world.publish(0) <= most
    first = world.made
    assert world.publish(1) <= most
    for made in (first, world.made):
        assert Counter(move.target for move in made) == {f"r{n}": 1 for n in range(count)}
        assert [move.source for move in made].count(TRAINER) == 1
        assert max(Counter(m.source for m in made if m.source).values(), default=0) <= CHILDREN
    assert {move.route for move in world.made} == {move.route for move in first}
    assert len({move.route for move in first}) == count


def test_a_late_replica_delays_itself_and_nobody_that_could_get_the_weights_from_another() -> None:
    world = World(8)
    world.publish(0)
    parent = next(move.source for move in world.made if move.source not in (TRAINER, "r0"))
    children = {move.target for move in world.made if move.source == parent}
    assert world.publish(1, late={parent}) > 10
    when = [move.target for move in world.made]
    assert when[-1] == parent and children <= set(when[:-1])
    assert len(world.made) == 8


def test_the_trainer_waits_a_moment_for_the_replica_to_which_it_is_connected() -> None:
    world = World(2)
    world.publish(0)
    world.tree.begin(1)
    world.tree.nodes["r1"].ready = 1
    assert world.tree.first() is None
    world.now += PATIENCE + 0.1
    assert world.tree.first(tensor=1) is None and not world.tree.can_be_first(1)
    assert world.tree.first() == Hop("route-3", TRAINER, "r1", 1)


def test_a_transfer_to_a_replica_that_died_frees_the_sender_and_counts_as_no_failure() -> None:
    world = World(3)
    world.publish(0)
    world.tree.begin(1)
    for node in world.tree.nodes.values():
        node.ready = 1
    world.start()
    world.finish(world.running()[0])
    world.start()
    (move,) = world.running()
    world.tree.lost(move.target)
    assert world.tree.ended(move.route, move.source, failed=True) == []
    assert world.tree.nodes[move.source].faults == 0
    world.start()
    (other,) = world.running()
    assert other.source == move.source and other.target != move.target


def test_nobody_waits_for_a_replica_that_joins_and_it_gets_no_announcement() -> None:
    world = World(2)
    world.publish(0)
    world.tree.nodes["new"] = Node(1)
    assert world.tree.is_over
    assert world.tree.begin(1) == ["r0", "r1"]


def test_both_ends_of_transfers_that_fail_again_and_again_are_named_and_no_route_is_used_again() -> None:
    world, routes = World(2), set()
    world.tree.begin(0)
    world.start()
    world.finish(world.running()[0])
    for number in range(1, FAULTS + 1):
        world.start()
        (move,) = world.running()
        routes.add(move.route)
        found = world.tree.ended(move.route, "r1", failed=True)
        assert found == (["r1", "r0"] if number == FAULTS else [])
        world.tree.ended(move.route, "r0", failed=True)
    assert len(routes) == FAULTS


def test_failures_before_a_transfer_that_succeeds_are_forgotten() -> None:
    world = World(2)
    for version in range(2):
        world.tree.begin(version)
        for node in world.tree.nodes.values():
            node.ready = version
        world.start()
        world.finish(world.running()[0])
        for failed in [True] * (FAULTS - 1) + [False]:
            world.start()
            (move,) = world.running()
            assert world.tree.ended(move.route, move.target, failed) == []
            world.tree.ended(move.route, move.source, failed)


@pytest.mark.parametrize("seed", range(12))
def test_with_any_losses_and_failures_all_that_are_left_get_the_newest_version(seed: int) -> None:
    chance = random.Random(seed)
    world = World(chance.randint(1, 12))
    for version in range(4):
        world.tree.begin(version)
        for _ in range(60):
            for node in world.tree.nodes.values():
                if chance.random() < 0.7:
                    node.ready = version
            world.start()
            world.now += 1.0
            for move in world.running():
                if (drawn := chance.random()) < 0.05 and len(world.tree.nodes) > 1:
                    world.lose(chance.choice(sorted(world.tree.nodes)))
                elif drawn < 0.8:
                    world.finish(move, failed=drawn < 0.15)
            if chance.random() < 0.1:
                world.tree.nodes[f"new{len(world.made)}-{version}"] = Node(1)
            busy = [node.route for node in world.tree.nodes.values() if node.route]
            assert max(Counter(busy).values(), default=0) <= 2
        for _ in range(40):
            for node in world.tree.nodes.values():
                node.ready = version
            world.now += 2.0
            for move in world.running():
                world.finish(move)
            world.start()
        assert all(node.version == version for node in world.tree.nodes.values())
        assert world.tree.is_over
