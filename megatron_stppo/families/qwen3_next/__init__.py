"""Qwen3-Next, and Qwen3.5 (and Qwen3.6), dense and as mixtures: most layers are gated delta nets.

The other layers have attention whose rows of q_proj are [query, gate] of each head, and rotary embeddings on
a share of a head. All norms but that of a gated delta net multiply by 1 + weight. Of mixtures, all tokens
pass through one more expert, which has a gate.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from megatron_stppo.config import ConfigError
from megatron_stppo.families.qwen3_next.delta_net import DeltaNet
from megatron_stppo.weights.sharding.hf_fields import count_of, rate_of, rope_factor
from megatron_stppo.weights.sharding.hf_names import ModelShape
from megatron_stppo.weights.sharding.parts import Attention, Experts, Mlp, Rows
from megatron_stppo.weights.sharding.tiles import Entry, Part

KINDS = ("full_attention", "linear_attention")  # kinds of layers: attention, gated delta net
TEXT = "model.language_model."  # prefix of the text model in a model with images
MISSING = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 512,
}


@dataclass(frozen=True)
class GatedAttention(Attention):
    @property
    def query_rows(self) -> int:
        return 2 * self.heads * self.head_dim

    def group_queries(self, q_proj: str, group: int) -> list[Part]:
        """q_proj has the queries of a head, then its gate, then the next head; megatron all queries first."""
        dim, heads = self.head_dim, self.heads // self.kv_heads
        first = [2 * dim * (group * heads + n) for n in range(heads)]
        return [(q_proj, start + half, dim) for half in (0, dim) for start in first]


@dataclass(frozen=True)
class SharedExpert(Experts):
    shared: int = 0  # ffn of the expert that all tokens pass through

    def rows(self) -> list[Rows]:
        gate = "shared_expert_gate.weight"
        rows = [*super().rows(), Rows((gate,), (1, self.hidden), None, "shared_experts.gate_weight", gate)]
        for keys, size, dim, trained, served in Mlp(self.hidden, self.shared).rows():
            own = tuple(f"shared_expert.{key}" for key in keys)
            rows.append(Rows(own, size, dim, f"shared_experts.{trained}", f"shared_expert.{served}"))
        return rows

    def weights(self) -> int:
        return super().weights() + Mlp(self.hidden, self.shared).weights() + self.hidden


@dataclass(frozen=True)
class Hybrid(ModelShape):
    """The dense models."""

    kinds: tuple[str, ...] = ()  # of each layer, one of KINDS
    delta_net: DeltaNet | None = None
    shared_ffn: int = 0

    model_type = "qwen3_5_text"
    architecture = "Qwen3_5ForCausalLM"
    with_images = "qwen3_5"
    missing: ClassVar[Mapping[str, Any]] = MISSING | {"num_key_value_heads": 4}
    unchecked = frozenset({"partial_rotary_factor", "mrope_section"})
    qk_norm = True
    joined: ClassVar[bool] = False  # whether the projections of delta nets are in_proj_qkvz and in_proj_ba
    left_out: ClassVar[tuple[str, ...]] = ("mtp.", "model.visual.")
    row_parallel = (*ModelShape.row_parallel, "out_proj.weight")
    float32 = (".A_log",)  # as in vLLM
    layer_class = "megatron_stppo.families.qwen3_next.layers:HybridLayers"
    cpu_engine = "megatron_stppo.families.qwen3_next.cpu_engine"
    only_local = "gated delta nets"

    @classmethod
    def own_fields(cls, folder: Path, given: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
        net = DeltaNet(
            hidden=count_of(folder, given, "hidden_size"),
            key_heads=count_of(folder, given, "linear_num_key_heads"),
            value_heads=count_of(folder, given, "linear_num_value_heads"),
            key_dim=count_of(folder, given, "linear_key_head_dim"),
            value_dim=count_of(folder, given, "linear_value_head_dim"),
            width=count_of(folder, given, "linear_conv_kernel_dim"),
            joined=cls.joined,
        )
        if net.value_heads % net.key_heads:
            raise ConfigError(
                f"{folder}: linear_num_value_heads={net.value_heads} must be a multiple of "
                f"linear_num_key_heads={net.key_heads}; fetch config.json again"
            )
        shared = {"shared_ffn": count_of(folder, given, "shared_expert_intermediate_size")}
        return {
            "kinds": _kinds(folder, given),
            "delta_net": net,
            "rope_factor": rope_factor(folder, rope, allow_partial=True),
            "rotary_share": _rotary_share(folder, rope, given["head_dim"]),
            **(shared if cls.mixture else {}),
        }

    @classmethod
    def own_rope(cls, given: Mapping[str, Any], rope: Mapping[str, Any]) -> Mapping[str, Any]:
        """Without the settings that only position images, and without those that are null."""
        image = ("mrope_section", "mrope_interleaved")  # a text's three positions are equal
        known = {name: value for name, value in rope.items() if name not in image and value is not None}
        return {"partial_rotary_factor": given["partial_rotary_factor"]} | known

    def mixer(self, layer: int) -> DeltaNet | GatedAttention:
        if self.kinds[layer] == "linear_attention" and self.delta_net is not None:
            return self.delta_net
        return GatedAttention(self.hidden, self.heads, self.kv_heads, self.head_dim, qk_norm=True)

    @property
    def mlp(self) -> Mlp:
        if not self.experts:
            return super().mlp
        sizes = (self.experts, self.experts_per_token, self.shared_ffn)
        return SharedExpert(self.hidden, self.ffn, self.linears, *sizes)

    @classmethod
    def held(cls, entry: Entry) -> dict[str, Entry]:
        plain = entry.key.replace(TEXT, "model.", 1) if entry.key.startswith(TEXT) else entry.key
        held = super().held(entry._replace(key=plain))
        return {name: of._replace(key=entry.key) for name, of in held.items()}

    @property
    def divided(self) -> dict[str, int]:
        heads = {"linear_num_key_heads": self.delta_net.key_heads} if self.delta_net else {}
        return super().divided | heads | {"shared_expert_intermediate_size": self.shared_ffn}


class HybridMoe(Hybrid):
    model_type = "qwen3_5_moe_text"
    architecture = "Qwen3_5MoeForCausalLM"
    with_images = "qwen3_5_moe"
    missing: ClassVar[Mapping[str, Any]] = MISSING | {"num_key_value_heads": 2}
    ffn_field = "moe_intermediate_size"
    mixture = True


class Qwen3Next(HybridMoe):
    model_type = "qwen3_next"
    architecture = "Qwen3NextForCausalLM"
    with_images = ""
    missing: ClassVar[Mapping[str, Any]] = MISSING | {"num_key_value_heads": 2, "norm_topk_prob": True}
    always_renormalised = False
    joined = True
    left_out = ("mtp.",)


def _kinds(folder: Path, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return layer_types, or what follows from full_attention_interval.

    Raises ConfigError if the list has another length than the model has layers, or an unknown type.
    """
    layers, kinds = count_of(folder, given, "num_hidden_layers"), given.get("layer_types")
    if kinds is None:
        interval = count_of(folder, given, "full_attention_interval")
        return tuple(KINDS[(layer + 1) % interval > 0] for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= set(KINDS):
        raise ConfigError(
            f"{folder}: layer_types={kinds!r} is not supported; it must have one of {[*KINDS]} for each of "
            f"the {layers} layers"
        )
    return tuple(kinds)


def _rotary_share(folder: Path, rope: Mapping[str, Any], head_dim: int) -> float:
    """Return the share of a head that is rotated. Raises ConfigError unless that is an even number >= 2."""
    share = rate_of(folder, rope, "partial_rotary_factor")
    if share > 1 or int(head_dim * share) % 2 or int(head_dim * share) < 2:
        raise ConfigError(
            f"{folder}: partial_rotary_factor={share} of head_dim={head_dim} is not supported; use a "
            "checkpoint that rotates whole pairs of elements"
        )
    return share
