"""Sizes of gated delta net layers, and where the rows of their tensors are.

A key head and the value heads that share it are one group. The trainer's in_proj and conv1d have the rows of
one group after another, so that tensor ranks hold consecutive rows under every division. A checkpoint has
all queries, then all keys, and so on (Qwen3.5), or in_proj group by group too (Qwen3-Next). vLLM keeps the
order of the checkpoint within a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron_stppo.weights.sharding.tiles import Part, Span, tile, whole

MIXED = "qkv"  # parts that pass through the convolution
PARTS = MIXED + "zba"  # queries, keys, values, output gate, write strength (beta), decay


@dataclass(frozen=True)
class DeltaNet:
    """Sizes of the gated delta net layers of a model.

    Example: Qwen3.5-9B is DeltaNet(16, 32, 128, 128, 4, joined=False).
    """

    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int  # of a head
    value_dim: int  # of a head
    width: int  # tokens that the convolution reads, the token itself included
    joined: bool  # the checkpoint has in_proj_qkvz and in_proj_ba, group by group

    @property
    def rows(self) -> dict[str, int]:
        """The rows of each of PARTS in a group."""
        each = self.value_heads // self.key_heads
        values = each * self.value_dim
        return {"q": self.key_dim, "k": self.key_dim, "v": values, "z": values, "b": each, "a": each}

    def count(self, parts: str) -> int:
        """Return the rows of these PARTS in all groups. Example: count("v") is value_heads * value_dim."""
        return self.key_heads * sum(self.rows[part] for part in parts)

    @property
    def projections(self) -> dict[str, str]:
        """{in_proj of the checkpoint: the PARTS that it joins}"""
        return {"qkvz": "qkvz", "ba": "ba"} if self.joined else {"qkv": "qkv", "z": "z", "b": "b", "a": "a"}

    def shapes(self, prefix: str, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return {checkpoint name: shape} of a layer's tensors. Example of a prefix:
        "model.layers.0.linear_attn."."""
        return {
            **{
                f"{prefix}in_proj_{name}.weight": (self.count(of), hidden)
                for name, of in self.projections.items()
            },
            f"{prefix}conv1d.weight": (self.count(MIXED), 1, self.width),
            f"{prefix}A_log": (self.value_heads,),
            f"{prefix}dt_bias": (self.value_heads,),
            f"{prefix}norm.weight": (self.value_dim,),
            f"{prefix}out_proj.weight": (hidden, self.count("v")),
        }

    def training_spans(self, source: str, target: str, size: int, rank: int) -> dict[str, tuple[Span, ...]]:
        """Return the spans of the trainer's parameters on a tensor rank.

        source, target: the prefixes of the names in the checkpoint and in megatron, for example
        "model.layers.0.linear_attn." and "decoder.layers.0.self_attention.".
        """
        own = self._groups(size, rank)
        projected = [self._projected(source, part, group) for group in own for part in PARTS]
        mixed = [self._mixed(source, part, group) for group in own for part in MIXED]
        return {
            f"{target}in_proj.weight": tile(0, merged(projected)),
            f"{target}conv1d.weight": tile(0, merged(mixed)),
            **self._others(source, target, size, rank),
        }

    def serving_spans(self, prefix: str, size: int, rank: int) -> dict[str, tuple[Span, ...]]:
        """Return the spans of vLLM's parameters, whose names begin with `prefix` as in the checkpoint."""
        own = self._groups(size, rank)
        spans = {}
        for joined in ("qkvz", "ba"):
            order = [(part, group) for part in joined for group in own]
            if self.joined:
                order = [(part, group) for group in own for part in joined]
            rows = [self._projected(prefix, part, group) for part, group in order]
            spans[f"{prefix}in_proj_{joined}.weight"] = tile(0, merged(rows))
        mixed = [self._mixed(prefix, part, group) for part in MIXED for group in own]
        spans[f"{prefix}conv1d.weight"] = tile(0, merged(mixed))
        return spans | self._others(prefix, prefix, size, rank)

    def _groups(self, size: int, rank: int) -> range:
        each = self.key_heads // size
        return range(rank * each, (rank + 1) * each)

    def _others(self, source: str, target: str, size: int, rank: int) -> dict[str, tuple[Span, ...]]:
        heads, values = self.value_heads // size, self.count("v") // size
        return {
            f"{target}A_log": tile(0, [(f"{source}A_log", rank * heads, heads)]),
            f"{target}dt_bias": tile(0, [(f"{source}dt_bias", rank * heads, heads)]),
            f"{target}norm.weight": whole(f"{source}norm.weight", self.value_dim),
            f"{target}out_proj.weight": tile(1, [(f"{source}out_proj.weight", rank * values, values)]),
        }

    def _projected(self, prefix: str, part: str, group: int) -> Part:
        """Return the rows of a part of a group in the checkpoint's projections."""
        name, of = next((name, of) for name, of in self.projections.items() if part in of)
        return self._place(f"{prefix}in_proj_{name}.weight", of, part, group, grouped=self.joined)

    def _mixed(self, prefix: str, part: str, group: int) -> Part:
        """Return the rows of a part of a group in the checkpoint's conv1d, which is never grouped."""
        return self._place(f"{prefix}conv1d.weight", MIXED, part, group, grouped=False)

    def _place(self, key: str, of: str, part: str, group: int, *, grouped: bool) -> Part:
        rows, at = self.rows, of.index(part)
        before = list(accumulate([rows[one] for one in of], initial=0))
        if grouped:
            return key, group * before[-1] + before[at], rows[part]
        return key, self.key_heads * before[at] + group * rows[part], rows[part]


def merged(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with those joined that follow each other in one tensor.

    Example: [("x", 0, 2), ("x", 2, 3), ("y", 0, 1)] gives [("x", 0, 5), ("y", 0, 1)].
    """
    out: list[Part] = []
    for key, start, size in parts:
        if out and out[-1][0] == key and out[-1][1] + out[-1][2] == start:
            out[-1] = (key, out[-1][1], out[-1][2] + size)
        else:
            out.append((key, start, size))
    return out
