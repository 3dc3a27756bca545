"""The layers of Qwen3-Next and Qwen3.5: gated delta nets, gated attention, and norms of 1 + weight."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_stppo.config import Config
from megatron_stppo.families.qwen3_next import Hybrid
from megatron_stppo.families.qwen3_next.delta_net import DeltaNet
from megatron_stppo.families.qwen3_next.gated_delta_net import GatedDeltaNet, chosen
from megatron_stppo.model.layers import Layers, Norm, RMSNorm, wide
from megatron_stppo.weights.sharding.parts import Mixer


class OffsetNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight. transformers computes it in float32."""

    def forward(self, x: Tensor) -> Tensor:
        high = wide(x.dtype)
        scale = 1 + self.weight.to(high)
        if x.is_cuda or high != torch.float32:
            return torch.nn.functional.rms_norm(x.to(high), scale.shape, scale, self.eps).to(x.dtype)
        out: Tensor = Norm.apply(x.to(high), scale, self.eps)  # type: ignore[no-untyped-call]
        return out.to(x.dtype)


class GatedSelfAttention(SelfAttention):
    """Attention whose result is multiplied by sigmoid of a gate, which linear_qkv computes beside queries."""

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Return query, key, value and gate.

        With more tensor ranks than groups of heads, megatron gives a rank its queries of a group, but the
        gates of the whole group.
        """
        query, key, value, gate = super().get_query_key_value_tensors(*args, **kwargs)
        own, whole = query.shape[2], gate.shape[2]
        if own < whole:
            first = dist.get_rank(self.pg_collection.tp) % (whole // own) * own
            gate = gate[:, :, first : first + own]
        return query, key, value, gate

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """megatron compiles this product with torch.compile, which the CPU platform has not."""
        return x * gate.reshape(x.shape).sigmoid()


class HybridLayers(Layers):
    norm = OffsetNorm

    def __init__(self, shape: Hybrid, config: Config, dtype: torch.dtype) -> None:
        super().__init__(shape, config, dtype)
        self._shared, self._kernels = shape.shared_ffn, chosen(config, dtype)

    def settings(self, fields: Mapping[str, Any]) -> TransformerConfig:
        own: dict[str, Any] = {"attention_output_gate": True}
        if self._shared:
            own |= {"moe_shared_expert_intermediate_size": self._shared, "moe_shared_expert_gate": True}
        return super().settings(own | dict(fields))

    def local(self, mixer: Mixer) -> Any:
        spec = super().local(mixer)
        spec.submodules.self_attention.module = GatedSelfAttention
        if isinstance(mixer, DeltaNet):
            sizes = {"sizes": mixer, "kernels": self._kernels}
            spec.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, params=sizes)
        return spec
