"""The rows about bandwidth between ranks, the shared folder, and the clocks of the nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import median, median_low

from megatron_stppo.preflight.limits import UNITS
from megatron_stppo.preflight.records import Facts, Together
from megatron_stppo.preflight.rows import EXCLUDE, CheckRow, bounded, none_of, unchecked

TCP = "look for NET/Socket with NCCL_DEBUG=INFO; set NCCL_IB_HCA, NCCL_SOCKET_IFNAME"
# (limit, name, remedy) by the number of nodes of a group; 3: all of them
KINDS = {
    1: ("min_bandwidth_node", "all-reduce within a node", f"nvidia-smi nvlink --status; {EXCLUDE}"),
    2: ("min_bandwidth_pair", "all-reduce of two nodes", TCP),
    3: (
        "min_bandwidth_all",
        "all-reduce of all nodes",
        "if all pairs pass, links between switches are slow",
    ),
}


def rows(
    facts: Mapping[int, Facts], together: Mapping[int, Together], limits: Mapping[str, float]
) -> Iterator[CheckRow]:
    """Yield the rows. Bandwidth is judged on GPUs only: gloo's has no limit, but is shown."""
    has_gpu = any(record.gpu for record in facts.values())
    groups = _groups(together)
    for size, (key, name, remedy) in KINDS.items():
        of_kind = {group: speed for group, speed in groups.items() if min(len(group), 3) == size}
        named = {"all" if size == 3 else " + ".join(group): speed for group, speed in of_kind.items()}
        row = bounded(name, named, key, limits[key], UNITS[key], remedy)
        if size == 2 and (slow := slow_nodes(of_kind, limits[key])):
            row = replace(row, remedy=f"{', '.join(slow)}: slow with both neighbours; {remedy}; {EXCLUDE}")
        yield row if has_gpu or not of_kind else unchecked(name, row.value)
    yield _visible(facts, together, limits)
    yield _skew(facts, together, limits)


def _groups(together: Mapping[int, Together]) -> dict[tuple[str, ...], float]:
    """Return {nodes of a group: bandwidth}: that of its fastest size and slowest rank."""
    speeds: dict[tuple[str, ...], dict[int, float]] = {}
    for rank, record in together.items():
        for one in record.bandwidth:
            of_group = speeds.setdefault(one.nodes, {})
            of_group[rank] = max(of_group.get(rank, 0.0), one.speed)
    return {group: min(of_group.values()) for group, of_group in speeds.items()}


def slow_nodes(pairs: Mapping[tuple[str, ...], float], limit: float) -> list[str]:
    """Return the nodes that are slow in each of their two or more pairs.

    Example: if a + b and b + c are below the limit, and a + c is not, b is slow.
    """
    of_node: dict[str, list[float]] = {}
    for pair, speed in pairs.items():
        for node in pair:
            of_node.setdefault(node, []).append(speed)
    return [node for node, speeds in of_node.items() if len(speeds) > 1 and max(speeds) < limit]


def _visible(
    facts: Mapping[int, Facts], together: Mapping[int, Together], limits: Mapping[str, float]
) -> CheckRow:
    name, limit = "run folder is shared", f"files of all nodes within {limits['max_visible']:g} s"
    seen = {rank: record for rank, record in together.items() if record.visible is not None}
    if not seen:
        return CheckRow(name, "not measured", limit, "not checked")
    hidden = {
        facts[r].node: f"does not see the file of {', '.join(x.hidden)}" for r, x in seen.items() if x.hidden
    }
    slowest = max(x.visible or 0.0 for x in seen.values())
    remedy = "set run.root to a file system that all nodes share; in an image, mount it (MOUNTS)"
    return none_of(name, hidden, limit, remedy, f"{slowest:.1f} s")


def _skew(
    facts: Mapping[int, Facts], together: Mapping[int, Together], limits: Mapping[str, float]
) -> CheckRow:
    """Return the row about the nodes' clocks, by their difference from the median clock.

    The lower median is one of the clocks, so that of two nodes one has the whole difference.
    """
    clocks = {rank: record.clock for rank, record in together.items() if record.clock}
    middle = [median_low(readings) for readings in zip(*clocks.values(), strict=True)]
    skew: dict[str, float] = {}
    for rank, readings in clocks.items():
        late = median(abs(a - b) for a, b in zip(readings, middle, strict=True))
        skew[facts[rank].node] = max(late, skew.get(facts[rank].node, 0.0))
    remedy = "start chronyd or ntpd on the node, or report it"
    return bounded("clocks of the nodes", skew, "max_skew", limits["max_skew"], UNITS["max_skew"], remedy)
