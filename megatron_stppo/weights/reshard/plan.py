"""The plan of a reshard: which rows are copied from where to where.

The plan is a pure function of two layouts, and every rank computes the same one. A layout is {rank: {tensor:
spans}}. Both layouts are described in rows of the Hugging Face checkpoint, so the same planner serves
training shards -> serving shards, training shards -> checkpoint and checkpoint -> shards. Nothing is
gathered: every row is sent at most once to each rank that needs it and does not hold it.
"""

import hashlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from megatron_stppo.weights.sharding.tiles import PADDING, Span, Spans

# The most bytes that a rank sends at once. On a GPU large messages use the links better; on a CPU allocating
# new memory costs more.
BUCKET_BYTES = {"cuda": 256 << 20, "cpu": 16 << 20}


class PlanError(ValueError):
    """Two layouts do not match. The message names the tensor and the rows."""


class RowCopy(NamedTuple):
    """A copy of rows from a tensor on one rank to a tensor on another rank, or on the same one.

    Rows source_offset .. source_offset + size - 1 of the source become rows target_offset .. target_offset +
    size - 1 of the target. Rows are counted along `dim` on both sides.
    """

    source_rank: int
    source: str
    source_offset: int
    target_rank: int
    target: str
    target_offset: int
    dim: int
    size: int
    hf_key: str


class Holder(NamedTuple):
    """A holder of rows [start, stop) of one hf_key: on `rank`, in `tensor`, from local row `local` on."""

    start: int
    stop: int
    rank: int
    tensor: str
    local: int
    dim: int


def plan_copies(
    sources: Mapping[int, Spans],
    targets: Mapping[int, Spans],
    widths: Mapping[str, int],
    *,
    ranks_per_node: int = 8,
    keys: Collection[str] | None = None,
) -> Iterator[RowCopy]:
    """Yield the copies that write every row of every target exactly once, or only those of the checkpoint
    tensors `keys`. Those of a cluster need not fit in memory.

    If several ranks hold a row, the target's own rank is preferred, then ranks of its node; among the
    remaining ranks the one that has sent least is chosen. widths: {hf_key: elements per row}. Raises
    PlanError if a layout does not tile its tensors, or if the two sides do not hold the same rows of every
    checkpoint tensor that the targets name.
    """
    holders = _holders(_flatten("source", sources))
    distinct = {id(spans): (rank, spans) for rank, spans in targets.items()}  # replicas share their layout
    _check_rows(_holders(_flatten("target", dict(distinct.values()))), holders)
    places = {key: _Places(held, ranks_per_node) for key, held in holders.items()}
    sent = dict.fromkeys(sources, 0)  # elements
    for rank, spans in targets.items():
        for name, tensor_spans in spans.items():
            for span in tensor_spans:
                if span.hf_key != PADDING and (keys is None or span.hf_key in keys):
                    for copy in _fetch(rank, name, span, places[span.hf_key], sent, ranks_per_node):
                        sent[copy.source_rank] += copy.size * widths[copy.hf_key]
                        yield copy


def digest(copies: Iterable[RowCopy]) -> str:
    """Return a hash that is equal on two ranks if and only if they planned the same copies in the same
    order."""
    found = hashlib.sha256()
    for copy in copies:  # one by one: those of a cluster are gigabytes of text
        found.update(repr(copy).encode())
    return found.hexdigest()


class _Places:
    """The holders of the rows of one key: intervals in order, the holders by rank, and the ranks by node."""

    def __init__(self, held: list[Holder], ranks_per_node: int) -> None:
        intervals: dict[int, dict[int, Holder]] = defaultdict(dict)
        for holder in held:
            intervals[holder.start].setdefault(holder.rank, holder)
        self.starts = sorted(intervals)
        self.by_rank = [intervals[start] for start in self.starts]
        self.ranks = [sorted(holders) for holders in self.by_rank]
        self.by_node: list[dict[int, list[int]]] = [defaultdict(list) for _ in self.starts]
        for nodes, ranks in zip(self.by_node, self.ranks, strict=True):
            for rank in ranks:
                nodes[rank // ranks_per_node].append(rank)


def _fetch(
    rank: int, name: str, span: Span, places: _Places, sent: Mapping[int, int], ranks_per_node: int
) -> Iterator[RowCopy]:
    at, stop, node = span.start, span.start + span.size, rank // ranks_per_node
    index = bisect_right(places.starts, at) - 1
    while at < stop:
        holders, source = places.by_rank[index], rank
        if rank not in holders:
            near = places.by_node[index].get(node) or places.ranks[index]
            source = min(near, key=sent.__getitem__)  # of equal ones, the lowest rank
        best = holders[source]
        if best.dim != span.dim:
            raise PlanError(
                f"{span.hf_key} is cut along {best.dim} in {best.tensor}, along {span.dim} in {name}"
            )
        size = min(stop, best.stop) - at
        source_offset, target_offset = best.local + at - best.start, span.local + at - span.start
        yield RowCopy(
            best.rank, best.tensor, source_offset, rank, name, target_offset, span.dim, size, span.hf_key
        )
        at += size
        index += 1


def _flatten(side: str, layouts: Mapping[int, Spans]) -> Iterator[tuple[str, Holder]]:
    """Yield (hf_key, holder) of every span except padding. Raises PlanError unless spans tile their tensors.

    Tiling means that every local row belongs to exactly one span, in order, along one dimension.
    """
    for rank, spans in layouts.items():
        for name, tensor_spans in spans.items():
            end, dim = 0, tensor_spans[0].dim
            for key, span_dim, start, size, local in tensor_spans:
                if local != end or size < 1 or span_dim != dim:
                    raise PlanError(
                        f"{side} rank {rank}, {name}: the span of {key or 'padding'} at local row {local} "
                        f"(dim {span_dim}) does not continue at row {end} of dim {dim}"
                    )
                end += size
                if key != PADDING:
                    yield key, Holder(start, start + size, rank, name, local, dim)


def _holders(flat: Iterator[tuple[str, Holder]]) -> dict[str, list[Holder]]:
    """Return the spans by checkpoint key.

    Raises PlanError unless the distinct spans of each key tile it from row 0, are held equally often, and no
    rank holds one twice. Ranks that hold the same tensor cut it at the same rows, so distinct spans must not
    overlap. This check finds spans that fit their tensor but name the wrong rows, also where another rank
    holds the right ones (keys and values of a group of heads are on several ranks of an engine).
    """
    holders: dict[str, list[Holder]] = defaultdict(list)
    for key, holder in flat:
        holders[key].append(holder)
    for key, held in holders.items():
        end = 0
        for start, stop in sorted({(h.start, h.stop) for h in held}):
            if start != end:
                raise PlanError(f"the spans of {key} on all ranks jump from row {end} to row {start}")
            end = stop
        if len({(h.rank, h.start) for h in held}) < len(held):
            rank, start = Counter((h.rank, h.start) for h in held).most_common(1)[0][0]
            raise PlanError(f"rank {rank} holds {key} twice from row {start} on")
        times = Counter(h.start for h in held).most_common()
        (most, many), (least, few) = times[0], times[-1]
        if many != few:
            raise PlanError(f"row {most} of {key} is held {many} times, and row {least} {few} times")
    return holders


def _check_rows(targets: Mapping[str, list[Holder]], sources: Mapping[str, list[Holder]]) -> None:
    for key, held in targets.items():
        if key not in sources:
            raise PlanError(f"no source holds {key}, which rank {held[0].rank} needs in {held[0].tensor}")
        ends = max(h.stop for h in sources[key]), max(h.stop for h in held)
        if ends[0] != ends[1]:
            raise PlanError(f"{key} has {ends[0]} rows in the sources and {ends[1]} in the targets")


def lower_bound(sources: Mapping[int, Spans], targets: Mapping[int, Spans], widths: Mapping[str, int]) -> int:
    """Return the number of elements that any plan must send between ranks.

    These are the elements that a rank needs and does not hold.
    """
    missing = 0
    for rank, spans in targets.items():
        own: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for tensor_spans in sources.get(rank, {}).values():
            for span in tensor_spans:
                own[span.hf_key].append((span.start, span.start + span.size))
        for tensor_spans in spans.values():
            for key, _, start, size, _ in tensor_spans:
                if key != PADDING:
                    held = sum(max(0, min(start + size, b) - max(start, a)) for a, b in own[key])
                    missing += (size - held) * widths[key]
    return missing


def buckets(copies: list[RowCopy], row_bytes: Callable[[RowCopy], int], limit: int) -> list[list[RowCopy]]:
    """Group the copies between ranks so that no rank sends or receives more than `limit` bytes per group.

    Copies larger than an eighth of the limit are split, so that groups are filled well. A single row is never
    split. The copies of every pair of ranks are spread evenly over all groups, so that no group waits for one
    busy link.
    """
    pieces = [piece for copy in copies for piece in _split(copy, row_bytes(copy), limit // 8)]
    total: dict[tuple[int, int], int] = defaultdict(int)
    for copy in pieces:
        total[copy.source_rank, copy.target_rank] += copy.size * row_bytes(copy)
    done: dict[tuple[int, int], int] = defaultdict(int)
    order: list[tuple[float, int]] = []
    for index, copy in enumerate(pieces):
        pair = copy.source_rank, copy.target_rank
        order.append((done[pair] / total[pair], index))
        done[pair] += copy.size * row_bytes(copy)
    groups: list[list[RowCopy]] = []
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    for _, index in sorted(order):
        copy = pieces[index]
        size = copy.size * row_bytes(copy)
        full = max(sent.get(copy.source_rank, 0), received.get(copy.target_rank, 0)) + size > limit
        if full or not groups:
            groups.append([])
            sent, received = {}, {}
        groups[-1].append(copy)
        sent[copy.source_rank] = sent.get(copy.source_rank, 0) + size
        received[copy.target_rank] = received.get(copy.target_rank, 0) + size
    return groups


def _split(copy: RowCopy, row_bytes: int, limit: int) -> Iterator[RowCopy]:
    rows = max(1, limit // row_bytes)
    for first in range(0, copy.size, rows):
        yield copy._replace(
            source_offset=copy.source_offset + first,
            target_offset=copy.target_offset + first,
            size=min(rows, copy.size - first),
        )
