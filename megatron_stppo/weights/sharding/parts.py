"""The parts of a decoder's layers: names and shapes of their tensors, where the rows are, and what they cost.

A family may have other parts. Names begin with a prefix: `source` or `prefix` in the checkpoint, such as
"model.layers.0.self_attn.", and `target` in megatron, such as "decoder.layers.0.self_attention.". Does not
import torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from megatron_stppo.parallel.layout import Layout
from megatron_stppo.weights.sharding.tiles import Part, Span, cut, tile, whole

LayerSpec = Literal["local", "transformer_engine"]  # some weights have different names in the two
Shapes = dict[str, tuple[int, ...]]
OwnSpans = dict[str, tuple[Span, ...]]
EXPERT = {
    "local": "experts.local_experts.{expert}.{layer}.{kind}",
    "transformer_engine": "experts.{layer}.{kind}{expert}",
}
# TransformerEngine's layers join a norm with the linear layer that follows, unless that is a router
JOINED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


class TrainingRank(NamedTuple):
    """A rank of the trainer, and the layers that it builds."""

    layout: Layout
    rank: int
    spec: LayerSpec = "local"

    @property
    def tensor(self) -> tuple[int, int]:
        """(number of tensor ranks, index of this one)"""
        return self.layout.tensor, self.layout.coordinates(self.rank).tensor


class Rows(NamedTuple):
    """Tensors of equal size that megatron and vLLM hold in one, a tensor rank's rows of each after another.

    Example: Rows(("gate_proj.weight", "up_proj.weight"), (96, 64), 0, "linear_fc1.weight", "gate_up.weight").
    """

    keys: tuple[str, ...]  # in the checkpoint
    size: tuple[int, ...]  # of each of them
    dim: int | None  # which tensor ranks divide; None: all have the one whole tensor
    trained: str  # in megatron
    served: str  # in vLLM

    def spans(self, prefix: str, size: int, rank: int) -> tuple[Span, ...]:
        if self.dim is None:
            return whole(prefix + self.keys[0], self.size[0])
        own = self.size[self.dim] // size
        return tile(self.dim, [(prefix + key, rank * own, own) for key in self.keys])


def shapes_of(rows: Iterable[Rows], prefix: str) -> Shapes:
    return {prefix + key: one.size for one in rows for key in one.keys}


class LayerPart:
    def rows(self) -> list[Rows]:
        """Return the tensors of which megatron and vLLM hold the same rows."""
        raise NotImplementedError

    def shapes(self, prefix: str) -> Shapes:
        """Return {checkpoint name: shape}."""
        return shapes_of(self.rows(), prefix)

    def training_spans(self, source: str, target: str, at: TrainingRank) -> OwnSpans:
        """Return the spans of megatron's parameters on a rank."""
        return {target + one.trained: one.spans(source, *at.tensor) for one in self.rows()}

    def serving_spans(self, prefix: str, size: int, rank: int) -> OwnSpans:
        """Return the spans of vLLM's parameters on a rank; their names begin as in the checkpoint."""
        return {prefix + one.served: one.spans(prefix, size, rank) for one in self.rows()}

    def weights(self) -> int:
        """Return the number of weights that a token is multiplied with."""
        raise NotImplementedError


class Mixer(LayerPart):
    """What mixes the tokens of a sequence in a layer: attention, or a family's own."""

    name: ClassVar[str]  # of its tensors in the checkpoint
    recurrent: ClassVar[bool] = False  # whether tokens pass on a state, instead of keys and values

    @property
    def joint_rows(self) -> int:
        """The rows of megatron's projection of the input."""
        raise NotImplementedError

    def products(self, lengths_N: Sequence[int]) -> int:
        """Return the FLOP of the products without weights, of a forward pass over sequences."""
        raise NotImplementedError

    def cached(self, size: int) -> int:
        """Return the elements that one of `size` engine ranks keeps for each token."""
        return 0

    def state(self, itemsize: int) -> int:
        """Return the bytes that all ranks of an engine keep for each sequence."""
        return 0


@dataclass(frozen=True)
class Attention(Mixer):
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: bool = False

    name = "self_attn"

    @property
    def query_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def joint_rows(self) -> int:
        return self.query_rows + 2 * self.kv_heads * self.head_dim

    def rows(self) -> list[Rows]:
        size = (self.hidden, self.heads * self.head_dim)
        norms = [
            Rows((f"{x}_norm.weight",), (self.head_dim,), None, f"{x}_layernorm.weight", f"{x}_norm.weight")
            for x in ("qk" if self.qk_norm else "")
        ]
        return [*norms, Rows(("o_proj.weight",), size, 1, "linear_proj.weight", "o_proj.weight")]

    def shapes(self, prefix: str) -> Shapes:
        shapes, keys = Shapes(), self.kv_heads * self.head_dim
        for name, rows in {"q_proj": self.query_rows, "k_proj": keys, "v_proj": keys}.items():
            shapes[f"{prefix}{name}.weight"] = (rows, self.hidden)
            if self.qkv_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        return shapes | super().shapes(prefix)

    def training_spans(self, source: str, target: str, at: TrainingRank) -> OwnSpans:
        spans = super().training_spans(source, target, at)
        for kind in ("weight", "bias") if self.qkv_bias else ("weight",):
            spans[f"{target}linear_qkv.{kind}"] = self._grouped(source, kind, *at.tensor)
        return spans

    def serving_spans(self, prefix: str, size: int, rank: int) -> OwnSpans:
        """vLLM repeats each KV head on size / kv_heads ranks if there are fewer of them than ranks."""
        spans, queries = super().serving_spans(prefix, size, rank), self.query_rows // size
        keys, key_rank = max(1, self.kv_heads // size) * self.head_dim, rank // max(1, size // self.kv_heads)
        for kind in ("weight", "bias") if self.qkv_bias else ("weight",):
            parts = [(f"{prefix}{x}_proj.{kind}", key_rank * keys, keys) for x in "kv"]
            parts = [(f"{prefix}q_proj.{kind}", rank * queries, queries), *parts]
            spans[f"{prefix}qkv_proj.{kind}"] = tile(0, parts)
        return spans

    def weights(self) -> int:
        return self.hidden * (self.joint_rows + self.heads * self.head_dim)

    def products(self, lengths_N: Sequence[int]) -> int:
        return 2 * self.heads * self.head_dim * sum(length**2 for length in lengths_N)

    def cached(self, size: int) -> int:
        return 2 * max(1, self.kv_heads // size) * self.head_dim

    def group_queries(self, q_proj: str, group: int) -> list[Part]:
        """Return the rows of the queries of a KV group, in megatron's order."""
        rows = self.query_rows // self.kv_heads
        return [(q_proj, group * rows, rows)]

    def _grouped(self, prefix: str, kind: str, size: int, rank: int) -> tuple[Span, ...]:
        """Return the spans of megatron's linear_qkv: query heads, key and value of each KV group.

        The rows are divided evenly over the tensor ranks. With more ranks than KV groups, a boundary may be
        anywhere inside a group (megatron gathers the activations of the group). A rank may then hold only
        query rows, or a part of a key.
        """
        dim, parts = self.head_dim, list[Part]()
        for group in range(self.kv_heads):
            parts += self.group_queries(f"{prefix}q_proj.{kind}", group)
            parts += [(f"{prefix}{x}_proj.{kind}", group * dim, dim) for x in "kv"]
        own = self.joint_rows // size
        return cut(tile(0, parts), rank * own, own)


@dataclass(frozen=True)
class Mlp(LayerPart):
    """Three linear layers: down(silu(gate x) * up x)."""

    hidden: int
    ffn: int
    linears: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def projections(self, prefix: str) -> list[str]:
        """Return the names of gate, up and down, or those of one expert."""
        return [f"{prefix}{name}.weight" for name in self.linears]

    def router_weight(self, prefix: str) -> str:
        """Return the name of the router's weight; "" without experts."""
        return ""

    def rows(self) -> list[Rows]:
        return self._three("gate_up_proj.weight", "down_proj.weight")

    def _three(self, up: str, down: str) -> list[Rows]:
        """up, down: names in vLLM, which joins gate and up, as megatron does."""
        first, second, last = self.projections("")
        return [
            Rows((first, second), (self.ffn, self.hidden), 0, "linear_fc1.weight", up),
            Rows((last,), (self.hidden, self.ffn), 1, "linear_fc2.weight", down),
        ]

    def weights(self) -> int:
        return 3 * self.hidden * self.ffn


@dataclass(frozen=True)
class Experts(Mlp):
    """`count` such networks, of which a router chooses `chosen` for each token. ffn: of one expert."""

    count: int = 1
    chosen: int = 1

    router: ClassVar[str] = "gate"

    def router_weight(self, prefix: str) -> str:
        return f"{prefix}{self.router}.weight"

    def rows(self) -> list[Rows]:
        name = self.router_weight("")
        return [Rows((name,), (self.count, self.hidden), None, "router.weight", name)]

    def expert_rows(self) -> list[Rows]:
        """Return the tensors of one expert. vLLM stacks those of all in one tensor."""
        return self._three("w13_weight", "w2_weight")

    def shapes(self, prefix: str) -> Shapes:
        shapes, rows = super().shapes(prefix), self.expert_rows()
        for expert in range(self.count):
            shapes |= shapes_of(rows, f"{prefix}experts.{expert}.")
        return shapes

    def training_spans(self, source: str, target: str, at: TrainingRank) -> OwnSpans:
        """Local expert numbers start at 0 on every rank."""
        spans, each = super().training_spans(source, target, at), self.count // at.layout.expert
        first, tensor, rows = at.layout.expert_rank(at.rank) * each, at.tensor, self.expert_rows()
        for local in range(each):
            for one in rows:
                layer, kind = one.trained.split(".")
                name = EXPERT[at.spec].format(expert=local, layer=layer, kind=kind)
                spans[target + name] = one.spans(f"{source}experts.{first + local}.", *tensor)
        return spans

    def serving_spans(self, prefix: str, size: int, rank: int) -> OwnSpans:
        """The name of an expert's slice of vLLM's tensor ends with the expert's number."""
        spans, rows = super().serving_spans(prefix, size, rank), self.expert_rows()
        for expert in range(self.count):
            for one in rows:
                name = f"{prefix}experts.routed_experts.{one.served}.{expert}"
                spans[name] = one.spans(f"{prefix}experts.{expert}.", size, rank)
        return spans

    def weights(self) -> int:
        return super().weights() * max(1, self.chosen) + self.hidden * self.count
