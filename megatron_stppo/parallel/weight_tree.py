"""Which replica gets a version of the weights from which: a tree that grows from one replica to all others.

The trainer sends a version to one replica, the first. Every replica that has the version passes it on, to one
other at a time, so the number of replicas that have it about doubles with every transfer, and the trainer
sends as much to 128 replicas as to one. Pairs that are connected already come first, so that a run makes
about as many process groups as it has replicas.

Nothing here waits, sends or takes a lock: crew.py does.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

CHILDREN = 2  # replicas to which one passes weights, unless nothing else moves: groups need memory
PATIENCE = 1.0  # seconds in which nothing moves, after which a pair is connected although each has a link
FAULTS = 3  # failed transfers in succession after which a replica is lost
TRAINER = ""  # the trainer, where a replica is named by its group


@dataclass
class Node:
    """A replica, as a holder of weights. Example: Node(2) has 2 ranks and no weights yet."""

    tensor: int  # ranks
    version: int = -1  # of its weights; -1: none, or they are being written
    ready: int = -1  # the version that it waits for
    has_joined: bool = False  # it has had weights
    route: str = ""  # of the transfer that it is in
    faults: int = 0  # failed transfers in succession


@dataclass(frozen=True)
class Hop:
    """A transfer. Example: Hop("route-3", "member-1", "member-2", 4) sends version 4."""

    route: str
    source: str  # TRAINER, or a replica
    target: str
    version: int


@dataclass
class WeightTree:
    """The replicas and their transfers. Replicas are named by their group (crew.py).

    clock: returns seconds. Example: with nodes a, b and c without weights, and version 0:
        tree.first() is Hop("route-1", TRAINER, "a", 0)
        after tree.ended("route-1", "a"): list(tree.hops()) is [Hop("route-2", "a", "b", 0)]
    """

    clock: Callable[[], float] = time.monotonic
    nodes: dict[str, Node] = field(default_factory=dict)
    version: int = -1  # that is sent
    seconds: float = 0.0  # from the beginning of the last version until all had it
    stopped: bool = False  # no transfer begins any more
    _routes: dict[tuple[str, str], str] = field(default_factory=dict)  # by (source, target)
    _hops: dict[str, Hop] = field(default_factory=dict)  # whose target has not got the weights yet
    _made: int = 0
    _began: float = 0.0
    _changed: float = 0.0  # when the last transfer began or ended, or a version was announced

    def begin(self, version: int) -> list[str]:
        """Begin to send a version. Return the replicas to which it must be announced."""
        self.version, self._began, self._changed = version, self.clock(), self.clock()
        return [name for name, node in self.nodes.items() if node.has_joined and node.version != version]

    @property
    def is_over(self) -> bool:
        """Whether all that have joined have the version, or no replica can pass it on."""
        return self.is_stuck or all(n.version == self.version for n in self.nodes.values() if n.has_joined)

    @property
    def is_stuck(self) -> bool:
        """Whether no replica has the version, and none is getting it."""
        return not self._hops and all(node.version != self.version for node in self.nodes.values())

    @property
    def is_moving(self) -> bool:
        """Whether a replica is in a transfer."""
        return any(node.route for node in self.nodes.values())

    def first(self, tensor: int = 0) -> Hop | None:
        """Return the transfer that the trainer must begin, if no replica has the version, or is getting it.

        tensor: only to a replica of as many ranks to which the trainer has sent weights before; 0: to any.
        """
        if self.stopped or not self.is_stuck:
            return None
        linked = self._linked(tensor)
        able = [name for name, node in self.nodes.items() if self._waits(node)]
        if linked and not linked & set(able) and not self._is_late:
            return None  # the one that is linked will soon be ready
        name = next((n for n in able if n in linked), None if tensor or not able else able[0])
        return None if name is None else self._start(TRAINER, name)

    def can_be_first(self, tensor: int) -> bool:
        """Whether no replica has the version, and `first` will return a transfer for this number of ranks.

        False if others have waited for too long.
        """
        others_wait = self._is_late and any(self._waits(node) for node in self.nodes.values())
        return self.is_stuck and bool(self._linked(tensor)) and not others_wait

    def routes(self) -> set[str]:
        """Return the names of the routes of the trainer."""
        return {route for (source, _), route in self._routes.items() if source == TRAINER}

    def _linked(self, tensor: int) -> set[str]:
        linked = (target for source, target in self._routes if source == TRAINER)
        return {name for name in linked if tensor in (0, self.nodes[name].tensor)}

    def hops(self) -> Iterator[Hop]:
        """Yield the transfers between replicas that begin now."""
        while not self.stopped and (pair := self._next()) is not None:
            yield self._start(*pair)

    def ended(self, route: str, name: str, failed: bool = False) -> list[str]:
        """Note that a replica has left a transfer. Return the replicas with too many failed ones.

        A failure counts for both ends if the receiver reports it: one that has died reports nothing.
        """
        node = self.nodes[name]
        if node.route != route:
            return []
        node.route, self._changed = "", self.clock()
        if failed:
            self._routes = {pair: known for pair, known in self._routes.items() if known != route}
        if (hop := self._hops.get(route)) is None or hop.target != name:
            return []
        del self._hops[route]
        ends = [self.nodes[end] for end in (name, hop.source) if end in self.nodes]
        for end in ends:
            end.faults = end.faults + 1 if failed else 0
        if not failed:
            node.version, node.has_joined = hop.version, True
            if self.is_over:
                self.seconds = self.clock() - self._began
        return [end for end in (name, hop.source) if end in self.nodes and self.nodes[end].faults >= FAULTS]

    def lost(self, name: str) -> None:
        """Forget a replica. The other end of its transfers reports that they have failed."""
        del self.nodes[name]
        self._changed = self.clock()
        self._routes = {pair: route for pair, route in self._routes.items() if name not in pair}
        self._hops = {route: hop for route, hop in self._hops.items() if hop.target != name}

    def _waits(self, node: Node) -> bool:
        is_ready = node.ready == self.version or not node.has_joined
        return node.version != self.version and is_ready and not node.route

    @property
    def _is_late(self) -> bool:
        return self.clock() - self._changed > PATIENCE

    def _next(self) -> tuple[str, str] | None:
        """Return the next (source, target) of replicas. None: all wait for transfers, or have the version."""
        able = [n for n, node in self.nodes.items() if node.version == self.version and not node.route]
        waiting = [n for n, node in self.nodes.items() if self._waits(node)]
        if not waiting:
            return None
        for source in able:
            for target in waiting:
                if (source, target) in self._routes:
                    return source, target
        fewest = sorted(able, key=lambda name: self._children(name))
        has_parent = {target for source, target in self._routes if source in self.nodes}
        if fewest and self._children(fewest[0]) < CHILDREN:
            if new := next((name for name in waiting if name not in has_parent), None):
                return fewest[0], new
        if fewest and waiting and not self._hops and self._is_late:
            return fewest[0], waiting[0]
        return None

    def _children(self, name: str) -> int:
        return sum(source == name for source, _ in self._routes)

    def _start(self, source: str, target: str) -> Hop:
        if (route := self._routes.get((source, target))) is None:
            self._made += 1
            route = self._routes[source, target] = f"route-{self._made}"
        hop = self._hops[route] = Hop(route, source, target, self.version)
        self.nodes[target].route, self.nodes[target].version = route, -1
        if source != TRAINER:
            self.nodes[source].route = route
        self._changed = self.clock()
        return hop
