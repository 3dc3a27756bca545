"""The modules of the models' layers: TransformerEngine's, or megatron's local modules with packed attention.

The two differ in their kernels and in the names of the norms' weights. A checkpoint can only be resumed
with the layers that wrote it (checkpoint/loading.py). Hugging Face folders work with both.
"""

import pkgutil
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_stppo.config import Config, ConfigError
from megatron_stppo.model.attention import PackedAttention
from megatron_stppo.model.experts import GroupedExperts
from megatron_stppo.model.token_model import TokenModel
from megatron_stppo.weights.sharding.hf_names import ModelShape
from megatron_stppo.weights.sharding.parts import LayerSpec, Mixer


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
        out: Tensor = Norm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return out


class Norm(torch.autograd.Function):
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


class Layers:
    """Builds the layers of a model. A family with modules of its own has a subclass in its folder."""

    norm: type[RMSNorm] = RMSNorm
    experts: type[GroupedExperts] = GroupedExperts

    def __init__(self, shape: ModelShape, config: Config, dtype: torch.dtype) -> None:
        """dtype: that of the model. Raises ConfigError for kernels that cannot run."""
        self._shape, self._spec = shape, layer_spec(config)

    def settings(self, fields: Mapping[str, Any]) -> TransformerConfig:
        """Return megatron's configuration with these fields."""
        return TransformerConfig(**fields)

    def block(self, settings: TransformerConfig, chunk: int | None = None) -> TransformerBlockSubmodules:
        """Return the layers of this rank's pipeline stage (of chunk `chunk` if it has several), and the norm
        that follows the model's last layer."""
        first, shape = get_transformer_layer_offset(settings, chunk), self._shape
        own = range(first, first + get_num_layers_to_build(settings, chunk))
        if self._spec == "transformer_engine":
            layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
                num_experts=shape.experts or None,
                moe_grouped_gemm=shape.experts > 0,
                qk_layernorm=shape.qk_norm,
            )
            return TransformerBlockSubmodules([layer] * len(own), layer_norm=gpt_layer_specs.TENorm)
        mixers = shape.mixers
        of_kind = {mixer: self.local(mixer) for mixer in set(mixers)}
        return TransformerBlockSubmodules([of_kind[mixers[n]] for n in own], layer_norm=self.norm)

    def local(self, mixer: Mixer) -> Any:
        """Return megatron's local layer with packed attention, and with a norm that supports sequence
        parallelism."""
        shape = self._shape
        spec = gpt_layer_specs.get_gpt_layer_local_spec(
            num_experts=shape.experts or None, qk_layernorm=shape.qk_norm, normalization="RMSNorm"
        )
        layer, attention = spec.submodules, spec.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        layer.input_layernorm = layer.pre_mlp_layernorm = self.norm
        if shape.experts:
            layer.mlp.submodules.router = Router
            layer.mlp.submodules.experts.module = self.experts
        if shape.qk_norm:
            attention.q_layernorm = attention.k_layernorm = self.norm
        return spec

    def finish(self, model: TokenModel) -> None:
        """Change a chunk of a model, before it has weights."""


def layers_of(shape: ModelShape, config: Config, dtype: torch.dtype) -> Layers:
    """Return the Layers of a model's family. Raises ConfigError as they do."""
    layers: Layers = pkgutil.resolve_name(shape.layer_class)(shape, config, dtype)
    return layers


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type that sums and states have: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
