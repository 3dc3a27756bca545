"""The modules of the models' layers: TransformerEngine's, or megatron's local modules with packed attention.

The two differ in their kernels and in the names of the norms' weights. A checkpoint can only be resumed
with the layers that wrote it (checkpoint/fit.py). Hugging Face folders work with both.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.model.attention import GatedAttention, PackedAttention, Pieces, repeated_heads
from megatron_stppo.model.delta_net.convolution import wide
from megatron_stppo.model.delta_net.kernels import Kernels
from megatron_stppo.model.delta_net.layer import GatedDeltaNet
from megatron_stppo.model.experts.grouped_experts import GroupedExperts
from megatron_stppo.model.gpt_oss.biased_experts import BiasedExperts
from megatron_stppo.model.gpt_oss.sinks import FlashPieces, SinkOnFlash, with_sinks
from megatron_stppo.weights.sharding.delta_net import DeltaNet
from megatron_stppo.weights.sharding.hf_names import ModelShape
from megatron_stppo.weights.sharding.spans import LayerSpec


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor that megatron expects.

    The gradient of the weight is summed over sequence-parallel ranks. In float32 on a CPU, the backward pass
    is one formula instead of torch's backward of each operation.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda or x.dtype != torch.float32:
            return super().forward(x)
        out: Tensor = _Norm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return out


class OffsetNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight. transformers computes it in float32."""

    def forward(self, x: Tensor) -> Tensor:
        high = wide(x.dtype)
        scale = 1 + self.weight.to(high)
        if x.is_cuda or high != torch.float32:
            return torch.nn.functional.rms_norm(x.to(high), scale.shape, scale, self.eps).to(x.dtype)
        out: Tensor = _Norm.apply(x.to(high), scale, self.eps)  # type: ignore[no-untyped-call]
        return out.to(x.dtype)


class _Norm(torch.autograd.Function):
    """y = n w with n = x / sqrt(mean(x^2) + eps), over the last dimension of float32 [..., H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        n = x * inverse
        ctx.save_for_backward(n, inverse, weight)
        return n * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        n, inverse, weight = ctx.saved_tensors
        product = gradient * n
        along = (product @ weight[:, None]) / len(weight)  # the component that only changes the length
        of_x = (gradient * weight).sub_(n * along).mul_(inverse)
        return of_x, product.flatten(0, -2).sum(0), None


class Router(TopKRouter):
    """megatron's router with logits in float32, or in float64 for such inputs. megatron 0.16.1 needs
    TransformerEngine for these."""

    def gating(self, input: Tensor) -> Tensor:
        high = wide(input.dtype)
        bias = None if self.bias is None else self.bias.to(high)
        return torch.nn.functional.linear(input.to(high), self.weight.to(high), bias)


class SinkAttention(PackedAttention):
    """Attention with a sink per head (gpt_oss/sinks.py), to the last `window` tokens; 0: to all."""

    def __init__(
        self, config: TransformerConfig, *args: Any, window: int, pg_collection: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.window, self.tp_group = window, pg_collection.tp
        own = config.num_attention_heads // self.tp_group.size()
        self.sinks = torch.nn.Parameter(torch.zeros(own, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.sinks, is_parallel=True, dim=0, stride=1)

    def _attend_piece(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return with_sinks(q, k, v, self.sinks, self.scale, self.window)

    def _attend_cuda(self, query: Tensor, key: Tensor, value: Tensor, pieces: Pieces) -> Tensor:
        flash = FlashPieces(
            pieces.query_offsets, pieces.key_offsets, max(pieces.queries), max(pieces.keys),
            self.scale, self.window,
        )  # fmt: skip
        out: Tensor = SinkOnFlash.apply(
            query, repeated_heads(key, query, 1), repeated_heads(value, query, 1), self.sinks, flash
        )
        return out

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Return megatron's description of this rank's sinks, for checkpoints."""
        return make_sharded_tensors_for_checkpoint(
            {"sinks": self.sinks},
            prefix,
            {"sinks": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


def layer_spec(config: Config) -> LayerSpec:
    """Return model.layers. `auto` is `local` until TransformerEngine's layers have completed a step on a GPU.

    Raises ConfigError if model.layers is transformer_engine and that is not available.
    """
    wanted = config.model.layers
    if wanted == "transformer_engine" and not (gpt_layer_specs.HAVE_TE and torch.cuda.is_available()):
        raise ConfigError(
            "model.layers=transformer_engine: TransformerEngine cannot be imported, or there is no GPU; "
            "install it (see Dockerfile), or choose local"
        )
    return "local" if wanted == "auto" else wanted


def block_spec(
    spec: LayerSpec,
    settings: TransformerConfig,
    shape: ModelShape,
    chunk: int | None = None,
    kernels: Kernels | None = None,
) -> TransformerBlockSubmodules:
    """Return the layers of this rank's pipeline stage (of chunk `chunk` if it has several), and the norm that
    follows the model's last layer. kernels: those of gated delta nets, instead of torch's operations."""
    if spec == "transformer_engine":
        layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=shape.experts or None, moe_grouped_gemm=shape.experts > 0, qk_layernorm=shape.qk_norm
        )
        norm = gpt_layer_specs.TENorm
        return TransformerBlockSubmodules([layer] * get_num_layers_to_build(settings, chunk), layer_norm=norm)
    norm = OffsetNorm if shape.offset_norm else RMSNorm
    of_kind = {
        kind: _local_layer(shape, norm, *kind, kernels)
        for kind in {(shape.delta_net_of(n), shape.window_of(n)) for n in range(shape.layers)}
    }
    first = get_transformer_layer_offset(settings, chunk)
    own = range(first, first + get_num_layers_to_build(settings, chunk))
    layers = [of_kind[shape.delta_net_of(n), shape.window_of(n)] for n in own]
    return TransformerBlockSubmodules(layers, layer_norm=norm)


def _local_layer(
    shape: ModelShape, norm: type[RMSNorm], net: DeltaNet | None, window: int, kernels: Kernels | None
) -> Any:
    """Return megatron's local layer with packed attention, or a gated delta net of the sizes `net`, and with
    a norm that supports sequence parallelism. window: of attention with sinks."""
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=shape.experts or None, qk_layernorm=shape.qk_norm, normalization="RMSNorm"
    )
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    attention.core_attention = partial(SinkAttention, window=window) if shape.sinks else PackedAttention
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    if shape.experts:
        layer.mlp.submodules.router = Router
        layer.mlp.submodules.experts.module = BiasedExperts if shape.stacked else GroupedExperts
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = norm
    if shape.output_gate:
        layer.self_attention.module = GatedAttention
    if net is not None:
        layer.self_attention = ModuleSpec(module=GatedDeltaNet, params={"sizes": net, "kernels": kernels})
    return spec
