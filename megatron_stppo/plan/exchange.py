"""The cost of the reshard of a whole cluster: the bytes over each link.

All layers of one model chunk have the same layout on its ranks, so one layer can be planned and counted for
all. The numbers of bytes are then exact, but which of several holders sends is chosen once for all these
layers.
"""

from collections import defaultdict
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass

from megatron_stppo.parallel.layout import Layout
from megatron_stppo.plan.assumptions import Gpu
from megatron_stppo.weights.reshard.plan import BUCKET_BYTES, lower_bound, plan_copies
from megatron_stppo.weights.sharding.hf_names import ModelShape
from megatron_stppo.weights.sharding.tiles import PADDING, Spans


@dataclass(frozen=True)
class ReshardCost:
    """What a reshard costs, over all ranks unless a field names one."""

    copies: int
    moved: int  # bytes between ranks
    least: int  # bytes that any plan must move between ranks
    at_home: int  # bytes copied within a rank
    between_nodes: int  # bytes
    busiest_rank: int  # bytes that it sends or receives, whichever is more
    busiest_node: int  # bytes that it sends to or receives from other nodes, whichever is more
    seconds: float  # a lower bound, by the busiest link

    @property
    def ratio(self) -> float:
        """Bytes moved, divided by the least; 1 if both are 0."""
        return 1.0 if self.moved == self.least else self.moved / max(self.least, 1)

    @property
    def staging(self) -> int:
        """Bytes of a rank's buffers: two to send and two to receive a bucket."""
        return 4 * min(BUCKET_BYTES["cuda"], self.busiest_rank)


def exchange(
    sources: Mapping[int, Spans],
    targets: Mapping[int, Spans],
    widths: Mapping[str, int],
    alike: Mapping[int, int],
    size: int,
    gpu: Gpu,
    changed: Collection[str] | None = None,
) -> ReshardCost:
    """Return the cost of a reshard from `sources` to `targets`.

    widths: {hf_key: elements per row}; alike: {planned layer: number of layers that it is counted for};
    size: bytes per element that is sent; changed: the checkpoint tensors that are sent (None: all). Raises
    PlanError if no source has a row of a target.
    """
    sources, targets = _only(sources, alike), _only(targets, alike)
    layers = {key: layer_of(key) for key in widths}
    weights = {key: 1 if layer is None else alike.get(layer, 0) for key, layer in layers.items()}
    if changed is not None:
        weights = {key: weight if key in changed else 0 for key, weight in weights.items()}
    widths = {key: width * weights[key] for key, width in widths.items()}  # one row of each counted layer
    links: dict[tuple[str, str, int], int] = defaultdict(int)  # {(rank or node, in or out, number): bytes}
    copies = moved = at_home = between = 0
    for copy in plan_copies(sources, targets, widths, ranks_per_node=gpu.per_node, keys=changed):
        copies += weights[copy.hf_key]
        sent = copy.size * widths[copy.hf_key] * size
        if copy.source_rank == copy.target_rank:
            at_home += sent
            continue
        moved += sent
        links["rank", "out", copy.source_rank] += sent
        links["rank", "in", copy.target_rank] += sent
        source, target = copy.source_rank // gpu.per_node, copy.target_rank // gpu.per_node
        if source != target:
            between += sent
            links["node", "out", source] += sent
            links["node", "in", target] += sent
    rank, node = (
        max((n for (kind, _, _), n in links.items() if kind == of), default=0) for of in ("rank", "node")
    )
    least = lower_bound(sources, targets, widths) * size
    seconds = max(rank / gpu.node_rate, node / gpu.network_rate)
    return ReshardCost(copies, moved, least, at_home, between, rank, node, seconds)


def layers_to_plan(shape: ModelShape, layout: Layout) -> dict[int, int]:
    """Return `alike` for a model.

    Every layer is planned, unless the model has experts, which would take millions of copies.
    """
    if not shape.experts:
        return dict.fromkeys(range(shape.layers), 1)
    return layers_alike(layout, shape.layers, shape.mixers)


def layers_alike(layout: Layout, layers: int, kinds: Sequence[object] = ()) -> dict[int, int]:
    """Return {first layer of a kind in a model chunk: number of its layers of this kind}.

    kinds: of each layer; empty: all layers are of one kind.
    Example: 8 layers on 2 stages: {0: 4, 4: 4}.
    """
    alike: dict[int, int] = {}
    for run in (run for stage in range(layout.pipeline) for run in layout.chunks(layers, stage)):
        first: dict[object, int] = {}
        for layer in run:
            of_kind = first.setdefault(kinds[layer] if kinds else None, layer)
            alike[of_kind] = alike.get(of_kind, 0) + 1
    return alike


def layer_of(hf_key: str) -> int | None:
    parts = hf_key.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else None


def _only(layouts: Mapping[int, Spans], layers: Container[int]) -> dict[int, Spans]:
    """Return the layouts without the tensors of other layers. Ranks that shared a layout still share it."""
    thinned: dict[int, Spans] = {}
    for spans in layouts.values():
        if id(spans) not in thinned:
            numbers = {name: {layer_of(span.hf_key) for span in parts} for name, parts in spans.items()}
            thinned[id(spans)] = {
                name: parts
                for name, parts in spans.items()
                if any(number is None or number in layers for number in numbers[name])
            }
    return {rank: thinned[id(spans)] for rank, spans in layouts.items()}


def shard_bytes(spans: Spans, widths: Mapping[str, int], size: int) -> int:
    """Return the bytes of a rank's tensors, including padding.

    A tensor of padding alone is a part of the vocabulary, with the row width of the embedding, or the bias of
    an expert.
    """
    total, vocabulary = 0, max(widths[key] for key in widths if "embed" in key)
    for name, parts in spans.items():
        alone = 1 if ".experts." in name else vocabulary
        width = next((widths[span.hf_key] for span in parts if span.hf_key != PADDING), alone)
        total += (parts[-1].local + parts[-1].size) * width * size
    return total
