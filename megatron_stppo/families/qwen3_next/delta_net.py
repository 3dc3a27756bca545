"""Sizes of gated delta net layers, and where the rows of their tensors are.

A key head and the value heads that share it are one group. The trainer's in_proj and conv1d have the rows of
one group after another, so that tensor ranks hold consecutive rows under every division. A checkpoint has
all queries, then all keys, and so on (Qwen3.5), or in_proj group by group too (Qwen3-Next). vLLM keeps the
order of the checkpoint within a rank. Does not import torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron_stppo.weights.sharding.parts import Mixer, OwnSpans, Rows, Shapes, TrainingRank
from megatron_stppo.weights.sharding.tiles import Part, tile

MIXED = "qkv"  # parts that pass through the convolution
PARTS = MIXED + "zba"  # queries, keys, values, output gate, write strength (beta), decay


@dataclass(frozen=True)
class DeltaNet(Mixer):
    """Sizes of the gated delta net layers of a model.

    Example: Qwen3.5-9B is DeltaNet(4096, 16, 32, 128, 128, 4, joined=False).
    """

    hidden: int
    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int  # of a head
    value_dim: int  # of a head
    width: int  # tokens that the convolution reads, the token itself included
    joined: bool  # the checkpoint has in_proj_qkvz and in_proj_ba, group by group

    name = "linear_attn"
    recurrent = True

    @property
    def each(self) -> dict[str, int]:
        """The rows of each of PARTS in a group."""
        heads = self.value_heads // self.key_heads
        values = heads * self.value_dim
        return {"q": self.key_dim, "k": self.key_dim, "v": values, "z": values, "b": heads, "a": heads}

    @property
    def joint_rows(self) -> int:
        return self.count(PARTS)

    def count(self, parts: str) -> int:
        """Return the rows of these PARTS in all groups. Example: count("v") is value_heads * value_dim."""
        return self.key_heads * sum(self.each[part] for part in parts)

    @property
    def projections(self) -> dict[str, str]:
        """{in_proj of the checkpoint: the PARTS that it joins}"""
        return {"qkvz": "qkvz", "ba": "ba"} if self.joined else {"qkv": "qkv", "z": "z", "b": "b", "a": "a"}

    def rows(self) -> list[Rows]:
        same: list[tuple[str, tuple[int, ...], int | None]] = [
            ("A_log", (self.value_heads,), 0),
            ("dt_bias", (self.value_heads,), 0),
            ("norm.weight", (self.value_dim,), None),
            ("out_proj.weight", (self.hidden, self.count("v")), 1),
        ]
        return [Rows((name,), size, dim, name, name) for name, size, dim in same]

    def shapes(self, prefix: str) -> Shapes:
        names = {f"in_proj_{name}": self.count(of) for name, of in self.projections.items()}
        projected = {f"{prefix}{name}.weight": (rows, self.hidden) for name, rows in names.items()}
        mixed = {f"{prefix}conv1d.weight": (self.count(MIXED), 1, self.width)}
        return projected | mixed | super().shapes(prefix)

    def training_spans(self, source: str, target: str, at: TrainingRank) -> OwnSpans:
        own = self._groups(*at.tensor)
        projected = [self._projected(source, part, group) for group in own for part in PARTS]
        mixed = [self._mixed(source, part, group) for group in own for part in MIXED]
        spans = {"in_proj": tile(0, merged(projected)), "conv1d": tile(0, merged(mixed))}
        joint = {f"{target}{name}.weight": of for name, of in spans.items()}
        return joint | super().training_spans(source, target, at)

    def serving_spans(self, prefix: str, size: int, rank: int) -> OwnSpans:
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
        return spans | super().serving_spans(prefix, size, rank)

    def weights(self) -> int:
        return self.hidden * (self.count(PARTS) + self.count("v"))

    def products(self, lengths_N: Sequence[int]) -> int:
        """Count the rule token by token (rule.py): a token has three products with the state of a head, k^T
        S, the change of S, and q^T S.

        Example: 2 value heads and states [3, 5] take 2 * 3 * 2 * 3 * 5 = 180 FLOP per token.
        """
        return 6 * self.value_heads * self.key_dim * self.value_dim * sum(lengths_N)

    def state(self, itemsize: int) -> int:
        """A float32 matrix per head, and the inputs of the convolution of the last tokens. vLLM fills whole
        blocks, so that it takes somewhat more."""
        matrices = 4 * self.value_heads * self.key_dim * self.value_dim
        return matrices + itemsize * self.count(MIXED) * (self.width - 1)

    def _groups(self, size: int, rank: int) -> range:
        each = self.key_heads // size
        return range(rank * each, (rank + 1) * each)

    def _projected(self, prefix: str, part: str, group: int) -> Part:
        """Return the rows of a part of a group in the checkpoint's projections."""
        name, of = next((name, of) for name, of in self.projections.items() if part in of)
        return self._place(f"{prefix}in_proj_{name}.weight", of, part, group, grouped=self.joined)

    def _mixed(self, prefix: str, part: str, group: int) -> Part:
        """Return the rows of a part of a group in the checkpoint's conv1d, which is never grouped."""
        return self._place(f"{prefix}conv1d.weight", MIXED, part, group, grouped=False)

    def _place(self, key: str, of: str, part: str, group: int, *, grouped: bool) -> Part:
        rows, at = self.each, of.index(part)
        before = list(accumulate([rows[name] for name in of], initial=0))
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
