"""GPT-OSS: sinks and windows in attention, YaRN, experts with biases and a clamped activation.

Experts have one projection with the rows of gate and up in turn. A folder has each linear layer of all
experts in one tensor, transposed: gate_up_proj [experts, hidden, 2 ffn] and gate_up_proj_bias. Here every
expert has tensors of its own: experts.3.gate_up.weight and experts.3.gate_up.bias.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from megatron_stppo.config import ConfigError
from megatron_stppo.weights.sharding.hf_fields import count_of, flag_of, rate_of
from megatron_stppo.weights.sharding.hf_names import ModelShape
from megatron_stppo.weights.sharding.parts import Attention, Experts, OwnSpans, Rows
from megatron_stppo.weights.sharding.tiles import PADDING, Entry, whole

YARN = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
NAMES = {*YARN, "truncate", "rope_theta", "rope_type", "type"}
WINDOWS = ("sliding_attention", "full_attention")  # kinds of layers in turn: to the last tokens, to all
STACK = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(gate_up|down)_proj(_bias)?")
EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)\d+\.(gate_up|down)\.(weight|bias)")


@dataclass(frozen=True)
class Yarn:
    """Rotary embeddings with lowered low frequencies, for longer contexts (Peng et al., arXiv 2309.00071).

    Example: that of gpt-oss-20b is Yarn(32.0, 32.0, 1.0, 4096.0, truncate=False).
    """

    factor: float  # by which frequencies are divided at most
    fast: float  # rotations within `original` tokens, from which on a frequency stays as it is
    slow: float  # and up to which it is divided by the whole factor
    original: float  # tokens of the context before its extension
    truncate: bool  # whether the bounds between the pairs of elements are rounded outwards

    @classmethod
    def of(cls, folder: Path, rope: Mapping[str, Any]) -> Self:
        """Read the settings of the rotary embeddings, all of which vLLM needs. Raises ConfigError for other
        settings, or if one is missing."""
        kind = rope.get("rope_type", rope.get("type", "default"))
        other = sorted(name for name in rope.keys() - NAMES if rope[name] is not None)
        if kind != "yarn" or other:
            field = f"{other[0]}={rope[other[0]]!r} of " if other else ""
            raise ConfigError(
                f"{folder}: {field}rope_type={kind!r} is not supported for this model_type; use a checkpoint "
                f"with rope_type='yarn' and only {sorted(NAMES - {'rope_theta', 'rope_type', 'type'})}"
            )
        factor, fast, slow, original = (rate_of(folder, rope, name) for name in YARN)
        return cls(factor, fast, slow, original, flag_of(folder, {"truncate": True, **rope}, "truncate"))

    @property
    def scale(self) -> float:
        """What queries and keys are multiplied by (equation 22)."""
        return 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    def frequencies(self, base: float, size: int) -> list[float]:
        """Return the angle per token of each pair of a head's `size` elements (equations 17 to 20)."""
        low, high = (self._pair(rotations, base, size) for rotations in (self.fast, self.slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        angles = []
        for pair in range(size // 2):
            divided = min(1.0, max(0.0, (pair - low) / (high - low or 0.001)))
            angles.append(base ** (-2 * pair / size) * (1 - divided + divided / self.factor))
        return angles

    def _pair(self, rotations: float, base: float, size: int) -> float:
        """Return the index of the pair that turns so often within `original` tokens, not rounded."""
        return size * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(base))


@dataclass(frozen=True)
class SinkAttention(Attention):
    """Attention with a sink per head, and biases in all linear layers."""

    window: int = 0  # tokens that a query sees, its own included; 0: all before

    def rows(self) -> list[Rows]:
        return [
            *super().rows(),
            # vLLM adds it on the first rank
            Rows(("o_proj.bias",), (self.hidden,), None, "linear_proj.bias", "o_proj.bias"),
            Rows(("sinks",), (self.heads,), 0, "core_attention.sinks", "sinks"),
        ]

    def products(self, lengths_N: Sequence[int]) -> int:
        """With a window of w tokens, L^2 - (L - w)^2 takes the place of L^2."""
        outside = [max(0, length - self.window) for length in lengths_N] if self.window else []
        return super().products(lengths_N) - super().products(outside)


class StackedExperts(Experts):
    router = "router"

    def rows(self) -> list[Rows]:
        return [*super().rows(), Rows(("router.bias",), (self.count,), None, "router.bias", "router.bias")]

    def expert_rows(self) -> list[Rows]:
        both, hidden = 2 * self.ffn, self.hidden
        return [
            Rows(("gate_up.weight",), (both, hidden), 0, "linear_fc1.weight", "w13_weight"),
            Rows(("down.weight",), (hidden, self.ffn), 1, "linear_fc2.weight", "w2_weight"),
            Rows(("gate_up.bias",), (both,), 0, "linear_fc1.bias", "w13_bias"),
            Rows(("down.bias",), (hidden,), None, "linear_fc2.bias", "w2_bias"),
        ]

    def serving_spans(self, prefix: str, size: int, rank: int) -> OwnSpans:
        spans = super().serving_spans(prefix, size, rank)
        if rank > 0:  # vLLM adds up the ranks' results with their biases
            spans |= {name: whole(PADDING, self.hidden) for name in spans if ".w2_bias." in name}
        return spans


@dataclass(frozen=True)
class GptOss(ModelShape):
    window: int = 0  # tokens that sliding attention sees, the token itself included
    yarn: Yarn | None = None

    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    importers: ClassVar[Mapping[str, str]] = {"mxfp4": "examples/gpt-oss-20b/import_mxfp4.py"}
    missing: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_theta": 150000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }
    fixed: ClassVar[Mapping[str, Any]] = {  # vLLM computes with these, whatever config.json has
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    unchecked = frozenset({"sliding_window", "qkv_bias"})
    mixture = True
    qkv_bias = True
    row_parallel = (*ModelShape.row_parallel, ".down.weight")
    served: ClassVar[Mapping[str, str]] = {".self_attn.": ".attn.", "embed_tokens": "embedding"}
    layer_class = "megatron_stppo.families.gpt_oss.layers:SinkLayers"
    only_local = "attention with sinks"
    gpu_attention = ("FLASH_ATTN", "TRITON_ATTN")  # FlashInfer's copies the sinks when the engine is built
    repeats_kv_heads = False
    ffn_over_world = True

    @classmethod
    def own_fields(cls, folder: Path, given: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
        """Raises ConfigError for layer_types that are not in turn, which vLLM would not read."""
        layers, kinds = count_of(folder, given, "num_hidden_layers"), given.get("layer_types")
        known = [WINDOWS[layer % 2] for layer in range(layers)]
        if kinds is not None and kinds != known:
            raise ConfigError(
                f"{folder}: layer_types={kinds!r} is not supported; it must have {[*WINDOWS]} in turn for "
                f"the {layers} layers"
            )
        return {"window": count_of(folder, given, "sliding_window"), "yarn": Yarn.of(folder, rope)}

    def mixer(self, layer: int) -> SinkAttention:
        heads = (self.hidden, self.heads, self.kv_heads, self.head_dim)
        return SinkAttention(*heads, qkv_bias=True, window=0 if layer % 2 else self.window)

    @property
    def mlp(self) -> StackedExperts:
        return StackedExperts(self.hidden, self.ffn, self.linears, self.experts, self.experts_per_token)

    @classmethod
    def held(cls, entry: Entry) -> dict[str, Entry]:
        stack = STACK.fullmatch(entry.key)
        if stack is None or len(entry.shape) != (2 if stack[3] else 3):
            return {entry.key: entry}
        kind, shape = "bias" if stack[3] else "weight", entry.shape[:0:-1]
        return {
            f"{stack[1]}{expert}.{stack[2]}.{kind}": entry._replace(
                shape=shape, part=(expert, 0), transposed=not stack[3]
            )
            for expert in range(entry.shape[0])
        }

    @classmethod
    def stored(cls, name: str) -> str:
        of = EXPERT.fullmatch(name)
        return f"{of[1]}{of[2]}_proj{'_bias' * (of[3] == 'bias')}" if of else name

    @classmethod
    def is_stack(cls, stored: str) -> bool:
        return STACK.fullmatch(stored) is not None

    def cpu_obstacle(self, tensor: int) -> str:
        if self.ffn // tensor % 32:
            return f"experts of intermediate_size={self.ffn} over {tensor} ranks"
        return super().cpu_obstacle(tensor)
